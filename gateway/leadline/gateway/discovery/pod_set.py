"""The pods of one service, changed to what was found.

Owns who is in `Service.pods`, and `ready` and `terminating` of each. A pod that has
gone loses its cached blocks in the index with it; one of the same name but another uid is another pod (P19),
with a Pod object of its own, so that nothing of the old one's load or circuit is inherited.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from leadline.gateway.pods import Pod
from leadline.gateway.services import Service

__all__ = ["FoundPod", "PodSet"]


@dataclass(frozen=True, slots=True)
class FoundPod:
    """One pod as discovery sees it."""

    id: str
    """The pod's name in Kubernetes, which it also reports with its load; else its address."""
    address: str
    """host:port."""
    uid: str = ""
    ready: bool = True
    terminating: bool = False


class PodSet:
    """Writes the pods of one service."""

    __slots__ = ("_uids", "service")

    def __init__(self, service: Service) -> None:
        self.service = service
        self._uids: dict[str, str] = {}

    def update(self, found: Iterable[FoundPod]) -> bool:
        """Make the service's pods be these; whether anything changed."""
        pods = self.service.pods
        wanted = {one.id: one for one in found}
        changed = False
        for name in [name for name in pods if name not in wanted]:
            self._remove(name)
            changed = True
        for one in wanted.values():
            pod = pods.get(one.id)
            if pod is not None and (self._uids.get(one.id) != one.uid or pod.address != one.address):
                self._remove(one.id)
                pod = None
            if pod is None:
                pods[one.id] = Pod(
                    one.id,
                    one.address,
                    service=self.service.name,
                    ready=one.ready,
                    terminating=one.terminating,
                )
                self._uids[one.id] = one.uid
                changed = True
            elif (pod.ready, pod.terminating) != (one.ready, one.terminating):
                pod.ready, pod.terminating = one.ready, one.terminating
                changed = True
        return changed

    def _remove(self, name: str) -> None:
        pod = self.service.pods.pop(name)
        # Requests that are on their way to it hold on to the object.
        pod.ready, pod.terminating = False, True
        self._uids.pop(name, None)
        self.service.index.pod_gone(name)
