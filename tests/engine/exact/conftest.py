"""The demo model, loaded once, and what transformers makes of the prompts, computed once and kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from exact_prompts import NEW_TOKENS, make_prompts
from exact_rig import Rig

from leadline.engine.hub import resolve_model
from leadline.engine.hub.local import LocalModel
from leadline.engine.models.config import load_model_config
from leadline.engine.models.loader import load_model
from leadline.protocol.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def local() -> LocalModel:
    return resolve_model("smollm2", progress=False)


@pytest.fixture(scope="session")
def rig(local: LocalModel) -> Rig:
    config = load_model_config(local.path)
    model = load_model(local, config, dtype=torch.float32, device="cpu", progress=False)
    return Rig(local, model)


@pytest.fixture(scope="session")
def tokenizer(local: LocalModel) -> Tokenizer:
    return Tokenizer.load(local.path)


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return make_prompts(tokenizer)


@dataclass
class Reference:
    """tokens[i]: what greedy transformers adds to prompt i; gaps[i]: least gap of the two best logits."""

    tokens: list[list[int]]
    gaps: list[float]


@pytest.fixture(scope="session")
def reference(local: LocalModel, prompts: list[list[int]]) -> Reference:
    import transformers

    key = json.dumps([prompts, NEW_TOKENS, local.revision, transformers.__version__, torch.__version__, 1])
    folder = Path(os.environ.get("LEADLINE_CACHE") or "~/.cache/leadline").expanduser() / "tests"
    file = folder / f"greedy-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if not file.exists():
        made = _compute(local, prompts)
        folder.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps(made))
        scratch.replace(file)
    return Reference(**json.loads(file.read_text()))


@torch.inference_mode()
def _compute(local: LocalModel, prompts: list[list[int]]) -> dict[str, list]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(local.path, dtype=torch.float32)
    made: dict[str, list] = {"tokens": [], "gaps": []}
    for prompt in prompts:
        answer = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            temperature=None,
            top_k=None,
            top_p=None,
            repetition_penalty=None,
            pad_token_id=2,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.stack([logits[0].topk(2).values for logits in answer.logits])
        made["tokens"].append(answer.sequences[0, len(prompt) :].tolist())
        made["gaps"].append(float((best[:, 0] - best[:, 1]).min()))
    return made
