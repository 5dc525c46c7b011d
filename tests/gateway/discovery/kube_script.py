"""A local API server that follows a script, for faults that a real one does not show on demand.

It keeps EndpointSlices and InferenceServices and a log of events like the real one, and can be told to answer
410, to drop connections, to fall silent, to be away, or to lose events.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


def slice_of(
    name: str,
    *pods: dict[str, Any] | str,
    service: str = "llm",
    namespace: str = "ns",
    labels: dict[str, str] | None = None,
    family: str = "IPv4",
    ports: list[dict[str, Any]] | None = None,
    owner: str = "",
) -> dict[str, Any]:
    """An EndpointSlice object as the API has it. A pod given by name alone is ready. `owner`: uid of its
    Service."""
    return {
        "kind": "EndpointSlice",
        "metadata": {
            **({"ownerReferences": [{"kind": "Service", "uid": owner, "controller": True}]} if owner else {}),
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "labels": {
                "kubernetes.io/service-name": service,
                **({"serving.leadline.io/service": service} if labels is None else labels),
            },
        },
        "addressType": family,
        "endpoints": [endpoint(pod) if isinstance(pod, str) else pod for pod in pods],
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}] if ports is None else ports,
    }


def inference_service(
    place: str,
    *,
    names: list[str] | None = None,
    service_uid: str = "",
    created: str = "2026-11-30T12:00:00Z",
    labels: dict[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """An InferenceService as the API has it. `names`: what the operator gave it, None: it has not looked
    yet."""
    namespace, _, name = place.partition("/")
    status = {} if names is None else {"names": names, "serviceUid": service_uid}
    return {
        "kind": "InferenceService",
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": f"uid-{place}",
            "creationTimestamp": created,
            "labels": labels or {},
        },
        "spec": spec,
        "status": status,
    }


def endpoint(
    name: str, address: str = "", *, uid: str = "", ready: bool | None = True, **conditions: bool | None
) -> dict[str, Any]:
    return {
        "addresses": [address or f"10.0.0.{sum(name.encode()) % 250 + 1}"],
        "conditions": {"ready": ready, **conditions},
        "targetRef": {"kind": "Pod", "name": name, "uid": uid or f"uid-{name}", "namespace": "ns"},
    }


def selects(selector: str, item: dict[str, Any]) -> bool:
    """Whether a label selector (`a`, `!a`, `a=b`, `a in (b,c)`) means an object."""
    labels = item["metadata"]["labels"]
    if not selector:
        return True
    for term in re.findall(r"[^,(]+(?:\([^)]*\))?", selector):
        key, _, values = term.partition(" in ")
        name, equals, value = key.partition("=")
        if key.startswith("!"):
            holds = key[1:] not in labels
        elif values:
            holds = labels.get(key) in values.strip("()").split(",")
        else:
            holds = labels.get(name) == value if equals else name in labels
        if not holds:
            return False
    return True


class KubeScript:
    """The server. `put` and `delete` change objects; the attributes below make it misbehave."""

    def __init__(self) -> None:
        self.version = 100
        self.objects: dict[str, dict[str, Any]] = {}
        self.log: list[tuple[int, str, dict[str, Any]]] = []
        self.requests: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self.gone_below = 0
        """Watches from a version below this get 410 as an event, as after compaction."""
        self.status = 0
        """Every request is answered with this status."""
        self.no_crd = False
        """The API server does not know InferenceServices."""
        self.lists_fail_on_page = 0
        self.page_size = 500
        self.lose_events = False
        self.silent = False
        """Watches send nothing and do not end when their time is up."""
        self._news = asyncio.Event()
        self._drop = asyncio.Event()
        self.url = ""

    @property
    def lists(self) -> int:
        return sum("watch" not in one for one in self.requests)

    @property
    def watches(self) -> int:
        return sum("watch" in one for one in self.requests)

    async def put(self, *objects: dict[str, Any]) -> None:
        for item in objects:
            self.version += 1
            held = json.loads(json.dumps(item))
            held["metadata"]["resourceVersion"] = str(self.version)
            name = _key(held)
            kind = "MODIFIED" if name in self.objects else "ADDED"
            self.objects[name] = held
            if not self.lose_events:
                self.log.append((self.version, kind, held))
        self._tell()

    async def delete(self, name: str) -> None:
        self.version += 1
        held = self.objects.pop(next(key for key in self.objects if key.rpartition("/")[2] == name))
        held["metadata"]["resourceVersion"] = str(self.version)
        if not self.lose_events:
            self.log.append((self.version, "DELETED", held))
        self._tell()

    async def bookmark(self) -> None:
        self.version += 10
        self.log.append((self.version, "BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}}))
        self._tell()

    async def drop_connections(self) -> None:
        """End all watches without a word of HTTP."""
        self._drop.set()
        self._drop = asyncio.Event()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(dict(request.query))
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.status:
            return web.json_response({"kind": "Status", "message": "as told"}, status=self.status)
        kind = {"endpointslices": "EndpointSlice"}.get(request.match_info["plural"], "InferenceService")
        if kind == "InferenceService" and self.no_crd:
            return web.json_response({"kind": "Status", "message": "not found"}, status=404)
        if "watch" in request.query:
            return await self._watch(request, kind)
        selector = request.query.get("labelSelector", "")
        names = sorted(
            name for name, item in self.objects.items() if item["kind"] == kind and selects(selector, item)
        )
        begin = int(request.query.get("continue", 0))
        page = begin // self.page_size + 1
        if page == self.lists_fail_on_page:
            return web.json_response({"kind": "Status", "message": "as told"}, status=500)
        end = begin + self.page_size
        meta = {"resourceVersion": str(self.version)}
        if end < len(names):
            meta["continue"] = str(end)
        return web.json_response(
            {"metadata": meta, "items": [self.objects[name] for name in names[begin:end]] or None}
        )

    async def _watch(self, request: web.Request, of: str) -> web.StreamResponse:
        position = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if position < self.gone_below:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            return response
        drop = self._drop
        ends = time.monotonic() + (3600 if self.silent else float(request.query["timeoutSeconds"]))
        while time.monotonic() < ends:
            news = self._news
            for version, kind, item in [] if self.silent else list(self.log):
                if version > position and (
                    kind == "BOOKMARK"
                    or (item["kind"] == of and selects(request.query.get("labelSelector", ""), item))
                ):
                    position = version
                    await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")
            if news is self._news:
                waits = [asyncio.create_task(event.wait()) for event in (news, drop)]
                try:
                    left = ends - time.monotonic()
                    await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
            if drop.is_set() and request.transport is not None:
                request.transport.abort()
                break
        return response


def _key(item: dict[str, Any]) -> str:
    metadata = item["metadata"]
    return f"{item['kind']}/{metadata['namespace']}/{metadata['name']}"


@asynccontextmanager
async def kube_script() -> AsyncIterator[KubeScript]:
    script = KubeScript()
    app = web.Application()
    for group in ("discovery.k8s.io/v1", "serving.leadline.io/v1alpha1"):
        app.router.add_get(f"/apis/{group}/namespaces/{{namespace}}/{{plural}}", script.handle)
        app.router.add_get(f"/apis/{group}/{{plural}}", script.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield script
    finally:
        await runner.cleanup()
