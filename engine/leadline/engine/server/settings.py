"""Settings of the HTTP side of one engine. What the model and the scheduler do is `EngineConfig`'s."""

from __future__ import annotations

from dataclasses import dataclass, field

from leadline.protocol.http.settings import HttpSettings

__all__ = ["ServerSettings"]


@dataclass(slots=True, frozen=True)
class ServerSettings(HttpSettings):
    host: str = "127.0.0.1"
    port: int = 8000
    """0 picks a free port; the start-up line says which."""
    api_processes: int | None = None
    """Processes that read requests, detokenize and write answers, beside the engine core's own. None: as many
    as `pool.default_api_processes` says."""
    drain_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    log_level: str = "info"
    log_format: str = "text"
    """text | json, one line each."""
    access_log: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """When not empty, /v1 and /admin need one of them as a bearer token."""
    aliases: tuple[str, ...] = ()
    """More names by which requests may call the model, beside its served name."""
    tokenizer_info: bool = False
    """Serve `GET /tokenizer_info`, which shows the chat template."""
    stall_seconds: float = 120.0
    """/ready turns 503 when the core's loop has not gone round for this long (one long CPU prefill step is
    normal)."""
    warmup_prompts: tuple[str, ...] = ()
    """Generated (one token each) before /ready turns 200."""

    redis_url: str | None = field(default=None, repr=False)
    """Where cache events and load go; None: nowhere. The next four matter only with it."""
    redis_credentials: str | None = None
    """Folder with the files `username` and `password`, read at each connection; None: those in redis_url."""
    service: str | None = None
    """NAMESPACE/NAME of the service that this engine is a pod of."""
    pod_name: str | None = None
    """None: host name and port."""
    advertise_address: str | None = None
    """HOST:PORT at which gateways reach this server; None: where it listens."""
