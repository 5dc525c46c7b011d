"""`leadline up MODEL --replicas N --port P`: all of Leadline on this machine, without a cluster.

Starts a private Valkey, N engines and the gateway, prints the address once all of them take requests, starts
again what dies, and stops everything in order at Ctrl-C, SIGTERM or SIGHUP (a second one does not wait for
streams). Standard output has the one line with the address; everything else goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
from typing import TYPE_CHECKING

from leadline.cli.options import add_engine_options
from leadline.engine.errors import ConfigError

if TYPE_CHECKING:
    from leadline.cli.launcher import StackSettings

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="smollm2, hf://org/name[@revision], file:///path, or a path (a folder or a *.gguf file)"
    )
    group = parser.add_argument_group("launcher settings")
    group.add_argument(
        "--replicas", type=int, default=2, metavar="N", help="engines to run (default: %(default)s)"
    )
    group.add_argument(
        "--host", default="127.0.0.1", help="address that clients reach (default: %(default)s)"
    )
    group.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0 picks a free one (default: %(default)s)"
    )
    group.add_argument(
        "--policy",
        default="prefix",
        metavar="NAME",
        help="how the gateway picks an engine: prefix, least-load, session, random or the name of an entry "
        "point (default: %(default)s)",
    )
    group.add_argument(
        "--workers", type=int, default=1, metavar="N", help="gateway processes (default: %(default)s)"
    )
    group.add_argument("--keys-file", default="", metavar="FILE", help="keys of clients; without it, no keys")
    group.add_argument(
        "--redis-url", default="", metavar="URL", help="a Redis to use; a private Valkey when left out"
    )
    group.add_argument(
        "--store-responses",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="how long responses are stored for clients that refer to earlier ones; 0: not at all "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME",
        help="another name that requests may give the model; repeat it for more",
    )
    group.add_argument(
        "--warmup-file",
        metavar="FILE",
        help="file with one prompt a line to put into every engine's prefix cache before it is ready",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time that running requests get to finish when all is stopped (default: %(default)s)",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="how much engines and gateway log (default: %(default)s)",
    )
    group.add_argument("--access-log", action="store_true", help="show a line of JSON for every request")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from leadline.cli.launcher import EngineSettings, StackSettings

    for name in ("replicas", "workers"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(args, name)}")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"port must lie between 0 and 65535, not {args.port}")
    if args.drain_timeout < 0:
        raise ConfigError(f"drain_timeout must not be negative, got {args.drain_timeout:g}")
    if not 0 <= args.store_responses < math.inf:
        raise ConfigError(f"store_responses must be a number of seconds, not {args.store_responses:g}")
    extra = [f"--alias={name}" for name in args.alias]
    if args.warmup_file:
        extra.append(f"--warmup-file={args.warmup_file}")
    settings = StackSettings(
        engines=EngineSettings.of(args.model, args, extra),
        replicas=args.replicas,
        host=args.host,
        port=args.port,
        policy=args.policy,
        workers=args.workers,
        keys_file=args.keys_file,
        redis_url=args.redis_url,
        store_responses=args.store_responses,
        drain_timeout=args.drain_timeout,
        log_level=args.log_level,
        access_log=args.access_log,
    )
    return asyncio.run(_up(settings))


async def _up(settings: StackSettings) -> int:
    from leadline.cli.launcher import Stack

    stack = Stack(settings, _say)
    stopping = asyncio.Event()

    def asked_to_stop() -> None:
        if stopping.is_set():
            stack.hurry()
        else:
            _say("stopping: the gateway finishes what it has, then the engines go")
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup asks
            loop.add_signal_handler(number, asked_to_stop)
    starting = asyncio.create_task(stack.start())
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            engines = "1 engine" if settings.replicas == 1 else f"{settings.replicas} engines"
            print(f"Leadline serving {stack.served_name} on {engines} at {stack.url}", flush=True)
            await stack.watch(stopping)
    finally:
        for task in (starting, waiting):
            task.cancel()
        await asyncio.gather(starting, waiting, return_exceptions=True)
        await stack.stop()
    _say("stopped")
    return 0


def _say(text: str) -> None:
    """One write a line, so that lines of several threads do not mix."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
