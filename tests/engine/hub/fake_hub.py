"""An HTTP server that speaks as much of the Hugging Face hub's protocol as a snapshot download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "max_position_embeddings": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 8,
}
"""config.json of a model that is supported."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    token: str | None = None
    """Needed to see the repository at all (private) or to read it (gated)."""
    gated: bool = False


class FakeHub:
    """`with FakeHub({"org/name": Repository(...)}) as hub:` serves at hub.url and logs (method, path)."""

    def __init__(
        self, repositories: dict[str, Repository], address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        self.repositories = repositories
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.respond(with_body=True)

            def do_HEAD(self) -> None:
                self.respond(with_body=False)

            def respond(self, *, with_body: bool) -> None:
                path = unquote(urlsplit(self.path).path)
                hub.requests.append((self.command, path))
                status, headers, body = hub.answer(path, self.headers.get("Authorization"))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    hub.send(self.wfile, path, body)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(address, Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def send(self, out: BinaryIO, path: str, body: bytes) -> None:
        """Write a body; a hub that is slow overrides it."""
        out.write(body)

    def fetched(self) -> set[str]:
        """Files whose contents were downloaded."""
        return {
            path.split("/resolve/", 1)[1].split("/", 1)[1]
            for method, path in self.requests
            if method == "GET" and "/resolve/" in path
        }

    def answer(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repository = self.repositories.get("/".join(parts[:2]))
        allowed = repository is not None and (
            repository.token is None or authorization == f"Bearer {repository.token}"
        )
        if authorization == "Bearer revoked":
            return 401, {}, b'{"error": "Invalid credentials in Authorization header"}'
        if repository is None or not (allowed or repository.gated):
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        action, revision, rest = parts[2], parts[3], "/".join(parts[4:])
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.revisions.values():
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if api and action == "revision":
            siblings = [{"rfilename": name} for name in repository.files]
            info = {"id": "/".join(parts[:2]), "sha": commit, "siblings": siblings}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        if not allowed:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if api and action == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in repository.files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if action != "resolve" or rest not in repository.files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        data = repository.files[rest]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        return 200, headers, data
