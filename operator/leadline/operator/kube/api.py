"""Requests to the API server, by the dynamic client of `kubernetes.aio`.

`KubeApi` adds what the operator needs on top of the library: pages, one timeout, server-side apply with our
field manager, a count of writes, and errors with the API server's own message. The kinds are known, so the
library's discovery requests, and the rights for them, are not needed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient, Resource, Subresource

from leadline.operator.kube.kinds import Kind
from leadline.protocol.isvc import FIELD_MANAGER

__all__ = ["ApiError", "Conflict", "KubeApi", "NamespaceTerminating", "NotFound", "load_configuration"]

Object = dict[str, Any]

AUTOSCALER_MANAGER = "leadline-autoscaler"
_DRY_RUN_MANAGER = "leadline-dry-run"
_PERMANENT_500 = ("failed to create typed patch object", "Internal error occurred: failed calling webhook")
"""Beginnings of the messages with which the API server answers 500 for an object that does not fit its kind's
schema, or when a required admission webhook is not available: an immediate retry gets the same answer."""
_ANOTHER_OWNER = "this object has another owner"
"""In the chart: templates/operator/admission.yaml."""
_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)
_CONNECTIONS = 64
_PAGE = 500
_MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """The API server's answer to a request that failed."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{reason or status}: {message}")
        self.status, self.reason, self.message = status, reason, message

    @property
    def is_permanent(self) -> bool:
        """Whether the same request fails until something is changed: it was refused as invalid or forbidden.
        It is worth repeating, since the change may come, but slowly."""
        if self.status == 500:
            return self.message.startswith(_PERMANENT_500)
        return self.status in (400, 403, 405, 413, 422)


class NotFound(ApiError):
    """404"""


class NamespaceTerminating(ApiError):
    """403 for something new in a namespace that is being deleted."""

    @property
    def is_permanent(self) -> bool:
        return False


class Conflict(ApiError):
    """409: another client was faster, or the object exists."""


async def load_configuration() -> Configuration:
    """Return address and credentials of the API server: those of the pod's service account, whose token the
    library reads again every minute, else those of the kubeconfig ($KUBECONFIG, ~/.kube/config).

    Raises config.ConfigException if there is neither.
    """
    configuration = Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        await config.load_kube_config(client_configuration=configuration, persist_config=False)
    return configuration


