"""Pods with a load report, for the tests of policies."""

from leadline.gateway.pods import Pod
from leadline.protocol.load import LoadReport


def report(pod: str, *, time: float = 0.0, epoch: str = "e1", **fields: object) -> LoadReport:
    values: dict[str, object] = {
        "block_size": 64,
        "free_blocks": 1_000,
        "total_blocks": 1_000,
        "prefill_tokens_per_second": 10_000.0,
        "decode_step_seconds": 0.02,
        **fields,
    }
    return LoadReport(pod=pod, address=f"{pod}:8000", epoch=epoch, time=time, model="m", **values)


def reported(name: str, *, now: float = 0.0, **fields: object) -> Pod:
    pod = Pod(name, f"{name}:8000")
    pod.heartbeat(report(name, time=now, **fields), now)
    return pod
