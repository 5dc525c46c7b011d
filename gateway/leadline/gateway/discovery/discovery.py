"""Finds the pods of all services, by static list or in Kubernetes, and keeps `Service.pods` up to date.

Room: gateway/discovery. A slice belongs to a service of ours

    by its label serving.leadline.io/service: NAME    namespace/NAME; made on the spot if not configured
    by its Kubernetes Service                         the configured service that names it by
                                                      kubernetes_service, or by its own name

Services made on the spot go when their last slice goes; those with a static list are left alone. Everything
happens on the event loop, in callbacks that do not wait; `changed` is called after each change of a service's
pods.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from leadline.gateway.config import GatewayConfig, ServiceConfig
from leadline.gateway.configured_services import make_service
from leadline.gateway.discovery.kube_api import KubeAPI, find_access
from leadline.gateway.discovery.pod_set import FoundPod, PodSet
from leadline.gateway.discovery.reflector import Reflector, Timing
from leadline.gateway.discovery.slices import OUR_LABEL, SERVICE_LABEL, EndpointSlice, found_pods
from leadline.gateway.errors import ConfigError
from leadline.gateway.services import Service, ServiceTable
from leadline.protocol.announced import names_in_labels
from leadline.protocol.isvc import OPERATOR_LABEL

__all__ = ["Discovery"]

log = logging.getLogger(__name__)

_FIRST_LIST = 5.0

Callback = Callable[[Service], None]


def _nothing(_: Service) -> None:
    """No callback."""


class Discovery:
    """`start`, then `close`."""

    def __init__(
        self,
        config: GatewayConfig,
        table: ServiceTable,
        changed: Callback = _nothing,
        *,
        added: Callback = _nothing,
        removed: Callback = _nothing,
        timing: Timing | None = None,
    ) -> None:
        """`changed(service)`: its pods changed. `added`, `removed`: a service that is not configured came or
        went; it is in the table when `added` is called, and no longer when `removed` is."""
        self._config = config
        self._table = table
        self._changed, self._added, self._removed = changed, added, removed
        self._timing = timing or Timing(resync=config.discovery.resync_seconds)
        self._sets: dict[str, PodSet] = {}
        self._slices: dict[str, dict[tuple[int, str], EndpointSlice]] = {}
        """Service name → (reflector, slice) → slice."""
        self._static = {entry.name for entry in config.services if entry.pods}
        self._made: set[str] = set()
        """Services that are not configured."""
        self._configured: dict[str, str] = {}
        """<namespace>/<Kubernetes Service> → service name."""
        self._api: KubeAPI | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.reflectors: list[Reflector] = []

    async def start(self) -> None:
        """Static lists are in when this returns, and with Kubernetes the first list too, if it comes within
        5 s; if not, it goes on in the background. Raises ConfigError when it is not known how to ask."""
        for entry in self._config.services:
            if entry.pods:
                found = [FoundPod(pod.id or pod.address, pod.address) for pod in entry.pods]
                service = self._table.get(entry.name)
                assert service is not None
                self._update(service, found)
        if self._config.discovery.kind == "kubernetes":
            await self._start_kubernetes()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._api is not None:
            await self._api.close()

    # -- inside ----------------------------------------------------------------------------------------------

    async def _start_kubernetes(self) -> None:
        settings = self._config.discovery
        access = find_access(settings.kubeconfig)
        namespace = "" if settings.namespace == "*" else settings.namespace or access.namespace
        names = []
        for entry in self._config.services:
            if not entry.pods:
                own, _, name = entry.name.partition("/")
                target = entry.kubernetes_service or name
                place = target if "/" in target else f"{own}/{target}"
                self._claim(place, entry, namespace)
                names.append(place.partition("/")[2])
        if settings.label_selector:
            selectors = [settings.label_selector]
        else:
            selectors = [OUR_LABEL + _of_operator(settings.operator)]
            if names:
                selectors.append(f"{SERVICE_LABEL} in ({','.join(sorted(set(names)))}),!{OUR_LABEL}")
        self._api = KubeAPI(access)
        for number, selector in enumerate(selectors):
            reflector = Reflector(self._api, namespace, selector, self._listener(number), self._timing)
            self.reflectors.append(reflector)
            self._tasks.append(asyncio.create_task(reflector.run(), name=f"discovery-{number}"))
        self._table.complete = False
        listed = asyncio.create_task(self._listed(), name="discovery-first-list")
        self._tasks.append(listed)
        if not (await asyncio.wait({listed}, timeout=_FIRST_LIST))[0]:
            log.warning("discovery: the API server has not answered yet; services have no pods until it does")

    async def _listed(self) -> None:
        """Until every first list is in."""
        for reflector in self.reflectors:
            await reflector.synced.wait()
        self._table.complete = True

    def _claim(self, place: str, entry: ServiceConfig, namespace: str) -> None:
        other = self._configured.setdefault(place, entry.name)
        if other != entry.name:
            raise ConfigError(f"services {other} and {entry.name} both mean the Kubernetes Service {place}")
        if namespace and place.partition("/")[0] != namespace:
            raise ConfigError(
                f"service {entry.name}: its Kubernetes Service {place} is not in discovery.namespace, which "
                f'is {namespace} ("*" for all)'
            )

    def _listener(self, number: int) -> Callable[[Iterable[EndpointSlice], Iterable[EndpointSlice]], None]:
        def changed(gone: Iterable[EndpointSlice], come: Iterable[EndpointSlice]) -> None:
            touched: dict[str, None] = {}
            for piece in gone:
                name = self._service_of(piece)
                if self._slices.get(name, {}).pop((number, piece.key), None) is not None:
                    touched[name] = None
            for piece in come:
                name = self._service_of(piece)
                if name:
                    self._slices.setdefault(name, {})[number, piece.key] = piece
                    touched[name] = None
            for name in touched:
                self._refresh(name)

        return changed

    def _service_of(self, piece: EndpointSlice) -> str:
        """Empty: none of ours."""
        ours = piece.label(OUR_LABEL)
        if ours:
            return f"{piece.metadata.namespace}/{ours}"
        return self._configured.get(f"{piece.metadata.namespace}/{piece.label(SERVICE_LABEL)}", "")

    def _refresh(self, name: str) -> None:
        if name in self._static:
            return
        pieces = self._slices.get(name)
        service = self._table.get(name)
        if not pieces:
            self._slices.pop(name, None)
            if service is not None:
                self._update(service, [])
                if name in self._made:
                    self._made.discard(name)
                    self._sets.pop(name, None)
                    self._table.remove(name)
                    self._removed(service)
            return
        announced = tuple(
            dict.fromkeys(
                one for piece in pieces.values() for one in names_in_labels(piece.metadata.labels or {})
            )
        )
        if service is None:
            service = make_service(ServiceConfig(name=name), self._config)
            service.announced = announced
            self._table.add(service)
            self._made.add(name)
            self._added(service)
        service.announced = announced
        self._update(service, found_pods(pieces.values(), self._config.discovery.port))

    def _update(self, service: Service, found: list[FoundPod]) -> None:
        pods = self._sets.get(service.name)
        if pods is None:
            pods = self._sets[service.name] = PodSet(service)
        if pods.update(found):
            log.info("discovery: %s has %d pods", service.name, len(service.pods))
            self._changed(service)


def _of_operator(name: str | None) -> str:
    if name is None:
        return ""
    return f",{OPERATOR_LABEL}={name}" if name else f",!{OPERATOR_LABEL}"
