"""The demo model itself: logits and greedy text against transformers."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import logits_of, reference_logits, reload_reference

from leadline.engine.hub import resolve_model
from leadline.engine.models import load_model_config
from leadline.engine.models.loader import load_model


@pytest.fixture(scope="module")
def local():
    return resolve_model("smollm2", progress=False)


@pytest.fixture(scope="module")
def prompt(local):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(local.path)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer, torch.tensor(tokenizer(text)["input_ids"])


@pytest.mark.slow
def test_smollm2_logits_equal_those_of_transformers(local, prompt):
    ours = load_model(local, load_model_config(local.path), dtype=torch.float32, device="cpu", progress=False)
    expected = reference_logits(reload_reference(local.path, torch.float32), prompt[1])
    logits = logits_of(ours, prompt[1])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.slow
def test_smollm2_answers_and_stops_at_the_end_of_its_turn(local, prompt):
    config = load_model_config(local.path)
    model = load_model(local, config, dtype=torch.float32, device="cpu", progress=False)
    tokenizer, ids = prompt
    length = len(ids)
    while ids[-1].item() not in config.eos_token_ids and len(ids) < length + 20:
        ids = torch.cat((ids, logits_of(model, ids)[-1:].argmax(-1)))
    assert tokenizer.decode(ids[length:]) == "The capital of France is Paris.<|im_end|>"
