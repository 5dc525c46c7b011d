"""Everything beside generation: models, tokenization, probes, metrics, version, administration."""

from __future__ import annotations

from importlib.metadata import version

import msgspec
import openai
import pytest
from live_server import BLOCK, CONTEXT, LiveServer
from prometheus_client.parser import text_string_to_metric_families

from leadline.engine.hub import resolve_model
from leadline.protocol.chain import ChainNamespace
from leadline.protocol.openai.service import PrefixChain


def test_the_model_list_names_the_served_model(server: LiveServer) -> None:
    (card,) = server.client.models.list().data
    assert card.id == "smollm2"
    assert card.model_dump()["max_model_len"] == CONTEXT


def test_a_model_is_retrieved_by_its_name(server: LiveServer) -> None:
    (card,) = server.client.models.list().data
    assert server.client.models.retrieve("smollm2") == card
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.models.retrieve("Qwen/Qwen3-8B")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "'Qwen/Qwen3-8B'" in caught.value.message


def test_the_model_list_says_what_block_hashes_start_from(server: LiveServer) -> None:
    (card,) = server.client.models.list().data
    given = msgspec.convert(card.model_dump()["prefix_chain"], PrefixChain)
    local = resolve_model("smollm2", progress=False)
    assert given.namespace(cache_salt="x") == ChainNamespace(
        model=local.model_id, revision=local.revision, cache_salt="x", block_size=BLOCK
    )


def test_tokenize_and_detokenize_are_inverse(server: LiveServer) -> None:
    text = "Grüße aus 東京 🙂"
    tokens = server.post("/tokenize", prompt=text).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == CONTEXT
    assert server.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}
    shown = server.post("/tokenize", prompt="a b", return_token_strs=True).json()
    assert shown["token_strs"] == ["a", "Ġb"]
    assert tokens["token_strs"] is None
    many = server.post("/tokenize", prompt=" b" * 6000, return_token_strs=True).json()
    assert many["token_strs"] == ["Ġb"] * 6000
    assert server.post("/detokenize", tokens=many["tokens"]).json() == {"prompt": " b" * 6000}


def test_tokenize_applies_the_chat_template(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tokens = server.post("/tokenize", messages=messages).json()["tokens"]
    text = server.post("/detokenize", tokens=tokens).json()["prompt"]
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    closed = server.post("/tokenize", messages=messages, add_generation_prompt=False).json()["tokens"]
    assert tokens[: len(closed)] == closed


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics"])
def test_head_is_get_without_a_body(server: LiveServer, path: str) -> None:
    """What `curl -I`, `wget --spider` and uptime monitors ask."""
    with server.http as http:
        response = http.head(path)
        assert response.status_code == 200
        assert response.content == b""
        assert http.get("/health").json() == {"status": "serving"}  # on the same connection


def test_probes_and_version(server: LiveServer) -> None:
    with server.http as http:
        assert http.get("/health").json() == {"status": "serving"}
        assert http.get("/ready").json() == {"status": "ready"}
        assert http.get("/version").json() == {"version": version("leadline"), "resumes_streams": True}


def test_warmup_fills_the_prefix_cache_and_reset_empties_it(server: LiveServer) -> None:
    server.post("/admin/reset_prefix_cache")
    prompt = "A long instruction that every request begins with. " * 4
    first = server.post("/admin/warmup", prompts=[prompt]).json()
    assert first["prompts"] == 1
    assert first["cached_tokens"] == 0
    assert first["prompt_tokens"] > BLOCK
    whole_blocks = (first["prompt_tokens"] - 1) // BLOCK
    assert server.post("/admin/warmup", prompts=[prompt]).json()["cached_tokens"] == whole_blocks * BLOCK
    assert server.post("/admin/reset_prefix_cache").json()["blocks"] >= whole_blocks
    assert server.post("/admin/warmup", prompts=[prompt]).json()["cached_tokens"] == 0


def test_a_cache_salt_keeps_prefixes_apart(server: LiveServer) -> None:
    server.post("/admin/reset_prefix_cache")
    body = {"prompt": "The same long beginning of every text there is. " * 4, "max_tokens": 1}

    def cached(salt: str) -> int:
        usage = server.post("/v1/completions", **body, cache_salt=salt).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("tenant-a") == 0
    assert cached("tenant-a") > 0
    assert cached("tenant-b") == 0


def test_metrics_count_requests_tokens_and_times(server: LiveServer) -> None:
    names = (
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "time_per_output_token_seconds_count",
        "queue_seconds_count",
        "request_seconds_count",
    )
    before = {name: server.metric(name) for name in names}
    done = server.metric("requests_total", endpoint="completions", outcome="length")
    usage = server.post("/v1/completions", prompt="Hello there", max_tokens=4, ignore_eos=True).json()[
        "usage"
    ]
    after = {name: server.metric(name) - before[name] for name in names}
    assert after == {
        "prompt_tokens_total": usage["prompt_tokens"],
        "generation_tokens_total": 4,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 3,
        "time_per_output_token_seconds_count": 1,
        "queue_seconds_count": 1,
        "request_seconds_count": 1,
    }
    assert server.metric("requests_total", endpoint="completions", outcome="length") == done + 1


def test_metrics_parse_and_follow_the_naming_rules(server: LiveServer) -> None:
    server.post(
        "/v1/completions", prompt="Words that nobody has sent before. " * 8, max_tokens=3, ignore_eos=True
    )
    server.until(lambda: server.metric("prefill_tokens_per_second") > 0)
    with server.http as http:
        response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(response.text))
    assert len(families) > 15
    for family in families:
        assert family.name.startswith("leadline_engine_")
        assert family.documentation
        assert sum(sample.name.endswith("_total") for sample in family.samples) in (0, len(family.samples))
        assert all(set(s.labels) <= {"endpoint", "outcome", "priority_class", "le"} for s in family.samples)
    for name in ("kv_blocks", "steps_total", "decode_step_seconds", "prefill_tokens_per_second"):
        assert server.metric(name) > 0, name


def test_the_tokenizer_describes_itself_behind_a_switch(small_server: LiveServer, server: LiveServer) -> None:
    with small_server.http as http, server.http as without:
        shown = http.get("/tokenizer_info").json()
        assert without.get("/tokenizer_info").status_code == 404
    assert (shown["bos_token"], shown["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "{%" in shown["chat_template"]
