"""`GET /admin/tokenizer`: who has no model files tokenizes as the engine does."""

from __future__ import annotations

from live_server import LiveServer

from leadline.protocol.text.bundle import bundle_digest, load_bundle

TEXT = "It's 3.14 o'clock:  naïve café, 東京 🙂\n\n\tdef f(x): return x**2  # 1234567 <|im_start|>"


def test_the_bundle_tokenizes_and_renders_as_the_server_does(server: LiveServer) -> None:
    with server.http as http:
        answer = http.get("/admin/tokenizer")
        assert answer.status_code == 200
        tokenizer, renderer = load_bundle(answer.content)
        assert tokenizer.encode(TEXT) == http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
        there = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert tokenizer.encode(renderer.render(messages), add_special_tokens=False) == there


def test_its_entity_tag_is_its_digest_and_spares_sending_it_again(server: LiveServer) -> None:
    with server.http as http:
        answer = http.get("/admin/tokenizer")
        tag = answer.headers["etag"]
        assert tag == f'"{bundle_digest(answer.content)}"'
        assert http.get("/admin/tokenizer").content == answer.content
        again = http.get("/admin/tokenizer", headers={"If-None-Match": tag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert http.get("/admin/tokenizer", headers={"If-None-Match": '"other"'}).status_code == 200


def test_it_needs_a_key_where_keys_are_needed(narrow_server: LiveServer) -> None:
    with narrow_server.http as http:
        assert http.get("/admin/tokenizer").status_code == 401
        key = {"Authorization": "Bearer key-two"}
        assert http.get("/admin/tokenizer", headers=key).status_code == 200
