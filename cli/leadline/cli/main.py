"""The console entry point: parses the command line, runs one subcommand, turns errors into one line and an
exit code.

Exit codes: 0 done, 1 failed (one line on standard error; LEADLINE_DEBUG=1 adds the traceback), 2 wrong
usage, 130 interrupted, 143 terminated before a server has started. Nothing heavier than the settings is
imported before a subcommand runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]

# name → (module, one line of help). Each module offers `add_arguments(parser)` and `run(args) -> int`.
_COMMANDS = {
    "serve": ("leadline.cli.serve", "serve a model over the OpenAI API"),
    "up": ("leadline.cli.up", "run Valkey, engines and the gateway on this machine, without a cluster"),
    "gateway": ("leadline.cli.gateway", "route the OpenAI API to the pods of one or more services"),
    "operator": ("leadline.cli.operator", "turn InferenceServices into engine pods, in Kubernetes"),
    "chat": ("leadline.cli.chat", "talk to a model: a running server's, or one started for the occasion"),
    "warmup": ("leadline.cli.warmup", "put prompts into a running engine's prefix cache"),
    "bench": ("leadline.cli.bench", "measure what clients of a running server see"),
    "size": ("leadline.cli.size", "print how much memory a model takes, and what fits on a GPU"),
    "model-path": ("leadline.cli.model_path", "get a model and print its local folder"),
}


_SERVERS = ("serve", "up", "gateway", "operator")
"""Commands that run until they are stopped."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and _chosen(arguments) in _SERVERS:
        # Until the server has a handler of its own. In a container, whose first process this is, the kernel
        # drops a SIGTERM that has none.
        signal.signal(signal.SIGTERM, _leave_at_once)
    parser = _parser(arguments)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return int(importlib.import_module(_COMMANDS[args.command][0]).run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output left (`| head`). Point stdout elsewhere so that the interpreter's flush
        # is quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        _leave_word(error)
        if os.environ.get("LEADLINE_DEBUG") == "1":
            raise
        print(f"leadline: {_one_line(error)}", file=sys.stderr)
        return 1


def _chosen(arguments: list[str]) -> str | None:
    return next((word for word in arguments if not word.startswith("-")), None)


def _leave_at_once(*_: object) -> None:
    os._exit(128 + signal.SIGTERM)


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="leadline", description="Serve large language models.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and leave")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = _chosen(arguments)
    for name, (module, summary) in _COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
        )
        if name == chosen:
            importlib.import_module(module).add_arguments(subparser)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"leadline {version('leadline')}")
        except PackageNotFoundError:
            print("leadline (not installed)")
        parser.exit()


def _leave_word(error: Exception) -> None:
    """Write the termination message that the operator reads, in a pod."""
    from leadline.protocol.isvc_termination import TERMINATION_VARIABLE, write_termination

    path = os.environ.get(TERMINATION_VARIABLE)
    if path:
        # The line on standard error is the fallback.
        with contextlib.suppress(OSError):
            write_termination(path, type(error).__name__, _one_line(error))


def _one_line(error: Exception) -> str:
    from leadline.engine.errors import LeadlineError

    text = " ".join(str(error).split())
    if isinstance(error, LeadlineError) or (isinstance(error, OSError) and text):
        return text
    return f"{type(error).__name__}: {text} (set LEADLINE_DEBUG=1 for the traceback)"


if __name__ == "__main__":
    sys.exit(main())
