"""The engine core in a process of its own: `python -m leadline.engine.core_process.main SOCKET_DIR`.

Started by `core_client.CoreClient` as a fresh interpreter (never forked: torch threads and CUDA contexts do
not survive a fork). It owns the EngineCore and its loop, and speaks `wire` messages over ipc sockets in
SOCKET_DIR: one inbox, and an `OutputSender` with a socket for each API process.

    loop:   has work  → drain the inbox without blocking, one step, one Outputs message an API process
            idle      → block on the inbox, at most one heartbeat long

With overlap, a step returns once the next one is launched: the messages are encoded while the GPU computes.

Its standard input is a pipe whose other end the parent holds and never writes to: end of file there means
that the parent is gone, however it died, and the process leaves at once (a thread watches, so that a long
step does not delay it). Unlike PR_SET_PDEATHSIG this does not depend on which of the parent's threads
started us.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from leadline.engine import wire
from leadline.engine.config import EngineConfig
from leadline.engine.core.block_pool import PoolListener
from leadline.engine.core.plan import StepPlan
from leadline.engine.core.stats import SchedulerStats, Speeds
from leadline.engine.core_process.output_sender import OutputSender
from leadline.engine.core_process.step_bounds import StepBounds
from leadline.engine.errors import EngineError, LeadlineError, OutOfMemory, RequestError
from leadline.engine.messages import CoreOutput, CoreRequest, PoolingRequest
from leadline.engine.profiling import Phases
from leadline.engine.profiling.trace_requests import TraceRequests
from leadline.engine.publisher.log import CacheChanges
from leadline.engine.sampling_params import SamplingParams
from leadline.engine.system.pulse import Pulse

if TYPE_CHECKING:
    from leadline.engine.hub.local import LocalModel
    from leadline.engine.pooling.spec import PoolingSpec
    from leadline.engine.system.progress import ReportStage

__all__ = ["HEARTBEAT_SECONDS", "Core", "build_engine_core", "main"]

logger = logging.getLogger("leadline.engine.core")

HEARTBEAT_SECONDS = 0.5
"""Longest time an idle loop waits before it says that it is alive."""

Report = Callable[[wire.Progress | wire.Resolved], None]


class Core(Protocol):
    """What the loop needs of an engine core (`engine_core.EngineCore` is the real one)."""

    max_model_len: int
    num_kv_blocks: int
    on_enter: Callable[[StepPlan], None]
    """Called with each step's plan before the step is launched and before it is waited for."""

    def add_request(self, request: Any) -> None:
        """Take a CoreRequest; a core of the package `pooling` takes a PoolingRequest."""

    def abort(self, request_id: str) -> object: ...
    def has_work(self) -> bool: ...
    def rest(self) -> None: ...
    def step(self) -> list[CoreOutput]: ...
    def stats(self) -> SchedulerStats: ...
    def reset_prefix_cache(self) -> int: ...
    def speeds(self) -> Speeds: ...
    def listen(self, listener: PoolListener) -> None: ...


def build_engine_core(config: EngineConfig, report: Report) -> Core:
    """Resolve the model, load it, and build the real core. Heavy imports happen here, after the sockets are
    up."""
    bars = sys.stderr.isatty()

    def stage(name: str, fraction: float | None, detail: str) -> None:
        report(wire.Progress(name, fraction, detail))

    stage("resolving the model", None, config.model)
    from leadline.engine.hub import resolve_model
    from leadline.engine.pooling.spec import check_supported, read_pooling

    local = resolve_model(
        config.model, download_dir=config.download_dir, progress=bars, report=stage, check=check_supported
    )
    report(wire.Resolved(str(local.path), local.model_id, local.revision))
    stage("preparing", None, str(local.path))
    if (spec := read_pooling(local.path, config)) is not None:
        return _pooling_core(config, local, spec, progress=bars, report=stage)
    from leadline.engine.core_process.engine_core import EngineCore
    from leadline.engine.runner.shard import resolve_device
    from leadline.engine.system.numa import bind_process

    bind_process(config.numa, resolve_device(config))
    core = EngineCore(config, local, progress=bars, report=stage)
    stage("warming", None, f"{core.num_kv_blocks} KV blocks of {config.block_size} tokens")
    _warm(core)
    return core


