"""What a checkpoint's files say about its task, and which requests are refused or cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError, RequestError, UnsupportedModel
from leadline.engine.models.size import encoder_size
from leadline.engine.pooling.spec import encoder_in, read_pooling, task_of
from leadline.protocol.openai.pooling import EmbeddingRequest, RerankRequest
from tiny_encoders import Served, real_encoder, write_model, write_modules

MEAN = {"pooling_mode_mean_tokens": True}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("encoder")
    write_model(folder, "BertModel")
    prompts = {"prompts": {"query": "w7 w8 ", "document": ""}, "default_prompt_name": "query"}
    write_modules(
        folder,
        "Pooling",
        pooling=MEAN,
        sentence_bert_config={"max_seq_length": 10},
        config_sentence_transformers=prompts,
    )
    return Served(folder)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("cross")
    write_model(folder, "BertForSequenceClassification", num_labels=1, max_position_embeddings=10)
    return Served(folder)


def ids_of(served: Served, **fields: Any) -> list[list[int]]:
    return served.builder.embeddings(EmbeddingRequest(**fields), 0.0).inputs


def pairs_of(served: Served, query: str, *documents: str, **fields: Any) -> list[list[int]]:
    body = RerankRequest(query=query, documents=list(documents), **fields)
    return served.builder.pairs(body, [(query, text) for text in documents], 0.0).inputs


def test_the_model_s_own_prompts_go_in_front_of_texts(encoder: Served) -> None:
    by_default = ids_of(encoder, input="w1")
    assert by_default == ids_of(encoder, input="w1", prompt_name="query")
    assert by_default == ids_of(encoder, input="w7 w8 w1", prompt_name="document")
    assert ids_of(encoder, input=[5, 6]) == [[5, 6]]
    with pytest.raises(RequestError, match=r"prompt_name must be one of 'query', 'document', got 'passage'"):
        ids_of(encoder, input="w1", prompt_name="passage")
    with pytest.raises(RequestError, match="not with token ids"):
        ids_of(encoder, input=[5], prompt_name="query")


def test_long_inputs_are_refused_or_cut_with_their_special_tokens_whole(encoder: Served) -> None:
    whole = ids_of(encoder, input="w1 " * 6)[0]
    assert len(whole) == 10
    with pytest.raises(
        RequestError, match=r"maximum context length is 10 tokens\. However, input\[1\] has 11"
    ) as refused:
        ids_of(encoder, input=["w1", "w1 " * 7])
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
    assert ids_of(encoder, input="w1 " * 7, truncate_prompt_tokens=-1) == [whole]
    assert ids_of(encoder, input="w1 " * 7, truncate_prompt_tokens=5) == [[*whole[:4], whole[-1]]]
    assert ids_of(encoder, input=[5] * 11, truncate_prompt_tokens=-1) == [[5] * 10]
    with pytest.raises(RequestError, match="has 11 tokens"):
        ids_of(encoder, input="w1 " * 99, truncate_prompt_tokens=11)
    with pytest.raises(RequestError, match="above the 2 tokens"):
        ids_of(encoder, input="w1", truncate_prompt_tokens=2)


def test_pairs_are_cut_at_the_second_text(cross_encoder: Served) -> None:
    (whole,) = pairs_of(cross_encoder, "w1 w2", "w3 w4 w5 w6 w7")
    assert len(whole) == 10
    with pytest.raises(RequestError, match=r"the pair with documents\[1\] has 11 tokens"):
        pairs_of(cross_encoder, "w1 w2", "w3", "w3 w4 w5 w6 w7 w8")
    cut = pairs_of(cross_encoder, "w1 w2", "w3 w4 w5 w6 w7 w8", truncate_prompt_tokens=-1)
    assert cut == [whole]
    with pytest.raises(RequestError, match="query alone has 11 tokens"):
        pairs_of(cross_encoder, "w1 " * 8, "w3", truncate_prompt_tokens=-1)
    with pytest.raises(RequestError, match="instruction goes with"):
        pairs_of(cross_encoder, "w1", "w3", instruction="Judge")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": [87]}, "token id 87, but the vocabulary ends at 86"),
        ({"input": "w1", "dimensions": 49}, "dimensions must be at most 48, got 49"),
    ],
)
def test_odd_requests_are_refused(encoder: Served, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ids_of(encoder, **fields)


def test_vectors_are_cut_to_the_lengths_that_the_model_lists(tmp_path: Path) -> None:
    write_model(tmp_path, "BertModel")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"matryoshka_dimensions": [8, 16]}))
    served = Served(tmp_path)
    assert ids_of(served, input="w1", dimensions=16)
    with pytest.raises(RequestError, match="dimensions must be one of 8, 16, 48, got 9"):
        ids_of(served, input="w1", dimensions=9)


def test_a_task_that_the_checkpoint_has_not_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "BertModel")
    assert task_of(tmp_path) == "embed"
    with pytest.raises(ConfigError, match="BertModel embeds texts; use --task embed"):
        task_of(tmp_path, "generate")
    for settings, message in (
        ({"tensor_parallel": 2}, "tensor_parallel must be 1"),
        ({"kv_cache_dtype": "fp8"}, "has no KV cache"),
        ({"speculative_ngram": 2}, "writes no tokens"),
        ({"quantization": "fp8"}, "is for decoders"),
        ({"max_model_len": 65}, "above the model's own limit of 64"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_pooling(tmp_path, EngineConfig(model="m", **settings))


def changed(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


ROBERTA = {"architectures": ["RobertaModel"], "model_type": "roberta"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "swish"}, "hidden_act 'swish'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder is true"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps must be a positive number, not 'small'"),
        (ROBERTA | {"pad_token_id": "1"}, "pad_token_id '1' leaves no position"),
        ({"model_type": "roberta"}, "contradicts the architecture"),
    ],
)
def test_what_an_encoder_would_not_honour_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path, "BertModel")
    changed(tmp_path, **fields)
    with pytest.raises(UnsupportedModel, match=message):
        read_pooling(tmp_path, EngineConfig(model="m"))


def test_pooling_that_is_not_implemented_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "BertModel")
    config = EngineConfig(model="m")
    write_modules(tmp_path, "Pooling", "Dense", pooling=MEAN)
    with pytest.raises(UnsupportedModel, match=r"sentence_transformers\.Dense is not supported"):
        read_pooling(tmp_path, config)
    for pooling in ({"pooling_mode": "max"}, MEAN | {"pooling_mode_cls_token": True}, {"x": 1}):
        write_modules(tmp_path, "Pooling", pooling=pooling)
        with pytest.raises(UnsupportedModel, match="is not supported; one of cls, mean, lasttoken is"):
            read_pooling(tmp_path, config)


def test_a_head_with_several_labels_does_not_rerank(tmp_path: Path) -> None:
    write_model(tmp_path, "BertForSequenceClassification", num_labels=3)
    with pytest.raises(UnsupportedModel, match="has 3 labels"):
        read_pooling(tmp_path, EngineConfig(model="m"))


def test_a_decoder_generates_unless_its_files_or_the_task_say_otherwise(tmp_path: Path) -> None:
    write_model(tmp_path, "LlamaForCausalLM")
    assert task_of(tmp_path) == "generate"
    assert read_pooling(tmp_path, EngineConfig(model="m")) is None
    assert task_of(tmp_path, "embed") == "embed"
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM is none"):
        read_pooling(tmp_path, EngineConfig(model="m", task="rerank"))
    write_modules(tmp_path, "Pooling", pooling={"pooling_mode_lasttoken": True})
    assert task_of(tmp_path) == "embed"
    assert task_of(tmp_path, "generate") == "generate"


def test_the_size_of_an_encoder_is_that_of_its_tensors() -> None:
    encoder = encoder_in(real_encoder())
    assert encoder is not None
    size = encoder_size(encoder)
    with safe_open(real_encoder() / "model.safetensors", "np") as tensors:
        names = [name for name in tensors.keys() if "pooler" not in name and "position_ids" not in name]  # noqa: SIM118
        assert size.parameters == sum(int(tensors.get_tensor(name).size) for name in names)
    assert (size.kv_per_token, size.weights) == (0, 4 * size.parameters)
