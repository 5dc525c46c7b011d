"""The gateway as a process: sockets, workers, signals.

    leadline gateway ─┬─ worker 1 ─ uvicorn, uvloop, httptools ─ Gateway
                      └─ worker N    each with its own listening socket on the port (SO_REUSEPORT)

The kernel spreads connections over the workers. They share nothing but Redis and, for /metrics, a folder of
counters. The parent holds the port, starts a worker again that died, and passes SIGTERM on; each worker then
stops accepting and finishes its streams, up to `server.shutdown_seconds`.
"""

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

from leadline.gateway.config.file import ConfigFile
from leadline.gateway.config.settings import GatewayConfig
from leadline.gateway.errors import ConfigError
from leadline.protocol.listening import bound_socket, use_many_descriptors

__all__ = ["serve"]

logger = logging.getLogger("leadline.gateway")

_BACKLOG = 4096


def serve(config: GatewayConfig, *, log_level: str = "info", file: ConfigFile | None = None) -> int:
    """Run until SIGTERM or SIGINT; the exit code. `file`: the settings' source, to be watched. Raises
    ConfigError."""
    _set_up_logging(log_level)
    use_many_descriptors()
    if config.discovery.kind == "kubernetes":
        from leadline.gateway.discovery.kube_api import find_access

        # What is missing is reported once, not in the stack of each worker.
        asyncio.run(find_access(config.discovery.kubeconfig))
    shared = config.server.workers > 1
    held = _bind(config.server.host, config.server.port, reuse_port=shared)
    metrics = None
    if config.server.metrics_port is not None:
        metrics = _bind(config.server.host, config.server.metrics_port, reuse_port=shared)
        config.server.metrics_port = metrics.getsockname()[1]
        logger.info("metrics on port %d", config.server.metrics_port)
    host, port = held.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if not shared:
        return _serve_one(config, held, address, metrics, file)
    try:
        return _Supervisor(config, host, port, log_level, file).run(held, address)
    finally:
        if metrics is not None:
            metrics.close()


def _serve_one(
    config: GatewayConfig,
    listener: socket.socket,
    address: str | None,
    metrics: socket.socket | None,
    file: ConfigFile | None,
) -> int:
    """One worker, in this process."""
    import uvicorn

    from leadline.gateway.app import Gateway
    from leadline.gateway.metrics.port import MetricsPort
    from leadline.protocol.http.server_protocol import ServerProtocol

    gateway = Gateway(config, file=file)
    metrics_port = MetricsPort(gateway.scrape, metrics) if metrics is not None else None

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if metrics_port is not None and self.started:
                await metrics_port.start()
            if address is not None and self.started:
                print(f"Leadline gateway at {address}", flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Metrics are readable until the last stream has ended.
            await super().shutdown(sockets)
            if metrics_port is not None:
                await metrics_port.stop()

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            # uvicorn's own raises the signal again at the end: a clean shutdown would look like a kill.
            before = {
                number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)
            }
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

        def handle_exit(self, sig: int, frame: object) -> None:
            gateway.draining = True
            super().handle_exit(sig, frame)  # type: ignore[arg-type]

    settings = uvicorn.Config(
        gateway,
        loop="uvloop",
        http=ServerProtocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=max(1, round(config.server.shutdown_seconds)),
    )
    listener.listen(_BACKLOG)
    # What is loaded now stays: the collector need not walk over it, nor run for every few hundred requests.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)
    server = Server(settings)
    with contextlib.suppress(KeyboardInterrupt):
        server.run([listener])
    return 0 if server.started else 1


class _Supervisor:
    """Keeps N workers running."""

    def __init__(
        self, config: GatewayConfig, host: str, port: int, log_level: str, file: ConfigFile | None
    ) -> None:
        self._config, self._file = config, file
        self._host, self._port = host, port
        self._log_level = log_level
        self._stopping = False
        """Set by a signal's handler, which may take no lock: not an Event."""
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[BaseProcess] = []

    def run(self, held: socket.socket, address: str) -> int:
        folder = tempfile.mkdtemp(prefix="leadline-metrics-")
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked_to_stop)
        try:
            self._workers = [self._start() for _ in range(self._config.server.workers)]
            self._wait_ready(address)
            code = self._watch()
        finally:
            self._stop()
            held.close()
            shutil.rmtree(folder, ignore_errors=True)
        return code

    def _asked_to_stop(self, *_: object) -> None:
        self._stopping = True

    def _start(self) -> BaseProcess:
        process = self._context.Process(
            target=_worker,
            args=(os.getpid(), self._config, self._host, self._port, self._log_level, self._file),
            daemon=False,
        )
        process.start()
        return process

    def _wait_ready(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        host = host.strip("[]")
        target = "127.0.0.1" if host == "0.0.0.0" else "::1" if host == "::" else host
        while not self._stopping and all(worker.is_alive() for worker in self._workers):
            with contextlib.suppress(OSError), socket.create_connection((target, int(port)), 1):
                print(f"Leadline gateway at {address}", flush=True)
                return
            time.sleep(0.05)

    def _watch(self) -> int:
        """Start dead workers again, unless they die at once again and again."""
        deaths: list[float] = []
        while True:
            time.sleep(0.2)
            if self._stopping:
                return 0
            for place, worker in enumerate(self._workers):
                if worker.is_alive():
                    continue
                _forget_metrics(worker.pid)
                now = time.monotonic()
                deaths = [at for at in deaths if now - at < 30] + [now]
                if len(deaths) > 3 * len(self._workers):
                    logger.error("workers die again and again; leaving")
                    return 1
                logger.error("worker %s left with %s; starting another", worker.pid, worker.exitcode)
                self._workers[place] = self._start()

    def _stop(self) -> None:
        for worker in self._workers:
            if worker.is_alive():
                worker.terminate()
        ends = time.monotonic() + self._config.server.shutdown_seconds + 5
        for worker in self._workers:
            worker.join(max(0.1, ends - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()


def _worker(
    parent: int, config: GatewayConfig, host: str, port: int, log_level: str, file: ConfigFile | None
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C reaches us too; the parent decides
    # The parent's own word for its pid: it may be dead before a worker has come this far.
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    _set_up_logging(log_level)
    number = config.server.metrics_port
    metrics = _bind(config.server.host, number, reuse_port=True) if number is not None else None
    sys.exit(_serve_one(config, _bind(host, port, reuse_port=True), None, metrics, file))


def _leave_with(parent: int) -> None:
    """A parent that was killed cannot tell its workers."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def _forget_metrics(pid: int | None) -> None:
    """A dead worker's live gauges no longer count."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(pid)  # type: ignore[no-untyped-call]


def _bind(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    """A bound socket that does not listen yet: a port in use is reported at once."""
    try:
        listener = bound_socket(host, port, shared=reuse_port)
    except OSError as error:
        raise ConfigError(f"server: cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def _set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)
