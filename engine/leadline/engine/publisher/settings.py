"""Where an engine publishes, and as whom. Read once at start, from options and the environment."""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from leadline.engine.errors import ConfigError
from leadline.protocol.keys import ServiceKeys

__all__ = ["PublishSettings", "new_epoch", "redacted"]

_SCHEMES = ("redis", "rediss", "unix")
_WILDCARDS = ("", "0.0.0.0", "::")


@dataclass(slots=True, frozen=True)
class PublishSettings:
    """Use `PublishSettings.of`, which checks."""

    redis_url: str = field(repr=False)
    """redis://, rediss:// or unix://, with the password in it: never to be logged."""
    keys: ServiceKeys
    pod: str
    address: str
    credentials: Path | None = None
    """Folder with the files `username` and `password`, in place of those in the URL."""

    @classmethod
    def of(
        cls,
        redis_url: str,
        service: str | None,
        *,
        pod: str | None = None,
        advertise: str | None = None,
        host: str,
        port: int,
        credentials: str | None = None,
    ) -> PublishSettings:
        """Raises ConfigError naming the setting that is missing or malformed.

        `service` is NAMESPACE/NAME; `host` and `port` are where the server listens.
        """
        if urlsplit(redis_url).scheme not in _SCHEMES:
            raise ConfigError("redis_url must begin with redis://, rediss:// or unix://")
        if credentials is not None and "@" in urlsplit(redis_url).netloc:
            raise ConfigError("redis_url must not hold a user or a password beside redis_credentials")
        namespace, slash, name = (service or "").partition("/")
        if not slash:
            raise ConfigError(f"redis_url needs service as NAMESPACE/NAME, not {service!r}")
        try:
            keys = ServiceKeys(namespace, name)
        except ValueError as error:
            raise ConfigError(f"service {service!r}: {error}") from None
        if advertise is None:
            if host in _WILDCARDS:
                raise ConfigError(
                    f"the server listens on {host or 'every address'}: say by advertise_address (HOST:PORT) "
                    f"where gateways reach it"
                )
            advertise = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not advertise.rpartition(":")[2].isdigit() or not advertise.rpartition(":")[0]:
            raise ConfigError(f"advertise_address must be HOST:PORT, not {advertise!r}")
        return cls(
            redis_url,
            keys,
            pod or f"{socket.gethostname()}-{port}",
            advertise,
            Path(credentials) if credentials else None,
        )


def new_epoch() -> str:
    """Return an epoch that differs between any two processes of a pod: LEADLINE_POD_UID (else random), and
    the time."""
    uid = os.environ.get("LEADLINE_POD_UID") or secrets.token_hex(8)
    return f"{uid}-{time.time_ns() // 1_000_000}"


def redacted(redis_url: str) -> str:
    """The URL without user, password and options, for logs."""
    parts = urlsplit(redis_url)
    host = parts.hostname or ""
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    return f"{parts.scheme}://{host}{port}{parts.path}"
