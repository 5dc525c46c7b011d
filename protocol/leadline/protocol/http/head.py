"""What the headers of a request must hold to, whichever route it takes."""

from collections.abc import Iterable

from leadline.protocol.errors import RequestError
from leadline.protocol.http.exchange import too_large

__all__ = ["UnsupportedEncoding", "authorization_of"]


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
