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
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of the port, or of brackets
            fits = False
        if not fits:
            raise ServerError(f"{url!r} is not an http:// or https:// address")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ServerError("the API key holds characters that a header cannot, such as a line's end")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._secure = parts.scheme == "https"
        self._netloc = parts.netloc
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._timeout = timeout

    def get(self, path: str, has: str) -> Any:
        """The answer, an object with a field `has`: one without comes from something else."""
        return self._json("GET", path, None, has)

    def model(self) -> str:
        """The name of the model that it serves, of the first one if there are more."""
        models = self.get("/v1/models", "data")["data"]
        if not models:
            raise ServerError(f"{self.url} serves no model yet")
        return str(models[0]["id"])

    def post(self, path: str, body: Any, has: str) -> Any:
        return self._json("POST", path, body, has)

    def stream(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """POST and yield the decoded data of each event until [DONE]. Closing the iterator hangs up."""
        with closing(self._connect()) as connection:
            response = self._request(connection, "POST", path, body)
            while line := self._line(response):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(event["error"]["message"])
                yield event
        raise ServerError(f"{self.url} closed the connection before the answer was complete")

    def _line(self, response: http.client.HTTPResponse) -> bytes:
        """The next one; empty at the end of the answer, which is also how a broken one in chunks ends."""
        try:
            return response.readline()
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(
                f"the answer of {self.url} broke off: {str(error) or type(error).__name__}"
            ) from None

    def _json(self, method: str, path: str, body: Any, has: str) -> Any:
        with closing(self._connect()) as connection:
            response = self._request(connection, method, path, body)
            try:
                answer = json.loads(response.read())
            except ValueError:
                answer = None
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"the answer of {self.url} broke off: {error!r}") from None
        if not isinstance(answer, dict) or has not in answer:
            raise ServerError(f"{self.url}{path} is not answered as Leadline does: what listens there?")
        return answer

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
        except http.client.HTTPException as error:
            raise ServerError(f"what listens at {self.url} speaks no HTTP: {error!r}") from error
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
