"""Rules for the headers of a request, whichever route it takes, and its id.

The id of a request is the client's own `X-Request-ID`, or one made here. It is sent in the answer (where
OpenAI's clients look for it) and to pods, and is in the access log.
"""

import itertools
import re
import secrets
from collections.abc import Iterable

from leadline.protocol.errors import RequestError
from leadline.protocol.http.exchange import too_large

__all__ = ["NAME", "UnsupportedEncoding", "authorization_of", "request_id"]


Headers = list[tuple[bytes, bytes]]

NAME = b"x-request-id"
_FIT = re.compile(rb"[!-~]{1,128}").fullmatch
"""Visible ASCII, so that it can stand in any header and any log."""
_PREFIX = secrets.token_hex(8).encode()
_numbers = itertools.count(1)


def request_id(headers: Headers) -> tuple[bytes, Headers]:
    """(the id, the headers with it). One that does not fit is replaced."""
    given = next((value for name, value in headers if name == NAME), None)
    if given is not None and _FIT(given):
        return given, headers
    made = b"%s-%x" % (_PREFIX, next(_numbers))
    return made, [*(pair for pair in headers if pair[0] != NAME), (NAME, made)]


class UnsupportedEncoding(RequestError):
    """A compressed body."""

    status = 415


def authorization_of(headers: Iterable[tuple[bytes, bytes]], max_body_bytes: int) -> str | None:
    """Return the Authorization header, or None without one. `x-api-key: KEY`, which Anthropic's clients send,
    counts as `Authorization: Bearer KEY`.

    Raises RequestError for a second header of either name or two different keys (400: two readers could take
    different ones), for a compressed body (415), and for a body that is announced as longer than
    `max_body_bytes` (413).
    """
    authorization: str | None = None
    key: str | None = None
    for name, value in headers:
        if name == b"authorization":
            if authorization is not None:
                raise RequestError(
                    "the request has more than one Authorization header: send one", code="invalid_http"
                )
            authorization = value.decode("latin-1")
        elif name == b"x-api-key":
            if key is not None:
                raise RequestError(
                    "the request has more than one x-api-key header: send one", code="invalid_http"
                )
            key = f"Bearer {value.decode('latin-1').strip()}"
        elif name == b"content-length" and int(value) > max_body_bytes:
            raise too_large(max_body_bytes)
        elif name == b"content-encoding" and value.strip().lower() not in (b"identity", b""):
            raise UnsupportedEncoding(
                "compressed request bodies are not supported: send JSON as it is", code="content_encoding"
            )
    if key is None or authorization == key:
        return authorization
    if authorization is not None:
        raise RequestError(
            "the headers Authorization and x-api-key have different keys: send one", code="invalid_http"
        )
    return key