def _pooling_core(
    config: EngineConfig, local: LocalModel, spec: PoolingSpec, *, progress: bool, report: ReportStage
) -> Core:
    from leadline.engine.pooling.core import PoolingCore
    from leadline.engine.runner.shard import resolve_device
    from leadline.engine.system.numa import bind_process

    bind_process(config.numa, resolve_device(config))
    core = PoolingCore(config, local, spec, progress=progress, report=report)
    report("warming", None, f"inputs of up to {core.max_model_len} tokens")
    core.warm()
    return core


def _warm(core: Core) -> None:
    """One tiny request, so that the first user does not pay for lazily built kernels and buffers."""
    core.add_request(
        CoreRequest(
            request_id="warmup",
            prompt_token_ids=[0] * min(4, core.max_model_len - 2),
            sampling=SamplingParams(max_tokens=2, temperature=0.0),
            seed=0,
            arrival=time.monotonic(),
        )
    )
    while core.has_work():
        for output in core.step():
            if output.finish_reason == "error":
                raise EngineError(output.error or "the warm-up step failed")
    core.reset_prefix_cache()


def main(argv: list[str] | None = None) -> int:
    (directory,) = argv if argv is not None else sys.argv[1:]
    # The parent alone decides when we stop: a Ctrl-C or a SIGTERM sent to the whole group must not cut a
    # drain short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(directory,), daemon=True, name="parent-watch").start()

    pulse = Pulse(directory)
    pulse.start()
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.set_hwm(0)  # as the output sender's sockets, and for the same reason
    inbox.bind(f"ipc://{directory}/in")
    outputs = OutputSender(context, directory)
    send = outputs.send

    status = 1
    try:
        start = wire.decode_to_core(inbox.recv())
        if not isinstance(start, wire.Start):
            raise RuntimeError(f"expected Start as the first message, got {type(start).__name__}")
        logging.basicConfig(
            level=start.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        module, _, name = start.factory.partition(":")
        core: Core = getattr(importlib.import_module(module), name)(start.config, send)
        pulse.name(getattr(core, "rank_pids", ()))
        _freeze_garbage()
        send(wire.Ready(core.max_model_len, core.num_kv_blocks, core.stats()))
        changes = None
        if start.cache_events:
            changes = CacheChanges()
            core.listen(changes)
        phases: Phases = getattr(core, "phases", None) or Phases()
        traces = TraceRequests(start.config.profile_dir, phases, outputs.answer)
        bounds = StepBounds(pulse.begin_step, pulse.end_step)
        core.on_enter = bounds.enter
        CoreLoop(core, inbox, outputs, traces, bounds, changes).run()
        status = 0
    except Exception as error:
        _report_fatal(error, send)
    finally:
        outputs.close()
        inbox.close(linger=0)
        context.term()
    return status


class CoreLoop:
    """Moves messages between the sockets and the core. Single-threaded; the core is touched from here
    alone."""

    def __init__(
        self,
        core: Core,
        inbox: Any,
        sender: OutputSender,
        traces: TraceRequests,
        bounds: StepBounds,
        changes: CacheChanges | None = None,
    ) -> None:
        self._core = core
        self._traces = traces
        self._bounds = bounds
        self._changes = changes
        self._inbox = inbox
        self._sender = sender
        self._running = True
        self._next_heartbeat = 0.0
        self._garbage = False

    def run(self) -> None:
        core = self._core
        while True:
            busy = core.has_work()
            if not busy:
                self._collect_when_idle()
                core.rest()
                self._inbox.poll(HEARTBEAT_SECONDS * 1000)
            self._drain_inbox()
            if not self._running:
                return
            if core.has_work():
                outputs = core.step()
                self._bounds.leave()
                self._traces.step_done()
                # First: a client that has read a request's last token may rely on its blocks being announced.
                self._send_cache_change()
                if outputs:
                    self._garbage = True
                    self._sender.outputs(outputs)
            self._traces.look()
            now = time.monotonic()
            # A loop that has just gone idle says so at once, so that gauges do not show a stale "running".
            if now >= self._next_heartbeat or (busy and not core.has_work()):
                self._next_heartbeat = now + HEARTBEAT_SECONDS
                self._send_cache_change()
                speeds = core.speeds()
                self._sender.broadcast(
                    wire.Heartbeat(
                        now, core.stats(), speeds.prefill_tokens_per_second, speeds.decode_step_seconds
                    )
                )

    def _send_cache_change(self) -> None:
        if self._changes is not None and (change := self._changes.take()) is not None:
            self._sender.send(change)

    def _drain_inbox(self) -> None:
        while self._running:
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(wire.decode_to_core(frame))

    def _handle(self, message: wire.ToCore) -> None:
        match message:
            case wire.Add(requests, client):
                if self._sender.register(requests, client):
                    for request in requests:
                        self._add(request, client)
            case wire.Abort(request_ids):
                self._abort(request_ids)
            case wire.Attach(client):
                self._sender.attach(client)
                self._next_heartbeat = 0.0  # it waits for one
            case wire.Detach(client):
                self._abort(self._sender.detach(client))
            case wire.ResetPrefixCache(call_id):
                dropped = self._core.reset_prefix_cache()
                self._send_cache_change()
                self._sender.answer(wire.Reply(call_id, dropped))
            case wire.Profile():
                self._traces.ask(message)
            case wire.Shutdown():
                self._running = False
            case wire.Start():
                raise RuntimeError("Start sent twice")

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._core.abort(request_id)
        self._sender.forget(request_ids)

    def _add(self, request: CoreRequest | PoolingRequest, client: int) -> None:
        try:
            self._core.add_request(request)
        except RequestError as error:
            self._sender.forget([request.request_id])
            self._sender.send(
                wire.Rejected(
                    request.request_id,
                    type(error).__name__,
                    error.message,
                    error.param,
                    error.code,
                    getattr(error, "retry_after", None),
                ),
                client,
            )

    def _collect_when_idle(self) -> None:
        if self._garbage:
            self._garbage = False
            gc.collect()


def _freeze_garbage() -> None:
    """Take everything alive now (model, tables) out of the collector's sight and keep full collections out
    of the loop: with thousands of live requests one costs 100 ms and more. `CoreLoop` collects when it is
    idle."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000_000)


def _report_fatal(error: Exception, send: Callable[[wire.FromCore], None]) -> None:
    if isinstance(error, LeadlineError):
        logger.debug("engine core refused to start", exc_info=error)
        kind, message = type(error).__name__, str(error)
    elif type(error).__name__ == "OutOfMemoryError":
        logger.error("engine core ran out of device memory", exc_info=error)
        first_line = (str(error).splitlines() or [""])[0]
        kind = OutOfMemory.__name__
        message = (
            f"{first_line} Lower max_model_len, max_num_batched_tokens, max_concurrent_requests or "
            f"gpu_memory_utilization, or raise tensor_parallel."
        )
    elif isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # torch's, on a CPU
        logger.debug("engine core ran out of memory", exc_info=error)
        kind = OutOfMemory.__name__
        message = (
            f"out of memory: {str(error).partition('DefaultCPUAllocator: ')[2] or error}. Serve a smaller "
            "model, or lower cpu_kv_bytes or max_num_batched_tokens."
        )
    else:
        logger.error("engine core failed", exc_info=error)
        kind, message = type(error).__name__, str(error)
    with contextlib.suppress(Exception):
        send(wire.Fatal(kind, message))


def _exit_with_parent(directory: str) -> None:
    while os.read(0, 4096):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
