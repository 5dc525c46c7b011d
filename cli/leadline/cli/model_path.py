"""`leadline model-path MODEL`: resolve a model (download or convert it if need be) and print where it
lies."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="smollm2, hf://org/name[@revision], file:///path, or a path (a folder or a *.gguf file)"
    )
    parser.add_argument("--download-dir", help="folder for downloaded and converted models")
    parser.add_argument(
        "--progress-port",
        type=int,
        metavar="PORT",
        help="tell over HTTP how far the download is, as an engine does that starts (for pods)",
    )


def run(args: argparse.Namespace) -> int:
    from leadline.cli.fetch_progress import FetchProgress
    from leadline.engine.hub import resolve_model
    from leadline.engine.pooling.spec import check_supported
    from leadline.engine.system.progress import no_report

    if args.progress_port is not None:
        _end_when_told()
    bars = args.progress_port is None and sys.stderr.isatty()
    with FetchProgress(args.model, args.progress_port) as progress:
        report = no_report if bars else progress
        found = resolve_model(
            args.model, download_dir=args.download_dir, progress=bars, report=report, check=check_supported
        )
    print(found.path)
    return 0


def _end_when_told() -> None:
    """Let SIGTERM end a download in a container: the kernel drops signals that its first process leaves to
    their default, and the pod would hold its accelerators until the grace period is over. A thread waits for
    it, since the main one may be in a call into a library that runs no handlers. What has arrived stays in
    the cache for the next try."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
