"""Vectors and scores of every form of model equal those of transformers with the documented pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from leadline.engine.pooling.builder import _BEFORE, _BEHIND, INSTRUCTION
from leadline.protocol.openai.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from tiny_encoders import (
    TEXTS,
    Served,
    real_encoder,
    reference_states,
    rows,
    write_model,
    write_modules,
)

TOLERANCE = 1e-4
MEAN, CLS, LAST = ({f"pooling_mode_{name}": True} for name in ("mean_tokens", "cls_token", "lasttoken"))


def pooled(states: list[torch.Tensor], pooling: str, normalize: bool) -> np.ndarray:
    take = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "last": lambda x: x[-1]}[pooling]
    vectors = torch.stack([take(one) for one in states])
    return (F.normalize(vectors, dim=-1) if normalize else vectors).numpy()


@pytest.mark.parametrize("architecture", ["BertModel", "RobertaModel", "XLMRobertaModel"])
@pytest.mark.parametrize(
    ("files", "pooling", "normalize"),
    [
        (None, "mean", False),
        ((MEAN, "Pooling", "Normalize"), "mean", True),
        ((CLS, "Pooling", "Normalize"), "cls", True),
        (({"pooling_mode": "cls"}, "Pooling"), "cls", False),
    ],
)
def test_an_encoder_pools_as_its_files_say(
    architecture: str, files: Any, pooling: str, normalize: bool, tmp_path: Path
) -> None:
    write_model(tmp_path, architecture)
    if files is not None:
        config, *modules = files
        write_modules(tmp_path, *modules, pooling=config)
    served = Served(tmp_path)
    assert (served.spec.pooling, served.spec.normalize) == (pooling, normalize)
    vectors = served.values(served.builder.embeddings(EmbeddingRequest(input=TEXTS), 0.0))
    expected = pooled(reference_states(tmp_path, TEXTS), pooling, normalize)
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("stripped", [False, True])
def test_a_decoder_embeds_by_its_last_token(architecture: str, stripped: bool, tmp_path: Path) -> None:
    model = write_model(tmp_path, architecture, tie_word_embeddings=stripped)
    if stripped:  # as sentence-transformers saves it
        config = (tmp_path / "config.json").read_text()
        model.model.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(config)
        write_modules(tmp_path, "Pooling", "Normalize", pooling=LAST)
    served = Served(tmp_path, task="auto" if stripped else "embed")
    vectors = served.values(served.builder.embeddings(EmbeddingRequest(input=TEXTS), 0.0))
    np.testing.assert_allclose(
        vectors, pooled(reference_states(tmp_path, TEXTS), "last", True), atol=TOLERANCE
    )


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
@pytest.mark.parametrize(
    "architecture",
    [f"{name}ForSequenceClassification" for name in ("Bert", "Roberta", "XLMRoberta")],
)
def test_a_cross_encoder_scores_pairs(architecture: str, activation: str | None, tmp_path: Path) -> None:
    write_model(tmp_path, architecture, num_labels=1)
    if activation is not None:
        file = tmp_path / "config.json"
        fields = json.loads(file.read_text()) | {"sentence_transformers": {"activation_fn": activation}}
        file.write_text(json.dumps(fields))
    served = Served(tmp_path)
    assert served.spec.task == "rerank"
    body = RerankRequest(query="w1 w2", documents=TEXTS)
    scores = served.values(served.builder.pairs(body, [(body.query, text) for text in TEXTS], 0.0))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        pairs = ([body.query] * len(TEXTS), TEXTS)
        # RoBERTa has one type for both texts.
        typed = architecture.startswith("Bert")
        batch = tokenizer(*pairs, padding=True, return_token_type_ids=typed, return_tensors="pt")
        expected = model(**batch).logits
    if activation is None:
        expected = torch.sigmoid(expected)
    np.testing.assert_allclose(scores, expected.numpy(), atol=TOLERANCE)


def test_a_decoder_reranks_by_its_yes_and_no(tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen3ForCausalLM", max_position_embeddings=256)
    served = Served(tmp_path, task="rerank")
    body = ScoreRequest(text_1="w1 w2", text_2=TEXTS)
    scores = served.values(served.builder.pairs(body, body.pairs(), 0.0))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    expected = []
    for text in TEXTS:
        judged = f"<Instruct>: {INSTRUCTION}\n<Query>: w1 w2\n<Document>: {text}"
        with torch.inference_mode():
            logits = model(torch.tensor([ids(_BEFORE) + ids(judged) + ids(_BEHIND)])).logits[0, -1]
        expected.append([torch.softmax(logits[[no, yes]], 0)[1].item()])
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE)


def test_mixed_sizes_of_several_requests_equal_each_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "BertModel")
    served = Served(tmp_path, max_num_batched_tokens=40, max_concurrent_requests=8)
    bodies = [EmbeddingRequest(input=TEXTS[at:] + TEXTS[:at] * at) for at in range(len(TEXTS))]
    requests = [served.builder.embeddings(body, 0.0, str(at)) for at, body in enumerate(bodies)]
    alone = {
        text: served.values(served.builder.embeddings(EmbeddingRequest(input=text), 0.0)) for text in TEXTS
    }
    for request in requests:
        served.core.add_request(request)
    together = {output.request_id: output for output in served.outputs()}
    for at, body in enumerate(bodies):
        expected = np.concatenate([alone[str(text)] for text in body.inputs()])
        found = rows(together[str(at)], len(requests[at].inputs))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_dimensions_cut_and_normalise_again(tmp_path: Path) -> None:
    write_model(tmp_path, "BertModel")
    write_modules(tmp_path, "Pooling", "Normalize", pooling=MEAN)
    served = Served(tmp_path)
    whole = served.values(served.builder.embeddings(EmbeddingRequest(input=TEXTS), 0.0))[:, :7]
    short = served.values(served.builder.embeddings(EmbeddingRequest(input=TEXTS, dimensions=7), 0.0))
    np.testing.assert_allclose(short, whole / np.linalg.norm(whole, axis=1, keepdims=True), atol=1e-6)


def test_the_real_minilm_equals_transformers_with_its_documented_pooling() -> None:
    folder = real_encoder()
    served = Served(folder)
    texts = [
        "A man is eating food.",
        "Ein Mann isst etwas; das Mädchen trägt ein Baby. 東京",
        "The quick brown fox jumps over the lazy dog. " * 20,
        "x",
    ]
    assert served.spec.max_tokens == 256
    vectors = served.values(served.builder.embeddings(EmbeddingRequest(input=texts), 0.0))
    np.testing.assert_allclose(vectors, pooled(reference_states(folder, texts), "mean", True), atol=TOLERANCE)
    long = "word " * 400
    cut = served.values(
        served.builder.embeddings(EmbeddingRequest(input=long, truncate_prompt_tokens=-1), 0.0)
    )
    expected = pooled(reference_states(folder, ["word " * 254]), "mean", True)
    np.testing.assert_allclose(cut, expected, atol=TOLERANCE)
