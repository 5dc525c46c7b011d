"""Fixtures for the conftest files that need them, by import: real tokenizers.

SmolLM2's (byte-level), and a SentencePiece-like one trained on the spot.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, processors, trainers

from leadline.engine.hub import resolve_model
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["sentencepiece", "sentencepiece_folder", "smollm_folder", "tokenizer"]

CORPUS = [
    "the quick brown fox jumps over the lazy dog and then it sleeps in the warm sun",
    "a lead line sounds the depth of the sea below the ship; the sailor sings out the mark",
    "pack my box with five dozen jugs, said the sphinx of black quartz. judge my vow!",
] * 4


@pytest.fixture(scope="session")
def smollm_folder() -> Path:
    return resolve_model("smollm2").path


@pytest.fixture(scope="session")
def tokenizer(smollm_folder: Path) -> Tokenizer:
    return Tokenizer.load(smollm_folder)


def sentencepiece_backend() -> Backend:
    """Llama 2's pipeline: spaces become "▁", characters outside the vocabulary become byte pieces."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, max_token_length=8
    )
    backend.train_from_iterator(CORPUS, trainer)
    spec = json.loads(backend.to_str())
    vocab = spec["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    backend = Backend.from_str(json.dumps(spec))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece_backend().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "normalized": False, "special": True},
        "unk_token": "<unk>",
        "extra_special_tokens": ["<|turn|>"],
        "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_folder: Path) -> Tokenizer:
    return Tokenizer.load(sentencepiece_folder)
