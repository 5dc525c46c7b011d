"""Cross-origin requests of pages in a browser (the CORS protocol of the Fetch standard).

Off unless `cors_origins` names origins. Then an answer to one of them has the headers that let the page read
it, and its preflight is answered here without a check of keys: browsers send no key with it. Keys travel
in headers that pages set themselves, so cookies are not allowed.
"""

import re
from collections.abc import Sequence

from leadline.protocol.http.exchange import Exchange

__all__ = ["answer_preflight", "invalid_origin", "mark_allowed"]

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+")
_EXPOSED = b", ".join(
    [
        *(b"x-request-id", b"retry-after", b"x-leadline-pod", b"x-leadline-explain", b"x-leadline-skipped"),
        *(
            b"x-ratelimit-%s-%s" % (what, of)
            for of in (b"requests", b"tokens")
            for what in (b"limit", b"remaining", b"reset")
        ),
    ]
)
_MAX_AGE = b"7200"
"""Seconds for which a browser remembers a preflight; Chromium's most."""


def invalid_origin(origins: Sequence[str]) -> str | None:
    """Return the first that is neither `*` nor an origin as browsers write it: scheme://host[:port]."""
    return next((one for one in origins if one != "*" and not _ORIGIN.fullmatch(one)), None)


def mark_allowed(exchange: Exchange, origins: Sequence[str]) -> bool:
    """Let the answer have the headers for the request's origin. Returns whether that is one of `origins`."""
    origin = next((value for name, value in exchange.headers if name == b"origin"), None)
    if origin is None:
        return False
    if "*" in origins:
        exchange.extra_headers = [(b"access-control-allow-origin", b"*")]
    elif origin.decode("latin-1") in origins:
        exchange.extra_headers = [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
    else:
        return False
    exchange.extra_headers.append((b"access-control-expose-headers", _EXPOSED))
    return True


def answer_preflight(exchange: Exchange) -> bool:
    """Answer a request that only asks what an allowed origin may do. Returns False for any other request."""
    asked = dict(exchange.headers)
    if exchange.method != b"OPTIONS" or b"access-control-request-method" not in asked:
        return False
    headers = [
        (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
        (b"access-control-max-age", _MAX_AGE),
    ]
    if wanted := asked.get(b"access-control-request-headers"):
        headers.append((b"access-control-allow-headers", wanted))
    exchange.answer(204, headers, b"")
    return True
