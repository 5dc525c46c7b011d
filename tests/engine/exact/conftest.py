"""The demo model and its shallow copy, loaded once, and the answers of transformers, kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from exact_prompts import NEW_TOKENS, make_prompts
from exact_rig import Rig

from leadline.engine.hub import resolve_model
from leadline.engine.hub.local import LocalModel
from leadline.engine.models.config import load_model_config
from leadline.engine.models.loader import load_model
from leadline.protocol.text.tokenizer import Tokenizer
from shallow_model import cache_of_tests, shallow_model


@pytest.fixture(scope="session")
def local() -> LocalModel:
    return resolve_model("smollm2", progress=False)


@pytest.fixture(scope="session")
def whole_rig(local: LocalModel) -> Rig:
    """Of the demo model, with all its layers."""
    config = load_model_config(local.path)
    return Rig(local, load_model(local, config, dtype=torch.float32, device="cpu", progress=False))


@pytest.fixture(scope="session")
def rig(whole_rig: Rig) -> Rig:
    """Of the demo model; files about the cutting of work override it by the shallow one."""
    return whole_rig


@pytest.fixture(scope="session")
def tokenizer(local: LocalModel) -> Tokenizer:
    return Tokenizer.load(local.path)


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return make_prompts(tokenizer)


WHOLE = (*range(14), 14, 20, 23, 27)
"""Prompts whose answers the demo model itself computes, by number: all short ones and some long ones."""


@dataclass
class Reference:
    """tokens[i]: what greedy transformers adds to prompt i; gaps: of each, the least of two best logits."""

    tokens: list[list[int]]
    gaps: list[float]


@pytest.fixture(scope="session")
def reference(local: LocalModel, prompts: list[list[int]]) -> Reference:
    """Of the demo model, for the prompts of WHOLE; the others have no tokens."""
    return _reference(local, prompts, WHOLE)


@pytest.fixture(scope="session")
def shallow(local: LocalModel) -> LocalModel:
    return shallow_model(local)


@pytest.fixture(scope="session")
def shallow_rig(shallow: LocalModel) -> Rig:
    config = load_model_config(shallow.path)
    return Rig(shallow, load_model(shallow, config, dtype=torch.float32, device="cpu", progress=False))


@pytest.fixture(scope="session")
def shallow_reference(shallow: LocalModel, prompts: list[list[int]]) -> Reference:
    """Of the shallow model, for all prompts."""
    return _reference(shallow, prompts, range(len(prompts)))


def _reference(model: LocalModel, prompts: list[list[int]], which: Sequence[int]) -> Reference:
    import transformers

    versions = [transformers.__version__, torch.__version__, 2]
    key = json.dumps([prompts, list(which), NEW_TOKENS, model.path.name, model.revision, *versions])
    file = cache_of_tests() / f"greedy-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if not file.exists():
        made = _compute(model, prompts, which)
        scratch = file.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps(made))
        scratch.replace(file)
    return Reference(**json.loads(file.read_text()))


@torch.inference_mode()
def _compute(local: LocalModel, prompts: list[list[int]], which: Sequence[int]) -> dict[str, list]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(local.path, dtype=torch.float32)
    made: dict[str, list] = {"tokens": [[] for _ in prompts], "gaps": []}
    for number in which:
        prompt = prompts[number]
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
        made["tokens"][number] = answer.sequences[0, len(prompt) :].tolist()
        made["gaps"].append(float((best[:, 0] - best[:, 1]).min()))
    return made
