"""StepPlan ⇄ bytes: slots, positions, new blocks, and the query tokens of this step. Never a whole prompt.

A prompt that is cached, or computed in a later chunk, does not cross: a row carries the tokens it computes,
and a worker keeps zeros for those it has not been given, which no row reads.

    leader's tokens of a slot   | cached | chunk 1 | chunk 2 |
    crosses with step 1                  | chunk 1 |
    worker's tokens             | 0 .. 0 | chunk 1 | 0 ... 0 |

Two things need more. Penalties count every token of a sequence, and bad words look at its last ones, so a
sequence that uses them brings all of its tokens when it enters; structured output brings a bitmask a row.
Both are large, so the ring sends what does not fit into a frame in pieces.

Arrays are little-endian int32, as in memory on every machine this runs on.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from leadline.engine.core.plan import NewSeq, StepPlan, StepRow
from leadline.engine.runner.slots import SlotTables
from leadline.engine.sampling_params import SamplingParams

__all__ = ["PlanDecoder", "PlanEncoder"]

_SAMPLE, _PROMPT_LOGPROBS, _TOKENS = 1, 2, 4


class _Entered(msgspec.Struct, array_like=True):
    slot: int
    seq_id: int
    num_tokens: int
    prompt_len: int
    seed: int
    sampling: SamplingParams
    blocks: bytes
    banned: tuple[int, ...]
    tokens: bytes | None
    """All of them, if the sampler has to know them."""


class _Plan(msgspec.Struct, array_like=True):
    step_id: int
    released: bytes
    entered: list[_Entered]
    grown: bytes
    """slot, number of blocks, blocks; and the next."""
    rows: bytes
    """[R, 4]: slot, start, count, flags"""
    tokens: bytes
    """Query tokens of the rows whose tokens the host knows, from entry or with the row, row after row."""
    masks: dict[int, bytes]


def _pack(values: Any) -> bytes:
    return np.asarray(values, dtype=np.int32).tobytes()


def _flags(row: StepRow) -> int:
    flags = row.sample * _SAMPLE | row.prompt_logprobs * _PROMPT_LOGPROBS
    return flags | (row.tokens is not None) * _TOKENS


def _unpack(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.int32)


class PlanEncoder:
    """The leader's side. `tables`: its runner's, read only, as they are before the plan is applied."""

    def __init__(self, tables: SlotTables) -> None:
        self._tables = tables
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, plan: StepPlan) -> bytes:
        entered = {seq.slot: np.array(seq.token_ids, dtype=np.int32) for seq in plan.entered}
        chunks = []
        for row in plan.rows:
            if row.tokens is not None:
                chunks.append(np.array(row.tokens, dtype=np.int32))
                continue
            tokens = entered.get(row.slot)
            if tokens is None:
                if row.start >= self._tables.known[row.slot]:
                    continue
                tokens = self._tables.tokens[row.slot]
            chunks.append(tokens[row.start : row.start + row.count])
        grown: list[int] = []
        for slot, blocks in plan.grown:
            grown += (slot, len(blocks), *blocks)
        return self._encoder.encode(
            _Plan(
                plan.step_id,
                _pack(plan.released),
                [self._enter(seq, entered[seq.slot]) for seq in plan.entered],
                _pack(grown),
                _pack([(row.slot, row.start, row.count, _flags(row)) for row in plan.rows]),
                np.concatenate(chunks).tobytes() if chunks else b"",
                {slot: _pack(mask) for slot, mask in plan.masks.items()},
            )
        )

    def _enter(self, seq: NewSeq, tokens: np.ndarray) -> _Entered:
        sampling = seq.sampling
        reads_output = sampling.reads_output
        if sampling.stop or sampling.stop_token_ids or sampling.structured is not None:
            # Not the runner's business, and as long as a caller likes.
            sampling = msgspec.structs.replace(sampling, stop=(), stop_token_ids=(), structured=None)
        return _Entered(
            seq.slot,
            seq.seq_id,
            len(tokens),
            seq.prompt_len,
            seq.seed,
            sampling,
            _pack(seq.block_ids),
            seq.banned_until_min,
            tokens.tobytes() if reads_output else None,
        )


class PlanDecoder:
    """A worker's side. Puts query tokens of sequences that run already into its runner's `tables`."""

    def __init__(self, tables: SlotTables) -> None:
        self._tables = tables
        self._decoder = msgspec.msgpack.Decoder(_Plan)

    def decode(self, data: bytes | bytearray) -> StepPlan:
        """The plan, to be launched before the next one is decoded."""
        coded = self._decoder.decode(data)
        plan = StepPlan(coded.step_id, released=_unpack(coded.released).tolist())
        entered = {seq.slot: self._tokens(seq) for seq in coded.entered}
        tokens, taken = _unpack(coded.tokens), 0
        for slot, start, count, flags in _unpack(coded.rows).reshape(-1, 4).tolist():
            plan.rows.append(
                StepRow(slot, start, count, bool(flags & _SAMPLE), bool(flags & _PROMPT_LOGPROBS))
            )
            if flags & _TOKENS:
                plan.rows[-1].tokens = tokens[taken : taken + count].tolist()
                taken += count
                continue
            target = entered.get(slot)
            if target is None:
                if start >= self._tables.known[slot]:
                    continue
                target = self._tables.tokens[slot]
            target[start : start + count] = tokens[taken : taken + count]
            taken += count
        for seq in coded.entered:
            plan.entered.append(
                NewSeq(
                    seq.slot,
                    seq.seq_id,
                    entered[seq.slot],  # type: ignore[arg-type]  # an array serves as well
                    seq.prompt_len,
                    seq.sampling,
                    seq.seed,
                    _unpack(seq.blocks).tolist(),
                    seq.banned,
                )
            )
        grown = _unpack(coded.grown).tolist()
        at = 0
        while at < len(grown):
            slot, count = grown[at : at + 2]
            plan.grown.append((slot, grown[at + 2 : at + 2 + count]))
            at += 2 + count
        plan.masks = {slot: _unpack(mask) for slot, mask in coded.masks.items()}
        return plan

    @staticmethod
    def _tokens(seq: _Entered) -> np.ndarray:
        if seq.tokens is not None:
            return _unpack(seq.tokens).copy()
        return np.zeros(seq.num_tokens, dtype=np.int32)
