"""What a replica reports of the services, while it leads and afterwards."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from operator_builders import service

from leadline.operator.controller import Controller
from leadline.operator.kube.kinds import SERVICE
from leadline.operator.reconcile import Outcome, Reconciler
from leadline.operator.settings import OperatorSettings


async def test_a_replica_that_leads_no_longer_counts_no_services() -> None:
    controller, passed = Controller(OperatorSettings(workers=1)), asyncio.Event()
    failing = [{"type": "Ready", "status": "False", "reason": "CrashLoop"}]
    controller.store.put(SERVICE, service(status={"conditions": failing}))

    class Passes:
        async def reconcile(self, _: Any) -> tuple[str, None]:
            passed.set()
            return Outcome.UNCHANGED, None

    def count() -> float | None:
        return controller.metrics.registry.get_sample_value(
            "leadline_operator_services", {"reason": "CrashLoop"}
        )

    acting = asyncio.create_task(controller._act(cast(Reconciler, Passes()), ()))
    await passed.wait()
    assert count() == 1
    acting.cancel()
    await asyncio.gather(acting, return_exceptions=True)
    assert count() is None
