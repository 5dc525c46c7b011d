"""Limits that clients' connections must hold to: the same in the engine and in the gateway."""

from dataclasses import dataclass

__all__ = ["HttpSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 64 << 10
    request_timeout: float = 60.0
    """Seconds from the first byte of a request to its last; a slower request is answered with 408."""
    write_timeout: float = 60.0
    """Seconds after which a client that reads nothing of its answer is cut off: it keeps an engine busy."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages in browsers that may call (`https://app.example`); `*`: any. Empty: none."""
    keep_alive: float = 120.0
    """Seconds after which a connection without a request is closed. Longer than proxies keep connections in
    their pools (nginx 60, sidecars and load balancers up to 90): a proxy must never send into a connection
    that is being closed."""
