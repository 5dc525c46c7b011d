"""Which of a service's pods a load report is of."""

from collections.abc import Callable, Mapping

from leadline.gateway.pods import Pod
from leadline.protocol.load import LoadReport

__all__ = ["FindPod", "find_in"]

FindPod = Callable[[LoadReport], Pod | None]
"""The pod that a report is of, by name or address; None if discovery does not know it (yet)."""


def find_in(pods: Mapping[str, Pod]) -> FindPod:
    """Look a report's pod up in `pods` (id → pod, as discovery keeps it): by its name as the id, else by the
    address it reports (a static list knows no names)."""
    by_name: dict[str, str] = {}

    def find(report: LoadReport) -> Pod | None:
        pod = pods.get(report.pod)
        if pod is not None:
            return pod
        pod = pods.get(by_name.get(report.pod, ""))
        if pod is None or pod.address != report.address:
            pod = next((pod for pod in pods.values() if pod.address == report.address), None)
            if pod is not None:
                by_name[report.pod] = pod.id
        return pod

    return find
