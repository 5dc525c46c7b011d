"""Rotary tables against transformers' own rotary embeddings, type by type, over the whole context."""

from __future__ import annotations

import pytest
import torch
from test_logits_equal_transformers import LLAMA3, YARN
from tiny_checkpoints import BASE

from leadline.engine.errors import ConfigError
from leadline.engine.models.rope import pair_order, rope_tables
from leadline.engine.models.rope_config import RopeConfig, RopeRule, read_rope

TYPES = {
    "default": {"rope_type": "default", "rope_theta": 1e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_attention_factor": {**YARN, "attention_factor": 1.3},
    "yarn_mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn_untruncated": {**YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 0.5},
    "yarn_without_factor": {key: value for key, value in YARN.items() if key != "factor"} | {"factor": None},
}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", TYPES)
def test_cos_and_sin_equal_those_of_transformers(name, head_dim):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    length = 4096
    fields = {
        **BASE,
        "max_position_embeddings": length,
        "head_dim": head_dim,
        "rope_parameters": dict(TYPES[name]),
    }
    rotary = LlamaRotaryEmbedding(LlamaConfig(**fields))
    expected_cos, expected_sin = rotary(torch.zeros(1), torch.arange(length)[None])
    cos, sin = rope_tables(read_rope(fields), head_dim, length, "cpu")
    half = head_dim // 2
    # float32 angles of up to 4,096 radians: a rounding in the frequency's last bit moves them by 2.4e-4.
    torch.testing.assert_close(cos, expected_cos[0], atol=5e-4, rtol=0)
    torch.testing.assert_close(sin[:, half:], expected_sin[0, :, half:], atol=5e-4, rtol=0)
    torch.testing.assert_close(sin[:, :half], -expected_sin[0, :, :half], atol=5e-4, rtol=0)
    torch.testing.assert_close(cos[:64], expected_cos[0, :64], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", sorted(TYPES.keys() - {"default"}))
def test_the_old_spelling_reads_as_the_new_one(name):
    new = {"max_position_embeddings": 256, "rope_parameters": TYPES[name]}
    inner = {("type" if key == "rope_type" else key): value for key, value in TYPES[name].items()}
    theta = inner.pop("rope_theta")
    assert read_rope(
        {"max_position_embeddings": 256, "rope_theta": theta, "rope_scaling": inner}
    ) == read_rope(new)


def test_a_table_without_positions_is_refused():
    with pytest.raises(ConfigError, match="max_positions"):
        rope_tables(RopeConfig("default", 1e4), 64, 0, "cpu")


@pytest.mark.parametrize(("context", "seen"), [(64, 64), (65, 200), (4096, 4096)])
@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_longrope_takes_its_long_factors_where_sequences_may_pass_the_original_length(context, seen, partial):
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    pairs = int(32 * partial) // 2
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": partial,
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [1.0 + 3.0 * pair for pair in range(pairs)],
    }
    fields = {**BASE, "hidden_size": 192, "max_position_embeddings": 4096, "pad_token_id": 0}
    fields |= {"original_max_position_embeddings": 64, "rope_parameters": scaling}
    rotary = Phi3RotaryEmbedding(Phi3Config(**{**fields, "rope_parameters": dict(scaling)}))
    expected_cos, expected_sin = rotary(torch.zeros(1), torch.arange(seen)[None])
    cos, sin = rope_tables(read_rope(fields, 32, RopeRule(partial=1.0)), 32, context, "cpu")
    assert cos.shape == (context, 32)
    torch.testing.assert_close(cos[:seen, :pairs], expected_cos[0, :context, :pairs], atol=5e-4, rtol=0)
    torch.testing.assert_close(
        sin[:seen, 16 : 16 + pairs], expected_sin[0, :context, :pairs], atol=5e-4, rtol=0
    )
    assert bool((cos[:, pairs:16] == 1).all())
    assert not sin[:, pairs:16].any()


@pytest.mark.parametrize(
    ("rope", "order"),
    [
        (None, None),
        (RopeConfig("default", 1e4), None),
        (RopeConfig("default", 1e4, rotary_dim=4), [0, 1, 4, 5, 2, 3, 6, 7]),
        (RopeConfig("default", 1e4, interleaved=True), [0, 2, 4, 6, 1, 3, 5, 7]),
        (RopeConfig("default", 1e4, rotary_dim=4, interleaved=True), [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_numbers_of_a_head_are_ordered_so_that_partners_are_half_a_head_apart(rope, order):
    assert pair_order(rope, 8) == order
