"""Headers in both directions: what is end to end goes through, what belongs to one connection does not.

RFC 9110 section 7.6.1: Connection and the fields it names, and the well-known ones below. Framing
(content-length, transfer-encoding) is made anew on each side, so no copy can contradict the bytes (P10).

What a client proves itself with is between it and the gateway, or a proxy in front: no pod gets it. A pod is
sent the key of its service, if there is one.
"""

import time
from collections.abc import Iterable

from leadline.gateway.pods import Pod
from leadline.gateway.request.body import amended
from leadline.gateway.request.context import Call
from leadline.gateway.upstream.settings import ProxySettings

__all__ = ["CREDENTIALS", "HOP_BY_HOP", "header", "request_for", "request_head", "response_headers"]


Headers = Iterable[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
CREDENTIALS = frozenset(
    (
        b"authorization",
        b"api-key",
        b"x-api-key",
        b"x-goog-api-key",
        b"cookie",
        b"x-access-token",
        b"x-auth-token",
        b"x-auth-request-access-token",
        b"x-forwarded-access-token",
        b"x-forwarded-client-cert",
        b"x-id-token",
    )
)
"""Headers by which clients, and the proxies that let them in, are known."""
_NOT_FORWARDED = HOP_BY_HOP | CREDENTIALS | {b"host", b"content-length", b"expect"}
_OURS = (b"x-leadline-pod", b"x-leadline-explain", b"x-request-id")
_CORS = b"access-control-"
"""Which pages may call is for the gateway to say, and browsers refuse an answer that says it twice."""


def header(headers: Headers, name: bytes) -> bytes | None:
    """The first value of a header; `name` in lower case."""
    for key, value in headers:
        if key == name:
            return value
    return None


def request_head(
    path: bytes,
    headers: list[tuple[bytes, bytes]],
    address: str,
    body_bytes: int,
    *,
    key: str,
    client: str | None,
    plain: bool,
) -> bytes:
    """Request line and headers for a pod. `key`: its service's, empty for none. `plain`: we must read the
    answer, so it must not be compressed."""
    dropped = _NOT_FORWARDED | named if (named := _named_by_connection(headers)) else _NOT_FORWARDED
    forwarded = b""
    lines = [b"POST ", path, b" HTTP/1.1\r\nhost: ", address.encode("ascii"), b"\r\n"]
    for name, value in headers:
        if name in dropped:
            continue
        if name == b"x-forwarded-for":
            forwarded += value + b", "  # some proxies add a line of their own
            continue
        if plain and name == b"accept-encoding":
            continue
        lines += (name, b": ", value, b"\r\n")
    if key:
        lines += (b"authorization: Bearer ", key.encode("latin-1"), b"\r\n")
    if client:
        lines += (b"x-forwarded-for: ", forwarded, client.encode("ascii", "replace"), b"\r\n")
    lines.append(b"content-length: %d\r\n\r\n" % body_bytes)
    return b"".join(lines)


def response_headers(headers: list[tuple[bytes, bytes]], *, keep_length: bool) -> list[tuple[bytes, bytes]]:
    """The pod's headers as the client gets them. `keep_length`: the body goes out as it came."""
    named = _named_by_connection(headers)
    dropped = HOP_BY_HOP | named if named else HOP_BY_HOP
    return [
        pair
        for pair in headers
        if (name := pair[0]) not in dropped
        and (keep_length or name != b"content-length")
        and name not in _OURS
        and not name.startswith(_CORS)
    ]


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    value = header(headers, b"connection")
    if value is None or value in (b"keep-alive", b"Keep-Alive", b"close"):
        return frozenset()
    return frozenset(token.strip().lower() for token in value.split(b","))


_WORTH_TELLING = 0.05
"""Seconds of a deadline that must be gone before the remaining deadline is sent to the pod."""


def request_for(
    call: Call, pod: Pod, settings: ProxySettings, *, movable: bool, extra: dict[str, object]
) -> tuple[bytes, bytes]:
    """Head and body. `movable`: ask for what it takes to move the stream. `extra`: fields that count above
    all others, of a stream that goes on."""
    body = amended(call.incoming.body, **(_fields(call, pod, movable) | extra))
    head = request_head(
        call.path,
        call.headers,
        pod.address,
        len(body),
        key=call.service.api_key,
        client=call.client,
        plain=movable,
    )
    return head, body


def _fields(call: Call, pod: Pod, movable: bool) -> dict[str, object]:
    """What the pod's body must say that the client's does not."""
    fields: dict[str, object] = {}
    request = call.incoming.fields
    model = call.service.upstream_model(request.model, pod) if request.model is not None else None
    if model is not None:
        fields["model"] = model
    if movable:
        if not getattr(request, "return_token_ids", None):
            fields["return_token_ids"], fields["return_prompt_token_ids"] = True, False
        if request.seed is None:
            fields["seed"] = call.seed
        fields |= call.identity
    if call.batch:
        fields["priority_class"] = "batch"
    if call.queue_timeout is not None:
        fields["queue_timeout"] = call.queue_timeout
    if call.deadline is not None:
        now = time.monotonic()
        if now - call.arrived > _WORTH_TELLING:
            fields["deadline"] = max(0.001, call.deadline - now)
    return fields