class KubeApi:
    """Needs a running loop; `close` it."""

    def __init__(
        self,
        configuration: Configuration,
        on_write: Callable[[str, str], None] = lambda verb, kind: None,
    ) -> None:
        """`on_write(method, kind)` is called after each write that the server answered."""
        configuration.connection_pool_maxsize = _CONNECTIONS
        configuration.client_session_kwargs = {"trust_env": False}
        self._client = ApiClient(configuration)
        self._client.user_agent = "leadline-operator"
        self._dynamic = _JsonClient(self._client)
        self._on_write = on_write

    async def close(self) -> None:
        await self._client.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        found: Object = await self._dynamic.get(_resource(kind), name, namespace)
        return found

    async def list(
        self, kind: Kind, namespace: str = "", selector: str = "", *, fields: str = ""
    ) -> tuple[list[Object], str]:
        """Return all objects, read 500 at a time, and the resourceVersion of the list. `selector` selects by
        labels, `fields` by fields."""
        items: list[Object] = []
        page: Object = {}
        while True:
            page = await self._dynamic.get(
                _resource(kind),
                namespace=namespace or None,
                label_selector=selector or None,
                field_selector=fields or None,
                limit=_PAGE,
                _continue=page.get("metadata", {}).get("continue"),
            )
            items += page.get("items") or []
            if not page.get("metadata", {}).get("continue"):
                return items, str(page["metadata"].get("resourceVersion", ""))

    async def find(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return one object, or None. It is read by a list of one, which needs only the rights of a watch."""
        items, _ = await self.list(kind, namespace, fields=f"metadata.name={name}")
        # Items of a list come without apiVersion and kind.
        return {"apiVersion": kind.api_version, "kind": kind.kind, **items[0]} if items else None

    async def find_by_patch(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """As `find`, with only the right to patch: a dry run of an apply that sets nothing returns the object
        as it is. Returns None too if that is refused; the real apply then reports why. If the chart's
        admission policy hides an object of another owner, only its name is returned."""
        empty = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"namespace": namespace, "name": name},
        }
        try:
            found: Object = await self._dynamic.server_side_apply(
                _resource(kind),
                empty,
                name,
                namespace,
                field_manager=_DRY_RUN_MANAGER,
                dry_run="All",
            )
        except ApiError as error:
            if not error.is_permanent:
                raise
            return empty if _ANOTHER_OWNER in error.message else None
        # An object that the apply would create has no resourceVersion.
        return found if found["metadata"].get("resourceVersion") else None

    async def apply(self, wanted: Object, kind: Kind, subresource: str = "") -> Object:
        """Apply on the server: the fields in `wanted` become ours, other managers keep theirs."""
        metadata = wanted["metadata"]
        resource = _resource(kind, subresource)
        request = self._dynamic.server_side_apply(
            resource,
            wanted,
            metadata["name"],
            metadata["namespace"],
            force_conflicts=True,
            field_manager=FIELD_MANAGER,
        )
        return await self._write("PATCH", kind, request)

    async def scale(self, kind: Kind, namespace: str, name: str, replicas: int, version: str = "") -> None:
        """Set the replicas through the scale subresource, as kubectl and autoscalers do. Raises Conflict if
        the object has left the resourceVersion `version`."""
        metadata = {"metadata": {"resourceVersion": version}} if version else {}
        await self._merge(
            kind,
            {"namespace": namespace, "name": name},
            {**metadata, "spec": {"replicas": replicas}},
            subresource="scale",
            manager=AUTOSCALER_MANAGER,
        )

    async def set_spec(self, kind: Kind, metadata: Object, fields: Object) -> None:
        """Set fields of the spec of exactly the object with this metadata, whichever manager has set them.
        None removes a field, which an apply cannot do with a field of another manager."""
        await self._merge(kind, metadata, {"metadata": {"uid": metadata["uid"]}, "spec": fields})

    async def annotate(
        self, kind: Kind, metadata: Object, annotations: Mapping[str, str | None], version: str = ""
    ) -> None:
        """Set annotations of exactly the object with this metadata. None removes one. Raises Conflict if the
        object has left the resourceVersion `version`."""
        exactly = {"uid": metadata["uid"]} | ({"resourceVersion": version} if version else {})
        await self._merge(kind, metadata, {"metadata": {**exactly, "annotations": annotations}})

    async def create(self, wanted: Object, kind: Kind) -> Object:
        namespace = wanted["metadata"]["namespace"]
        request = self._dynamic.create(_resource(kind), wanted, namespace, field_manager=FIELD_MANAGER)
        return await self._write("POST", kind, request)

    async def replace(self, wanted: Object, kind: Kind) -> Object:
        """Raises Conflict if the object is no longer at the resourceVersion in `wanted`."""
        metadata = wanted["metadata"]
        request = self._dynamic.replace(
            _resource(kind), wanted, metadata["name"], metadata["namespace"], field_manager=FIELD_MANAGER
        )
        return await self._write("PUT", kind, request)

    async def delete(self, target: Object, kind: Kind) -> None:
        """Delete exactly this object, not a successor of the same name. One that is gone is no error."""
        metadata = target["metadata"]
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": metadata["uid"]},
        }
        request = self._dynamic.delete(_resource(kind), metadata["name"], metadata["namespace"], body=options)
        try:
            await self._write("DELETE", kind, request)
        except (NotFound, Conflict):
            return

    # -- inside ----------------------------------------------------------------------------------------------

    async def _merge(
        self,
        kind: Kind,
        metadata: Object,
        patch: Object,
        *,
        subresource: str = "",
        manager: str = FIELD_MANAGER,
    ) -> None:
        resource = _resource(kind, subresource)
        request = self._dynamic.patch(
            resource,
            patch,
            metadata["name"],
            metadata["namespace"],
            content_type=_MERGE,
            field_manager=manager,
        )
        await self._write("PATCH", kind, request)

    async def _write(self, method: str, kind: Kind, request: Awaitable[Object]) -> Object:
        try:
            answer = await request
        except ApiError:
            self._on_write(method, kind.kind)
            raise
        self._on_write(method, kind.kind)
        return answer


class _JsonClient(DynamicClient):  # type: ignore[misc]
    """The library's client, with plain JSON as answers, one timeout, and `ApiError` for 400 and above."""

    async def request(self, method: str, path: str, body: Object | None = None, **options: Any) -> Any:
        options |= {"serializer": lambda _, answer: answer, "_request_timeout": _TIMEOUT}
        try:
            return await super().request(method, path, body, **options)
        except ApiException as error:
            raise _error(int(error.status or 0), str(error.body or error.reason or "")) from None
        except (config.ConfigException, FileNotFoundError) as error:
            raise ApiError(401, "Unauthorized", f"the token cannot be read: {error}") from None


@functools.cache
def _resource(kind: Kind, subresource: str = "") -> Resource:
    """The library's description of a kind, which it would otherwise discover by asking the API server."""
    resource = Resource(
        prefix="apis" if kind.group else "api",
        group=kind.group,
        api_version=kind.version,
        kind=kind.kind,
        name=kind.plural,
        namespaced=True,
    )
    if not subresource:
        return resource
    return Subresource(resource, kind=kind.kind, name=f"{kind.plural}/{subresource}", namespaced=True)


def _error(status: int, text: str) -> ApiError:
    try:
        answer = json.loads(text)
        reason, message = str(answer.get("reason", "")), str(answer.get("message", text))
        causes = {str(cause.get("reason")) for cause in (answer.get("details") or {}).get("causes") or []}
    except (ValueError, AttributeError):
        reason, message, causes = "", text[:500], set()
    kind = {404: NotFound, 409: Conflict}.get(status, ApiError)
    if status == 403 and "NamespaceTerminating" in causes:
        kind = NamespaceTerminating
    return kind(status, reason, message)
