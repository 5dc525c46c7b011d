"""Quantized checkpoints over gloo ranks give the tokens of a plain one with the dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel_rig import ParallelRig
from quantized_checkpoints import SHAPE, awq, compressed_fields, fp8, quantize
from tiny_checkpoints import build_reference, save_reference

from leadline.engine.hub.local import LocalModel
from leadline.engine.sampling_params import SamplingParams

FORMS = {
    "awq": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32}),
    "fp8": (
        fp8("channel"),
        compressed_fields("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_the_dequantized_weights(
    form: str, rig, ranks: ParallelRig, tmp_path: Path
) -> None:
    base = save_reference(build_reference("llama", **SHAPE), tmp_path / "base")
    quantized, plain = quantize(base, tmp_path, *FORMS[form])
    settings = {"max_model_len": 128, "cpu_kv_bytes": 1 << 22, "block_size": 16, "prefill_chunk": 40}
    prompts = [[(7 * i + n) % 101 for i in range(n)] for n in (3, 17, 50)]
    greedy = SamplingParams(temperature=0, max_tokens=16)

    def tokens(size: int, folder: Path) -> list[list[int]]:
        core = ranks.core(size, LocalModel(folder, "tiny", "1"), **settings)
        return rig.run(core, prompts, greedy, eos_token_ids=())

    expected = tokens(1, plain)
    assert tokens(1, quantized) == expected
    assert tokens(2, quantized) == expected
