"""The decoder over a fabric of threads: it sums where it should, reuses memory when it may, and asks for
nothing that a rank does not keep up to date."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from parallel_rig import tiny_model

from leadline.engine.hub.local import LocalModel
from leadline.engine.models.config import load_model_config
from leadline.engine.models.decoder import Decoder
from leadline.engine.models.loader import load_model
from leadline.engine.models.parallel import Sum, TensorParallel

SIZE, TOKENS = 2, 21


class Meeting:
    """What the ranks of one test share."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(SIZE, timeout=60)
        self.terms: dict[object, list[torch.Tensor]] = {}

    def sum(self, rank: int, which: object, mine: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.all(rank, which, mine)).sum(0)

    def all(self, rank: int, which: object, mine: torch.Tensor) -> list[torch.Tensor]:
        self.terms.setdefault(which, [mine] * SIZE)[rank] = mine
        self.barrier.wait()
        found = [term.clone() for term in self.terms[which]]
        self.barrier.wait()
        return found


class ThreadFabric:
    """`models.parallel.Fabric` with `room` tokens. Keeps only every SIZE-th row of the residual up to date
    and ruins the others, as two shots may, and ruins terms that have been summed."""

    def __init__(self, meeting: Meeting, rank: int, hidden: int, columns: int, vocab: int, room: int) -> None:
        self.meeting, self.rank, self.vocab, self.room = meeting, rank, vocab, room
        self.parts = {which: torch.full((room, hidden), torch.nan) for which in Sum}
        self.logits = torch.full((room, columns), torch.nan)
        self.calls: list[Sum] = []

    def partial(self, which: Sum, rows: int) -> torch.Tensor | None:
        return self.parts[which][:rows] if rows <= self.room else None

    def _sum(self, which: Sum, rows: int) -> torch.Tensor:
        assert not self.calls or self.calls[-1] != which, "a sum twice in a row: the others may still read it"
        self.calls.append(which)
        total = self.meeting.sum(self.rank, which, self.parts[which][:rows])
        self.parts[which].fill_(torch.nan)
        return total

    def sum(self, which: Sum, rows: int) -> torch.Tensor:
        return self._sum(which, rows)

    def add(self, which: Sum, residual: torch.Tensor) -> None:
        residual += self._sum(which, len(residual))

    def add_rms_norm(
        self, which: Sum, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        own = slice(self.rank, None, SIZE)
        residual[own] += self._sum(which, len(residual))[own]
        normed = F.rms_norm(residual[own], residual.shape[1:], weight, eps)
        whole = torch.empty_like(residual)
        for rank, rows in enumerate(self.meeting.all(self.rank, "normed", normed)):
            whole[rank::SIZE] = rows
        residual[1 - self.rank :: SIZE] = torch.nan
        return whole

    def logits_part(self, rows: int) -> torch.Tensor | None:
        return self.logits[:rows] if rows <= self.room else None

    def gather_logits(self, rows: int, out: torch.Tensor | None) -> torch.Tensor:
        parts = self.meeting.all(self.rank, "logits", self.logits[:rows])
        whole = torch.cat(parts, dim=1)[:, : self.vocab]
        return whole if out is None else out.copy_(whole)


def logits(model: Decoder, rows: torch.Tensor | None) -> torch.Tensor:
    """Of one sequence: of every token, or of `rows`."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)

    with torch.inference_mode():
        ids = torch.arange(3, 3 + TOKENS)
        hidden = model.forward(ids, torch.arange(TOKENS), attend, rows=rows)
        return model.compute_logits(hidden, torch.empty(len(hidden), model.vocab_size))


def over_ranks(
    local: LocalModel, make: Callable[[Meeting, int], TensorParallel], rows: torch.Tensor | None
) -> list[torch.Tensor]:
    config, meeting = load_model_config(local.path), Meeting()

    def run(rank: int) -> torch.Tensor:
        model = load_model(
            local,
            config,
            dtype=torch.float32,
            device="cpu",
            tp_rank=rank,
            tp_size=SIZE,
            collectives=make(meeting, rank),
            progress=False,
        )
        return logits(model, rows)

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(run, range(SIZE)))


@pytest.fixture(
    params=[
        "qwen3, tied",
        "qwen2, biases",
        "llama, 3 KV heads",
        "experts",
        "four norms",
        "whole norms",
        "shared",
    ]
)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> LocalModel:
    family, shape = {
        "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
        "qwen2, biases": ("qwen2", {}),
        "experts": ("mixtral", {}),
        "four norms": ("gemma3_text", {}),
        "whole norms": ("olmo3", {}),
        "shared": ("glm4_moe", {}),
        "llama, 3 KV heads": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}),
    }[request.param]
    return tiny_model(tmp_path, family, **shape)


@pytest.mark.parametrize("room", [TOKENS, 5, 1], ids=["with room", "with room for rows alone", "without"])
@pytest.mark.parametrize("rows", [None, [20, 3, 4], []], ids=["all tokens", "three rows", "no rows"])
def test_logits_over_a_fabric_are_those_of_one_rank(
    model: LocalModel, room: int, rows: list[int] | None
) -> None:
    wanted = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    config = load_model_config(model.path)
    fabrics: dict[int, ThreadFabric] = {}

    def make(meeting: Meeting, rank: int) -> TensorParallel:
        columns = -(-config.vocab_size // SIZE)
        fabrics[rank] = ThreadFabric(meeting, rank, config.hidden_size, columns, config.vocab_size, room)
        return TensorParallel(
            rank,
            SIZE,
            lambda x: x.copy_(meeting.sum(rank, "nccl", x)),
            lambda x: torch.cat(meeting.all(rank, "gathered", x), dim=1),
            fabrics[rank],
        )

    found = over_ranks(model, make, wanted)
    one = load_model(model, config, dtype=torch.float32, device="cpu", progress=False)
    expected = logits(one, wanted)
    for rank, own in enumerate(found):
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4, msg=f"rank {rank}")
    assert torch.equal(found[0], found[1])
    through = {fabric.calls.count(which) for fabric in fabrics.values() for which in Sum}
    if room == TOKENS:
        assert through == {1, config.num_layers}
    elif room == 5 and rows:
        assert through == {0, 1}, "the last layer's rows alone fit"
    else:
        assert through == {0}
