"""Two and four ranks of tiny models: replicated KV heads, head norms, untied heads; and E19, run."""

from __future__ import annotations

import random

import pytest
from exact_rig import Rig
from parallel_rig import tiny_model

from leadline.engine.errors import ConfigError
from leadline.engine.runner.parallel.ring import frame_bytes
from leadline.engine.sampling_params import SamplingParams

SHAPES = {
    "qwen3, KV heads replicated, tied": (4, "qwen3", {"num_attention_heads": 8, "tie_word_embeddings": True}),
    "qwen2, one KV head for all": (2, "qwen2", {"num_key_value_heads": 1}),
    "experts": (2, "qwen3_moe", {}),
    "norms over all heads, and windows": (2, "olmo3", {"sliding_window": 24}),
    "gemma": (2, "gemma3_text", {"sliding_window": 24}),
}


@pytest.mark.parametrize("case", SHAPES)
def test_ranks_of_a_tiny_model_give_what_one_gives(case, ranks, tmp_path):
    size, family, shape = SHAPES[case]
    local = tiny_model(tmp_path, family, **shape)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 101) for _ in range(rng.randint(1, 50))] for _ in range(12)]
    greedy = SamplingParams(temperature=0, max_tokens=10)
    settings = {"max_model_len": 128, "block_size": 16, "cpu_kv_bytes": 1 << 22}
    one, several = (ranks.core(n, local, **settings) for n in (1, size))
    expected = Rig.run(Rig(local, None), one, prompts, greedy)
    assert Rig.run(Rig(local, None), several, prompts, greedy) == expected
    assert len({tuple(tokens) for tokens in expected}) > 6


def test_512_requests_of_1000_cached_tokens_run_on_two_ranks(ranks, tmp_path):
    """E19. All of them enter with one plan."""
    local = tiny_model(tmp_path, "llama", num_hidden_layers=1, max_position_embeddings=2048)
    core = ranks.core(
        2,
        local,
        max_model_len=1100,
        block_size=16,
        max_concurrent_requests=512,
        max_num_batched_tokens=8192,
        num_kv_blocks=2000,
    )
    rng = random.Random(4)
    prefix = [rng.randrange(3, 101) for _ in range(992)]
    rig, greedy = Rig(local, None), SamplingParams(temperature=0, max_tokens=3)
    rig.run(core, [[*prefix, 5]], greedy)
    prompts = [[*prefix, *(rng.randrange(3, 101) for _ in range(9))] for _ in range(512)]
    together = rig.run(core, prompts, greedy, eos_token_ids=())
    assert {rig.outputs[str(i)].num_cached_tokens for i in range(512)} == {992}
    assert 512 * 63 * 4 < core.runner.plans.largest < 220_000 < frame_bytes(core.config, 1100)
    alone = ranks.core(1, local, max_model_len=1100, block_size=16, prefix_caching=False)
    for i in (0, 77, 511):
        assert rig.run(alone, [prompts[i]], greedy, eos_token_ids=()) == [together[i]]


def test_prompts_longer_than_a_frame_cross_in_pieces_when_penalties_count_them(ranks, tmp_path):
    local = tiny_model(tmp_path, "llama", num_hidden_layers=1, max_position_embeddings=16384)
    settings = {"max_model_len": 16384, "block_size": 256, "max_num_batched_tokens": 512, "num_kv_blocks": 65}
    settings["max_concurrent_requests"] = 2
    rng = random.Random(5)
    prompt = [rng.randrange(3, 101) for _ in range(8000)]
    params = SamplingParams(temperature=0.8, max_tokens=5, repetition_penalty=1.3, frequency_penalty=0.5)
    one, two = (ranks.core(n, local, **settings) for n in (1, 2))
    rig = Rig(local, None)
    assert rig.run(two, [prompt], params) == rig.run(one, [prompt], params)
    assert two.runner.plans.largest > 8000 * 4 > frame_bytes(two.config, 16384)


def test_more_ranks_than_heads_are_refused_before_anything_starts(ranks, tmp_path):
    with pytest.raises(ConfigError, match="tensor_parallel 7 is more than num_attention_heads 6"):
        ranks.core(7, tiny_model(tmp_path, "llama"), max_model_len=128)
