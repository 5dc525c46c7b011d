"""Services with pods, and clients, for the tests of admission."""

import asyncio
import time
from collections.abc import Callable

from leadline.gateway.access.principal import Principal
from leadline.gateway.admission.admission import Admission
from leadline.gateway.config.settings import AdmissionConfig
from leadline.gateway.pods import Pod
from leadline.gateway.policies.random_choice import RandomPolicy
from leadline.gateway.services import Service
from leadline.protocol.load import LoadReport


def client(tenant: str = "a", priority_class: str = "interactive") -> Principal:
    return Principal(tenant=tenant, name=tenant, priority_class=priority_class)


def service(pods: int = 1, concurrency: int = 1) -> Service:
    made = Service(name="ns/s", model="m", policy=RandomPolicy(), pod_concurrency=concurrency)
    for number in range(pods):
        made.pods[f"p{number}"] = Pod(f"p{number}", f"10.0.0.{number + 1}:8000")
    return made


def admission(**settings: object) -> Admission:
    return Admission(AdmissionConfig(**settings))


def report(pod: str = "p0", **fields: object) -> LoadReport:
    values: dict[str, object] = {"free_blocks": 1_000, "total_blocks": 1_000, **fields}
    return LoadReport(pod=pod, address="a:1", epoch="e", time=time.time(), model="m", block_size=64, **values)


async def until(condition: Callable[[], bool]) -> None:
    """Give way to the loop until the condition holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (there is no event for "the counters say so")
            await asyncio.sleep(0.001)
