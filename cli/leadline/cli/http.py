"""A small client for our own server: JSON in and out, and server-sent events, on the standard library
alone."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from leadline.engine.errors import EngineError

__all__ = ["Server", "ServerError"]


class ServerError(EngineError):
    """The server could not be reached or refused; the message is fit for the user."""

    status = 0
    """Of the refusal, where there was an answer."""


class Server:
    """One server at `url` (scheme://host:port, a trailing /v1 is accepted)."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{url!r} is not an http:// or https:// address")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._secure = parts.scheme == "https"
        self._netloc = parts.netloc
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._timeout = timeout

    def get(self, path: str) -> Any:
        return self._json("GET", path, None)

    def post(self, path: str, body: Any) -> Any:
        return self._json("POST", path, body)

    def stream(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """POST and yield the decoded data of each event until [DONE]. Closing the iterator hangs up."""
        with closing(self._connect()) as connection:
            response = self._request(connection, "POST", path, body)
            for raw in response:
                line = raw.strip()
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(event["error"]["message"])
                yield event

    def _json(self, method: str, path: str, body: Any) -> Any:
        with closing(self._connect()) as connection:
            return json.loads(self._request(connection, method, path, body).read())

    def _connect(self) -> http.client.HTTPConnection:
        cls = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return cls(self._netloc, timeout=self._timeout)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request(
                method, self._prefix + path, None if body is None else json.dumps(body), headers=headers
            )
            response = connection.getresponse()
        except OSError as error:
            raise ServerError(f"cannot reach {self.url}: {error}") from error
        if response.status >= 400:
            text = response.read().decode(errors="replace")
            try:
                message = json.loads(text)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = text[:200]
            refused = ServerError(f"{self.url}{path} answered {response.status}: {message}")
            refused.status = response.status
            raise refused
        return response
