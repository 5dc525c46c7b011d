"""The model runner: executes step plans on one device.

    launch(plan): apply (released, entered, grown) ┬▶ build inputs ▶ compute ▶ sample ┬▶ copy to host ▶ handle
                                                   └▶ replay a graph (decode steps) ──┘

`launch` never waits for the device: everything it needs is on the host already, or stays on the device
(`SlotTables.last_token`). The KV cache is a plain list of (k, v) tensors, one pair a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from leadline.engine.attention import AttentionBackend
from leadline.engine.core.plan import SampledLogprobs, StepHandle, StepPlan, StepResult
from leadline.engine.models.base import CausalLM, KVWrite
from leadline.engine.profiling import Phases
from leadline.engine.runner.host_memory import lazy_zeros
from leadline.engine.runner.inputs import InputBuilder, StepInputs
from leadline.engine.runner.slots import SlotTables
from leadline.engine.runner.split import JoinedHandles, StepSplitter
from leadline.engine.sampling import LogprobRows, Sampler, gather_logprobs
from leadline.engine.sampling.slot_rows import upload
from leadline.engine.sampling.state import LOGPROBS, RANDOM

if TYPE_CHECKING:
    from leadline.engine.runner.graphs.decode import CaptureReport, DecodeGraphs, GraphStep

__all__ = [
    "KVCache",
    "ModelRunner",
    "PromptLogprobsPart",
    "RunnerHandle",
    "allocate_kv",
    "prompt_logprobs",
    "start_copy",
]


def start_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, once the stream has got there (at once on CPU)."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(slots=True)
class PromptLogprobsPart:
    """Log-probabilities of some consecutive prompt positions of a slot, with `count` alternatives each."""

    slot: int
    rows: LogprobRows
    count: int


@dataclass(slots=True)
class RunnerHandle:
    """A launched step: its tensors are copies to the host that are under way; `wait` makes a StepResult of
    them."""

    step_id: int
    tokens: torch.Tensor | None
    """int64 [S]; None when the step samples nothing."""
    logprobs: LogprobRows | None
    logprob_rows: list[int] = field(default_factory=list)
    """Sampled rows that `logprobs` belongs to."""
    logprob_counts: list[int] = field(default_factory=list)
    prompt_parts: list[PromptLogprobsPart] = field(default_factory=list)
    prompt_slots: list[int] = field(default_factory=list)
    """Slots that asked for prompt logprobs, those without any position included."""
    event: torch.cuda.Event | None = None

    def wait(self) -> StepResult:
        if self.event is not None:
            self.event.synchronize()
        tokens = [] if self.tokens is None else self.tokens.tolist()
        logprobs: list[SampledLogprobs | None] = [None] * len(tokens)
        if self.logprobs is not None:
            entries = self.logprobs.entries(self.logprob_counts)
            for row, entry in zip(self.logprob_rows, entries, strict=True):
                logprobs[row] = entry
        prompt: dict[int, list[SampledLogprobs]] = {slot: [] for slot in self.prompt_slots}
        for part in self.prompt_parts:
            prompt[part.slot].extend(part.rows.entries([part.count] * len(part.rows.token_ids)))
        return StepResult(self.step_id, tokens, logprobs, prompt)


def prompt_logprobs(
    plan: StepPlan,
    inputs: StepInputs,
    hidden: torch.Tensor,
    model: CausalLM,
    tables: SlotTables,
    num_top: np.ndarray,
    rows_at_once: int,
) -> list[PromptLogprobsPart]:
    """Return parts in prompt order for each row that asks. hidden [T, hidden size]; num_top by slot.

    The query at position p reports on the prompt token at p + 1. Logits of a whole chunk would be [tokens,
    vocab] floats, gigabytes for a long chunk and a large vocabulary. They are computed a slice at a time, so
    memory stays within what the profile run saw.
    """
    parts = []
    for index, row in enumerate(plan.rows):
        if not row.prompt_logprobs:
            continue
        first = int(inputs.host_cu_q[index])
        count = min(row.count, int(tables.prompt_len[row.slot]) - 1 - row.start)
        targets = tables.tokens[row.slot][row.start + 1 : row.start + 1 + max(count, 0)].astype(np.int64)
        top = int(num_top[row.slot])
        for begin in range(0, len(targets), rows_at_once):
            wanted = upload(targets[begin : begin + rows_at_once], hidden.device)
            logits = model.compute_logits(hidden[first + begin : first + begin + len(wanted)])
            rows = gather_logprobs(logits, wanted, top).to_host()
            parts.append(PromptLogprobsPart(row.slot, rows, top))
    return parts


KVCache = list[tuple[torch.Tensor, torch.Tensor]]

_PROMPT_LOGPROB_ROWS = 128
"""Positions whose logits exist at once while prompt logprobs are computed."""


def allocate_kv(
    model: CausalLM, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> KVCache:
    """Zeroed k and v, [num_blocks, block_size, num_kv_heads, head_dim], for each layer.

    Raises OutOfMemory."""
    shape = (num_blocks, block_size, model.num_kv_heads, model.head_dim)
    if device.type == "cpu":
        found = lazy_zeros([shape] * (2 * model.num_layers), dtype)
        return list(zip(found[::2], found[1::2], strict=True))
    return [
        (
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )
        for _ in range(model.num_layers)
    ]


class ModelRunner:
    """Implements `core.plan.Runner`. Plans must be launched in order, from one thread."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        kv_cache: KVCache,
        *,
        windows: tuple[int | None, ...],
        block_size: int,
        max_slots: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """windows: of each layer, among those of the backend's spec."""
        self.model = model
        self.backend = backend
        self.windows = windows
        self.kv_cache = kv_cache
        self.device = device
        self.block_size = block_size
        self.num_blocks = kv_cache[0][0].shape[0]
        self.tables = SlotTables(max_slots, -(-max_model_len // block_size), device)
        self.sampler = Sampler(max_slots, model.vocab_size, device)
        self.inputs = InputBuilder(self.tables, block_size)
        self.max_model_len = max_model_len
        self.graphs: DecodeGraphs | None = None
        """Captured steps; None runs every step eagerly."""
        self.graph_report: CaptureReport | None = None
        self.splitter: StepSplitter | None = None
        """Makes several steps of one where that is faster."""
        self.phases = Phases()

    def make_graphs(self, max_tokens: int, least: Callable[[int], int] = int) -> DecodeGraphs | None:
        """Graphs of this runner's steps of at most max_tokens tokens, none captured yet; None where steps
        cannot be captured. `least`: the smallest of what all ranks say."""
        if self.device.type != "cuda" or self.backend.graph_padding is None:
            return None
        try:
            from leadline.engine.runner.graphs.decode import DecodeGraphs
        except ImportError:  # no Triton
            return None
        return DecodeGraphs(
            self.model,
            self.backend,
            self.kv_cache,
            self.tables,
            self.sampler,
            windows=self.windows,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_tokens=max_tokens,
            least=least,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Start the step. Raises torch's OutOfMemoryError if activations do not fit."""
        self.sampler.release(plan.released)
        self.sampler.enter(plan.entered)
        pieces = [plan] if self.splitter is None else self.splitter.split(plan)
        later = [self._launch(piece) for piece in pieces[1:]]
        first = self._launch(pieces[0])
        return JoinedHandles(plan.step_id, [first, *later]) if later else first

    def _launch(self, plan: StepPlan) -> RunnerHandle:
        handle = RunnerHandle(plan.step_id, None, None)
        step = None
        if self.graphs is not None:
            with self.phases("forward"):
                step = self.graphs.run(plan)
        if step is None:
            self._launch_eager(plan, handle)
        elif len(step.slots):
            self._finish_graph(plan, handle, step)
        if self.device.type == "cuda":
            handle.event = torch.cuda.Event()
            handle.event.record()
        return handle

    def _finish_graph(self, plan: StepPlan, handle: RunnerHandle, step: GraphStep) -> None:
        """The graph's own tokens, or the eager sampler's where some row needs more than a temperature."""
        if plan.masks or bool(np.any(self.sampler.state.flags[step.slots] & ~np.uint8(RANDOM))):
            where = upload(np.stack((step.slots, step.positions)), self.device)
            self._sample(plan, handle, step.logits, step.slots, where[0], where[1])
        else:
            handle.tokens = start_copy(step.tokens)

    def _launch_eager(self, plan: StepPlan, handle: RunnerHandle) -> None:
        with self.phases("prepare"):
            self.tables.apply(plan)
            inputs = self.inputs.build(plan)
        handle.prompt_slots = [row.slot for row in plan.rows if row.prompt_logprobs]
        with self.phases("forward"):
            hidden, logits = self.compute(inputs, all_hidden=bool(handle.prompt_slots))
        if logits is not None:
            self._sample(
                plan,
                handle,
                logits,
                inputs.host_sample_slots,
                inputs.sample_slots,
                inputs.sample_positions,
            )
        if handle.prompt_slots:
            top = self.sampler.state.num_prompt_logprobs
            handle.prompt_parts = prompt_logprobs(
                plan, inputs, hidden, self.model, self.tables, top, _PROMPT_LOGPROB_ROWS
            )

    def _sample(
        self,
        plan: StepPlan,
        handle: RunnerHandle,
        logits: torch.Tensor,
        slots: np.ndarray,
        device_slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Sample eagerly; leave the tokens in `last_token` and, on their way to the host, in the handle."""
        with self.phases("sample"):
            tokens, logprobs = self.sampler.sample(logits, slots, device_slots, positions, plan.masks)
            self.tables.last_token.index_copy_(0, device_slots, tokens)
            handle.tokens = start_copy(tokens)
        if logprobs is not None:
            state = self.sampler.state
            rows = np.flatnonzero(state.flags[slots] & LOGPROBS)
            handle.logprobs = logprobs.to_host()
            handle.logprob_rows = rows.tolist()
            handle.logprob_counts = state.num_logprobs[slots[rows]].tolist()

    def compute(
        self, inputs: StepInputs, *, all_hidden: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tensors in, tensors out: hidden states [S, hidden] (or of all tokens, if all_hidden) and logits
        [S, vocab] of the rows that sample.

        Reads `last_token`, writes the KV cache; looks at no host data but the shapes in `inputs`.
        """
        ids, write = self.input_ids(inputs), None
        if self.model.writes_kv:
            inputs.batch.kv_written = True
            write = KVWrite(self.kv_cache, inputs.batch.slot_mapping)
        self.backend.begin(inputs.batch)
        rows = inputs.sample_tokens
        hidden = self.model.forward(ids, inputs.positions, self.attend, write, None if all_hidden else rows)
        if not len(inputs.sample_slots):
            return hidden, None
        last = hidden.index_select(0, rows) if all_hidden and rows is not None else hidden
        return hidden, self.model.compute_logits(last)

    def input_ids(self, inputs: StepInputs) -> torch.Tensor:
        """int64 [T] with the ids that earlier steps sampled filled in."""
        ones = inputs.num_ones
        if not ones:
            return inputs.input_ids
        sampled = self.tables.last_token.index_select(0, inputs.slots[:ones])
        ids = inputs.input_ids[:ones]
        filled = torch.where(ids < 0, sampled, ids)
        return filled if ones == len(inputs.input_ids) else torch.cat((filled, inputs.input_ids[ones:]))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`models.base.AttentionFn` of the step that `backend.begin` prepared."""
        k_cache, v_cache = self.kv_cache[layer]
        return self.backend.forward(q, k, v, k_cache, v_cache, self.windows[layer])
