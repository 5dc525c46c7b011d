"""The Redis client as this package uses it: no retries of its own, time limits on everything."""

from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

__all__ = ["connect", "redacted"]


def connect(url: str, timeout: float) -> Any:
    """A client; connects on first use. `timeout`: seconds of connecting, and of one reply.

    Raises ValueError for a URL that cannot be read (its message does not hold the URL).
    """
    # Any: the stubs package types-redis, where it is installed, hides the types that redis brings itself.
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    try:
        return Redis.from_url(url, **options)
    except ValueError:
        raise ValueError(f"not a Redis URL: {redacted(url)}") from None


def redacted(url: str) -> str:
    """The URL without user, password and options, for logs."""
    parts = urlsplit(url)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"
