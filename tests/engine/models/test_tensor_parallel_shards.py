"""Ranks of a tensor-parallel group, run as threads of one process, against the unsplit model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from tiny_checkpoints import build_reference, logits_of, reference_logits, save_reference

from leadline.engine.errors import ConfigError
from leadline.engine.models import load_model_config
from leadline.engine.models.loader import load_model
from leadline.engine.models.parallel import TensorParallel


class ThreadGroup:
    """Collectives over threads that meet at a barrier: post, meet, combine, meet again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.posted: list[torch.Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def of_rank(self, rank: int) -> TensorParallel:
        def exchange(x: torch.Tensor, combine) -> torch.Tensor:
            self.posted[rank] = x
            self.barrier.wait()
            result = combine(self.posted)
            self.barrier.wait()
            return result

        def all_reduce(x: torch.Tensor) -> torch.Tensor:
            return exchange(x, lambda parts: torch.stack(parts).sum(0))

        return TensorParallel(
            rank,
            self.size,
            all_reduce=all_reduce,
            all_gather=lambda x: exchange(x, lambda parts: torch.cat(parts, dim=-1)),
        )


def load_ranks(folder, size, dtype=torch.float32, quantization=None):
    config, group = load_model_config(folder), ThreadGroup(size)
    return [
        load_model(
            folder,
            config,
            dtype=dtype,
            device="cpu",
            tp_rank=rank,
            tp_size=size,
            quantization=quantization,
            collectives=group.of_rank(rank),
            progress=False,
        )
        for rank in range(size)
    ]


NINE = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
"""As SmolLM2 has them."""

CASES = {
    "two_ranks": (2, "llama", {}),
    "biases": (2, "llama", {"attention_bias": True, "mlp_bias": True}),
    "tied_and_a_vocabulary_that_does_not_divide": (2, "qwen2", {"tie_word_embeddings": True}),
    "kv_heads_replicated": (4, "llama", {"num_attention_heads": 8, "head_dim": 8}),
    "one_kv_head_for_all": (2, "llama", {"num_key_value_heads": 1}),
    "head_norms": (2, "qwen3", {"head_dim": 16}),
    "mistral": (2, "mistral", {"head_dim": 16}),
    "query_heads_of_one_kv_head_do_not_divide": (4, "llama", {"attention_bias": True}),
    "kv_heads_do_not_divide": (
        2,
        "qwen3",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
    ),
    "a_rank_without_heads": (4, "mistral", NINE),
    "columns_of_the_mlp_do_not_divide": (3, "qwen2", {"num_key_value_heads": 3, "mlp_bias": True}),
    "layers_without_rotation": (2, "smollm3", {}),
    "merged_projections": (2, "phi3", {}),
    "merged_projections_that_do_not_divide": (4, "phi3", NINE),
    "experts": (2, "mixtral", {}),
    "columns_of_an_expert_do_not_divide": (
        3,
        "qwen3_moe",
        {"num_key_value_heads": 3, "mlp_only_layers": [1]},
    ),
    "norms_over_all_heads": (2, "olmo2", {"attention_bias": True}),
    "norms_over_heads_that_are_replicated": (4, "olmo2", {"num_attention_heads": 8, "hidden_size": 64}),
    "norms_over_heads_that_do_not_divide": (4, "olmo3", {**NINE, "hidden_size": 72}),
    "neighbouring_pairs_and_four_norms": (2, "glm4", {}),
    "multipliers": (3, "granite", {"num_key_value_heads": 3, "attention_bias": True, "mlp_bias": True}),
    "windows_and_scaled_tied_embedding": (2, "gemma3_text", {}),
    "capped_logits": (4, "gemma2", {"num_key_value_heads": 1}),
    "an_mlp_beside_experts": (2, "qwen2_moe", {}),
    "groups_of_experts": (3, "glm4_moe", {"num_key_value_heads": 3}),
    "corrected_scores_and_norms_over_all_heads": (4, "minimax_m2", {"num_key_value_heads": 2}),
    "a_last_rank_with_less_vocabulary": (4, "mistral", {"num_attention_heads": 4, "vocab_size": 97}),
}


@pytest.mark.parametrize("case", CASES)
def test_split_over_ranks_the_logits_are_those_of_the_whole_model(case, tmp_path):
    size, family, changes = CASES[case]
    reference = build_reference(family, **changes)
    folder = save_reference(reference, tmp_path)
    ranks = load_ranks(folder, size)
    ids = torch.randint(0, reference.config.vocab_size, (41,))
    with ThreadPoolExecutor(size) as pool:
        outputs = list(pool.map(lambda model: logits_of(model, ids), ranks))
    expected = reference_logits(reference, ids)
    for logits in outputs:
        torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)
    config = reference.config
    group = config.num_attention_heads // config.num_key_value_heads
    assert len({(rank.num_heads, rank.num_kv_heads) for rank in ranks}) == 1
    assert ranks[0].num_kv_heads == max(1, -(-config.num_key_value_heads // size))
    assert ranks[0].num_heads <= ranks[0].num_kv_heads * group


def test_a_rank_reads_only_its_part_of_split_tensors(tmp_path, monkeypatch):
    folder = save_reference(build_reference("llama"), tmp_path)
    whole = sum(
        torch.Size(tensors.get_slice(name).get_shape()).numel()
        for tensors in [safe_open(folder / "model.safetensors", framework="pt")]
        for name in tensors.keys()  # noqa: SIM118 - not a mapping
        if "norm" not in name
    )
    read = 0

    class CountingSlice:
        def __init__(self, inner) -> None:
            self.inner = inner
            self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

        def __getitem__(self, index):
            nonlocal read
            part = self.inner[index]
            read += part.numel() if part.dim() > 1 else 0
            return part

    from leadline.engine.models import loader

    copy = loader._copy
    monkeypatch.setattr(loader, "_copy", lambda name, source, slot: copy(name, CountingSlice(source), slot))
    load_ranks(folder, 2)
    assert whole <= read <= whole * 1.001  # two ranks together read everything once


def test_more_ranks_than_query_heads_are_refused(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel 7 is more than num_attention_heads 6"):
        load_ranks(folder, 7)


def test_several_ranks_without_collectives_are_refused(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path)
    with pytest.raises(ConfigError, match="all_reduce"):
        load_model(folder, load_model_config(folder), dtype=torch.float32, device="cpu", tp_rank=0, tp_size=2)
