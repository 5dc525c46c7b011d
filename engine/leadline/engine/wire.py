"""The messages between API processes and their engine core process, as one tagged msgpack union each way.

    API process ── Start, Add, Abort, ResetPrefixCache, Profile, Attach, Detach, Shutdown ──▶ core process
                ◀── Progress, Resolved, Ready, Outputs, CacheChange, Rejected, Heartbeat, Reply, Profiled,
                    Fatal ──

API processes are numbered. Process 0 started the core and alone gets Progress, Resolved, Ready, CacheChange
and Fatal; messages about a request or a call go to the process that made it; Heartbeat goes to all.

Never pickled: a message that does not decode into one of these types is an error, not code.
"""

from __future__ import annotations

import msgspec

from leadline.engine import errors
from leadline.engine.config import EngineConfig
from leadline.engine.core.stats import SchedulerStats
from leadline.engine.messages import CoreOutput, CoreRequest, PoolingRequest
from leadline.engine.outputs import OutputDelta

__all__ = [
    "Abort",
    "Add",
    "Attach",
    "CacheChange",
    "Detach",
    "Fatal",
    "FromCore",
    "Heartbeat",
    "Outputs",
    "Profile",
    "Profiled",
    "Progress",
    "Ready",
    "Rejected",
    "Reply",
    "ResetPrefixCache",
    "Resolved",
    "Shutdown",
    "Start",
    "ToCore",
    "client_of",
    "decode_from_core",
    "decode_to_core",
    "encode",
    "error_from_kind",
    "error_of",
    "failure_of",
    "new_call_id",
]


class Start(msgspec.Struct, tag=True, frozen=True):
    """First message: build the engine. `factory` is "module:callable" and takes (config, on_progress)."""

    config: EngineConfig
    factory: str
    log_level: str = "warning"
    cache_events: bool = False
    """Whether the core sends CacheChange messages."""


class Add(msgspec.Struct, tag=True, frozen=True):
    requests: list[CoreRequest | PoolingRequest]
    client: int = 0
    """Number of the API process that gets their outputs."""


class Attach(msgspec.Struct, tag=True, frozen=True):
    """Begin to talk to another API process. Sent by process 0, as is Detach, so that the two keep their
    order."""

    client: int


class Detach(msgspec.Struct, tag=True, frozen=True):
    """An API process is gone: drop what it asked for. Its number is never used again."""

    client: int


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    call_id: int


class Profile(msgspec.Struct, tag=True, frozen=True):
    """Record a trace of so many steps, or seconds."""

    call_id: int
    steps: int | None = None
    seconds: float | None = None


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Leave the loop at once; what is in flight is lost (drain first)."""


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Progress of the start. `fraction` lies in [0, 1], or is None where no end is known."""

    stage: str
    fraction: float | None = None
    detail: str = ""


class Resolved(msgspec.Struct, tag=True, frozen=True):
    """The model's local folder; the API process loads the tokenizer from it while the core loads weights."""

    path: str
    model_id: str
    revision: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    max_model_len: int
    """Tokens a request may hold, after the cut to what the KV pool can hold."""
    num_kv_blocks: int
    stats: SchedulerStats


class Outputs(msgspec.Struct, tag=True):
    """All outputs of one step."""

    outputs: list[CoreOutput]


class CacheChange(msgspec.Struct, tag=True, frozen=True):
    """Net change of the prefix index since the last such message: first `cleared` (everything), then
    `removed`, then `stored`. Sent before the Outputs of the step that caused it.

    Hashes are `chain.short` of block hashes, as native uint64 of one machine: array('Q').tobytes().
    """

    stored: bytes = b""
    removed: bytes = b""
    cleared: bool = False


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """The core refused a request (queue full, longer than the pool, ...)."""

    request_id: str
    kind: str
    """Name of a class of leadline.engine.errors."""
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None


class Heartbeat(msgspec.Struct, tag=True):
    """The loop went round at `at` (time.monotonic seconds, one clock for the machine)."""

    at: float
    stats: SchedulerStats
    prefill_tokens_per_second: float = 0.0
    decode_step_seconds: float = 0.0
    """Recent averages; 0 until measured."""


class Reply(msgspec.Struct, tag=True, frozen=True):
    call_id: int
    value: int


class Profiled(msgspec.Struct, tag=True, frozen=True):
    """Answer to Profile: the trace is in `path`; or `error` says why not."""

    call_id: int
    path: str = ""
    steps: int = 0
    seconds: float = 0.0
    code: str | None = None
    """profiling_off | profile_running | profile_failed; None: no error."""
    error: str = ""


class Fatal(msgspec.Struct, tag=True, frozen=True):
    """Last message: the core is about to exit because of this."""

    kind: str
    message: str


ToCore = Start | Add | Abort | ResetPrefixCache | Profile | Attach | Detach | Shutdown
FromCore = (
    Progress | Resolved | Ready | Outputs | CacheChange | Rejected | Heartbeat | Reply | Profiled | Fatal
)

_encoder = msgspec.msgpack.Encoder()
_to_core = msgspec.msgpack.Decoder(ToCore)
_from_core = msgspec.msgpack.Decoder(FromCore)

encode = _encoder.encode
decode_to_core = _to_core.decode
decode_from_core = _from_core.decode

_CALLS = 1 << 32


def new_call_id(client: int, number: int) -> int:
    """An id that says whose call it is: the `number`-th, counted from 0, of API process `client`."""
    return client * _CALLS + number % _CALLS


def client_of(call_id: int) -> int:
    return call_id // _CALLS


def error_from_kind(
    kind: str,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after: float | None = None,
) -> errors.LeadlineError:
    """Rebuild a typed error from its class name. Unknown names become EngineDead: the core broke
    unexpectedly."""
    cls = getattr(errors, kind, None)
    if not (isinstance(cls, type) and issubclass(cls, errors.LeadlineError)):
        return errors.EngineDead(f"the engine core failed: {kind}: {message}")
    if issubclass(cls, errors.RequestError):
        if cls is errors.RequestError:
            return cls(message, param=param, code=code)
        if retry_after is not None:
            return cls(message, retry_after=retry_after)  # type: ignore[call-arg]
    return cls(message)


def error_of(refusal: Rejected) -> errors.LeadlineError:
    """Return the typed error of a refusal."""
    return error_from_kind(
        refusal.kind,
        refusal.message,
        param=refusal.param,
        code=refusal.code,
        retry_after=refusal.retry_after,
    )


def failure_of(output: CoreOutput | OutputDelta) -> errors.LeadlineError | None:
    """Return the error that an ending stands for; None for an output that ends nothing, or ends it well."""
    match output.finish_reason:
        case "queue_timeout":
            return errors.QueueTimeout(output.error or "the request waited longer than its queue timeout")
        case "deadline":
            return errors.DeadlineExceeded(output.error or "the request's deadline passed before it finished")
        case "error" if (failure := output.failure) is not None:
            return error_from_kind(failure.kind, failure.message, param=failure.param, code=failure.code)
        case "error":
            return errors.EngineError(output.error or "the engine failed while serving the request")
        case "abort":
            return errors.EngineError(output.error or "the request was aborted")
    return None
