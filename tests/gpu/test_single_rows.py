"""Steps of one row through the fused layers against the same steps through the plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from gpu_models import SHAPES, write_model
from leadline.engine import LLM, SamplingParams
from leadline.engine.core.plan import NewSeq, StepPlan, StepRow

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", ["tiny", "Qwen3-0.6B"])
def test_a_step_of_one_row_gives_the_logits_of_the_plain_layers(tmp_path: Path, shape: str) -> None:
    """In bfloat16 the two round differently: a few parts in a thousand a layer, not more."""
    write_model(tmp_path, SHAPES[shape], "bfloat16")
    llm = LLM(
        str(tmp_path),
        progress=False,
        load_format="dummy",
        attention_backend="triton",
        num_kv_blocks=32,
        max_model_len=1024,
        enforce_eager=True,
    )
    runner = llm.core.runner
    assert runner.model.single_rows
    tokens = [(7 * i) % 1000 for i in range(701)]
    sampling = SamplingParams(temperature=0.0)
    blocks = list(range(5, 16))
    plan = StepPlan(0, entered=[NewSeq(0, 0, tokens, 701, sampling, 0, blocks)])
    plan.rows = [StepRow(0, 0, 700, False)]
    runner.launch(plan).wait()
    plan = StepPlan(1, rows=[StepRow(0, 700, 1, True)])
    results = []
    with torch.inference_mode():
        for fused in (False, True, True):
            runner.model.single_rows = fused
            _, logits = runner.compute(runner.inputs.build(plan))
            cache = torch.stack([torch.stack((k[15, 60], v[15, 60])) for k, v in runner.kv_cache])
            results.append((logits.double(), cache.double()))
    (plain, plain_kv), (fused_logits, fused_kv), (again, _) = results
    assert torch.equal(fused_logits, again), "the same step twice gave different bits"
    assert (fused_logits - plain).norm() / plain.norm() < 0.03
    assert (fused_kv - plain_kv).norm() / plain_kv.norm() < 0.03
    assert plain_kv.abs().sum() > 0
