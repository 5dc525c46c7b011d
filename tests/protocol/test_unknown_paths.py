"""The 404 of an unknown path: what there is instead, or the path that was probably meant."""

import pytest

from leadline.protocol.openai.paths import no_such_path

SERVED = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completions/", "did you mean /v1/chat/completions?"),
        ("/v1/Completions", "did you mean /v1/completions?"),
        ("/v1/model", "did you mean /v1/models?"),
        ("/healthz", "did you mean /health?"),
        ("/chat/completions", "base URL ends in /v1"),
        ("/v1/v1/chat/completions", "twice"),
        ("/rerank", "use /v1/rerank"),
        ("/v1/images/generations", "text only"),
        ("/v1/audio/speech", "text only"),
        ("/v1/responses/resp_1", "responses.store_seconds"),
        ("/api/chat", "use /v1/chat/completions"),
        ("/tokenizer_info", "--tokenizer-info"),
    ],
)
def test_an_unknown_path_says_what_it_could_be(path, words):
    assert words in no_such_path(path, SERVED)


@pytest.mark.parametrize("path", ["/nowhere", "/", "/favicon.ico", "/" + "x" * 100_000])
def test_of_other_paths_nothing_is_guessed(path):
    message = no_such_path(path, SERVED)
    assert ";" not in message
    assert len(message) < 300
