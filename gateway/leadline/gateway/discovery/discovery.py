"""Finds the pods of all services, by static list or in Kubernetes, and keeps `Service.pods` up to date.

A slice belongs to a service of ours

    by the uid of its Kubernetes Service    the InferenceService that has this uid in its status
    by the name of its Kubernetes Service   the configured service that names it by kubernetes_service, or
                                            by its own name
    by its label serving.leadline.io/service: NAME
                                            namespace/NAME, with `discovery.trust: labels` only

An InferenceService is a service for as long as it exists, with the names in its status. With `trust: labels`
services are made on the spot and go with their last slice. Those with a static list are left alone.
Everything happens on the event loop, in callbacks that do not wait; `changed` is called after each change of
a service's pods.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from leadline.gateway.config.settings import GatewayConfig, ServiceConfig
from leadline.gateway.discovery.inference_services import RESOURCE as INFERENCE_SERVICES
from leadline.gateway.discovery.inference_services import InferenceService
from leadline.gateway.discovery.pod_set import FoundPod, PodSet
from leadline.gateway.discovery.reflector import Timing
from leadline.gateway.discovery.slices import OUR_LABEL, SERVICE_LABEL, EndpointSlice, found_pods
from leadline.gateway.discovery.slices import RESOURCE as SLICES
from leadline.gateway.errors import ConfigError
from leadline.gateway.services import Service, ServiceTable, make_service
from leadline.protocol.isvc import OPERATOR_LABEL

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient

    from leadline.gateway.discovery.reflector import Reflector

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
        """Source → (reflector, slice) → slice. A source is what makes a slice a service's (`_sources_of`)."""
        self._readers: dict[str, str] = {}
        """Source → the service that it is of."""
        self._places: dict[str, str] = {}
        """Configured service → its source."""
        self._known: dict[str, InferenceService] = {}
        """Service name → its InferenceService."""
        self._static = {entry.name for entry in config.services if entry.pods}
        self._made: set[str] = set()
        """Services that are not configured."""
        self._client: ApiClient | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.reflectors: list[Reflector[Any]] = []

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
        if self._client is not None:
            await self._client.close()

    # -- inside ----------------------------------------------------------------------------------------------

    async def _start_kubernetes(self) -> None:
        # Imported here: the library takes 20 MiB, which a gateway with static lists does not need.
        from leadline.gateway.discovery.kube_api import find_access
        from leadline.gateway.discovery.reflector import Reflector

        settings = self._config.discovery
        access = await find_access(settings.kubeconfig)
        self._client = access.client
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
            selectors = [",".join(filter(None, (OUR_LABEL, _of_operator(settings.operator))))]
            if names:
                selectors.append(f"{SERVICE_LABEL} in ({','.join(sorted(set(names)))}),!{OUR_LABEL}")
        if settings.trust == "inferenceservices":
            selector = _of_operator(settings.operator)
            self.reflectors.append(
                Reflector(
                    access.client,
                    InferenceService,
                    INFERENCE_SERVICES,
                    namespace,
                    selector,
                    self._services_changed,
                    self._timing,
                )
            )
        for number, selector in enumerate(selectors):
            self.reflectors.append(
                Reflector(
                    access.client,
                    EndpointSlice,
                    SLICES,
                    namespace,
                    selector,
                    self._listener(number),
                    self._timing,
                )
            )
        for reflector in self.reflectors:
            self._tasks.append(asyncio.create_task(reflector.run(), name=f"discovery {reflector.plural}"))
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
        self._places[entry.name] = f"service/{place}"
        other = self._readers.setdefault(f"service/{place}", entry.name)
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
                for source in self._sources_of(piece):
                    held = self._slices.get(source, {})
                    if held.pop((number, piece.key), None) is not None:
                        touched[source] = None
                    if not held:
                        self._slices.pop(source, None)
            for piece in come:
                for source in self._sources_of(piece):
                    self._slices.setdefault(source, {})[number, piece.key] = piece
                    touched[source] = None
            for name in dict.fromkeys(filter(None, map(self._reader_of, touched))):
                self._refresh(name)

        return changed

    def _services_changed(self, gone: Iterable[InferenceService], come: Iterable[InferenceService]) -> None:
        touched: dict[str, None] = {}
        for one in gone:
            touched[one.key] = None
            self._known.pop(one.key, None)
            self._readers.pop(_by_uid(one), None)
        for one in come:
            touched[one.key] = None
            self._known[one.key] = one
            if one.service_uid:
                self._readers[_by_uid(one)] = one.key
        for name in touched:
            self._refresh(name)

    def _sources_of(self, piece: EndpointSlice) -> list[str]:
        """What a slice may be a service's by."""
        namespace = piece.metadata.namespace
        ours, service = piece.label(OUR_LABEL), piece.label(SERVICE_LABEL)
        if self._config.discovery.trust == "labels":
            return [f"label/{namespace}/{ours}" if ours else f"service/{namespace}/{service}"]
        found = [f"service/{namespace}/{service}"]
        return [_by_uid(piece), *found] if piece.service_uid else found

    def _reader_of(self, source: str) -> str | None:
        kind, _, name = source.partition("/")
        return name if kind == "label" else self._readers.get(source)

    def _refresh(self, name: str) -> None:
        if name in self._static:
            return
        known = self._known.get(name)
        pieces: dict[tuple[int, str], EndpointSlice] = {}
        for source in (f"label/{name}", _by_uid(known), self._places.get(name, "")):
            pieces |= self._slices.get(source, {})
        service = self._table.get(name)
        if not pieces and known is None:
            if service is not None:
                self._update(service, [])
                self._name(service, None)
                if name in self._made:
                    self._made.discard(name)
                    self._sets.pop(name, None)
                    self._table.remove(name)
                    self._removed(service)
            return
        if service is None:
            service = make_service(ServiceConfig(name=name), self._config)
            self._name(service, known)
            self._table.add(service)
            self._made.add(name)
            self._added(service)
        self._name(service, known)
        self._update(service, found_pods(pieces.values(), self._config.discovery.port))

    def _name(self, service: Service, known: InferenceService | None) -> None:
        """Give a service the names of its InferenceService, and its message about pods that are not ready."""
        service.reason = "" if known is None else known.reason
        service.wake_seconds = 0.0 if known is None else known.wake_seconds
        service.stuck = known is not None and known.is_stuck
        if known is None:
            named: tuple[Any, ...] = (None, (), ("", ""))
        else:
            named = known.names, known.undecided_names, known.age
        if (service.granted, service.undecided, service.age) != named:
            service.granted, service.undecided, service.age = named
            self._table.names_changed()

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
    return f"{OPERATOR_LABEL}={name}" if name else f"!{OPERATOR_LABEL}"


def _by_uid(one: InferenceService | EndpointSlice | None) -> str:
    """Return the key of the service that slices of the Service with this uid belong to.

    The namespace is part of the key: owner references do not cross namespaces, so a reference to a Service of
    another namespace must match nothing.
    """
    return f"uid/{one.metadata.namespace}/{one.service_uid}" if one is not None else ""
