"""The operator process: kopf with our handlers."""

from __future__ import annotations

import asyncio
import logging
import os

import kopf

from leadline.operator import handlers
from leadline.operator.controller import Controller, OperatorFailure
from leadline.operator.settings import OperatorSettings

__all__ = ["run"]

log = logging.getLogger("leadline.operator")

_KOPF_SECONDS = 1.0
"""How long kopf's own tasks may take after the controller has stopped."""


def run(settings: OperatorSettings) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    failure = asyncio.run(_run(settings))
    if failure is None:
        return 0
    if not isinstance(failure, OperatorFailure):
        raise failure
    log.error("%s", failure)
    return 1


async def _run(settings: OperatorSettings) -> BaseException | None:
    """Return why the operator ended by itself; None after a signal."""
    controller = Controller(settings)
    stopping = asyncio.create_task(controller.stopping.wait(), name="stopping")
    watching = asyncio.create_task(
        kopf.operator(
            registry=handlers.registry,
            memo=kopf.Memo(controller=controller),
            standalone=True,  # a Lease decides which replica acts
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            liveness_endpoint=_liveness_endpoint(settings.liveness_port),
            stop_flag=controller.stopping,
        ),
        name="watching",
    )
    await asyncio.wait({stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
    # kopf would wait five seconds for its first requests, which outlive their session and never end.
    await asyncio.wait({watching}, timeout=_KOPF_SECONDS)
    for task in (stopping, watching):
        task.cancel()
    _, ended = await asyncio.gather(stopping, watching, return_exceptions=True)
    if isinstance(ended, Exception):
        # kopf fails, too, when the controller does: without credentials, for example.
        return controller.failure or OperatorFailure(f"watch ended: {ended!r}")
    return controller.failure


def _liveness_endpoint(port: int) -> str | None:
    """URL of kopf's liveness server, on all addresses of the pod's first address family; None: no server."""
    host = "[::]" if ":" in os.environ.get("KUBERNETES_SERVICE_HOST", "") else "0.0.0.0"
    return f"http://{host}:{port}/health" if port else None
