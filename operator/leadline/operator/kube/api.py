"""Requests to the API server: get, list, server-side apply, delete, create, replace.

kopf watches, but is no client; this is. Credentials come from kopf's `ConnectionInfo`. A
service account's token is read anew for every request, since the kubelet renews the file. Every write is
counted.
"""

from __future__ import annotations

import base64
import json
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import kopf

from leadline.operator.kube.kinds import Kind
from leadline.protocol.isvc import FIELD_MANAGER

__all__ = ["ApiClient", "ApiError", "Conflict", "NamespaceTerminating", "NotFound"]

Object = dict[str, Any]

_TOKEN_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
AUTOSCALER_MANAGER = "leadline-autoscaler"
_LOOKING_MANAGER = "leadline-looks"
_REFUSALS_BY_500 = ("failed to create typed patch object", "Internal error occurred: failed calling webhook")
"""Beginnings of what the API server answers with 500 for an object that does not fit its kind's schema, and
where an admission webhook that must be asked is not there: an apply again at once would be told the same."""
_ANOTHER_OWNER = "this object has another owner"
"""In the chart: templates/operator/admission.yaml."""
_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)
_CONNECTIONS = 64
_WRITES = {"PATCH", "POST", "PUT", "DELETE"}


class ApiError(Exception):
    """The API server's answer to a request that failed."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{reason or status}: {message}")
        self.status, self.reason, self.message = status, reason, message

    @property
    def is_permanent(self) -> bool:
        """Whether the same request will fail again until somebody changes something: refused as invalid or as
        forbidden. Trying again is still right (that somebody may have), but slowly."""
        if self.status == 500:
            return self.message.startswith(_REFUSALS_BY_500)
        return self.status in (400, 403, 405, 413, 422)


class NotFound(ApiError):
    """404"""


class NamespaceTerminating(ApiError):
    """403 for something new in a namespace that is being deleted."""

    @property
    def is_permanent(self) -> bool:
        return False


class Conflict(ApiError):
    """409: somebody else was faster, or the object exists."""


class ApiClient:
    """Needs a running loop; `close` it."""

    def __init__(
        self, info: kopf.ConnectionInfo, on_write: Callable[[str, str], None] = lambda verb, kind: None
    ) -> None:
        """`on_write(method, kind)` is called after each write that the server answered."""
        self._server = info.server.rstrip("/")
        self._scheme, self._token = info.scheme or "Bearer", info.token
        self._on_write = on_write
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=_tls(info), limit=_CONNECTIONS),
            headers={"User-Agent": "leadline-operator", "Accept": "application/json"},
            timeout=_TIMEOUT,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return await self._request("GET", kind, kind.path(namespace, name))

    async def list(
        self, kind: Kind, namespace: str = "", selector: str = "", *, fields: str = ""
    ) -> tuple[list[Object], str]:
        """All of them, 500 at a time, and the resourceVersion at which the list is true. `fields`: a field
        selector."""
        items: list[Object] = []
        chosen = {"labelSelector": selector, "fieldSelector": fields}
        parameters = {"limit": "500"} | {name: value for name, value in chosen.items() if value}
        while True:
            page = await self._request("GET", kind, kind.path(namespace), parameters=parameters)
            items += page.get("items") or []
            token = page.get("metadata", {}).get("continue")
            if not token:
                return items, str(page["metadata"].get("resourceVersion", ""))
            parameters["continue"] = token

    async def find(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """One object, by a list of one, which needs no right that watching does not need."""
        parameters = {"fieldSelector": f"metadata.name={name}"}
        page = await self._request("GET", kind, kind.path(namespace), parameters=parameters)
        items = page.get("items") or []
        if not items:
            return None
        # Items of a list come without them.
        found: Object = {"apiVersion": kind.api_version, "kind": kind.kind, **items[0]}
        return found

    async def find_by_patch(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """As `find`, with the right to patch alone: a dry run of an apply that sets nothing answers with the
        object as it is. None too where not even that would be admitted: the real apply reports it. If the
        chart's admission policy hides an object of another owner, only its name is returned."""
        metadata = {"namespace": namespace, "name": name}
        try:
            found = await self._request(
                "PATCH",
                kind,
                kind.path(namespace, name),
                body={"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata},
                content_type="application/apply-patch+yaml",
                parameters={"fieldManager": _LOOKING_MANAGER, "dryRun": "All"},
            )
        except ApiError as error:
            if not error.is_permanent:
                raise
            if _ANOTHER_OWNER in error.message:
                return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": dict(metadata)}
            return None
        # One that would be made by it is of no version.
        return found if found["metadata"].get("resourceVersion") else None

    async def apply(self, wanted: Object, kind: Kind, subresource: str = "") -> Object:
        """Server-side apply: the fields in `wanted` become ours, other managers keep theirs."""
        metadata = wanted["metadata"]
        return await self._request(
            "PATCH",
            kind,
            kind.path(metadata["namespace"], metadata["name"], subresource),
            body=wanted,
            content_type="application/apply-patch+yaml",
            parameters={"fieldManager": FIELD_MANAGER, "force": "true"},
        )

    async def scale(self, kind: Kind, namespace: str, name: str, replicas: int, version: str = "") -> None:
        """Through the scale subresource, as kubectl and autoscalers do it. Raises Conflict if the object has
        left the resourceVersion `version`."""
        metadata = {"metadata": {"resourceVersion": version}} if version else {}
        await self._request(
            "PATCH",
            kind,
            kind.path(namespace, name, "scale"),
            body={**metadata, "spec": {"replicas": replicas}},
            content_type="application/merge-patch+json",
            parameters={"fieldManager": AUTOSCALER_MANAGER},
        )

    async def set_spec(self, kind: Kind, metadata: Object, fields: Object) -> None:
        """Set fields of the spec of exactly the object that `metadata` is of, whoever has set them; None
        takes one away, which an apply cannot do with somebody else's."""
        await self._request(
            "PATCH",
            kind,
            kind.path(metadata["namespace"], metadata["name"]),
            body={"metadata": {"uid": metadata["uid"]}, "spec": fields},
            content_type="application/merge-patch+json",
            parameters={"fieldManager": FIELD_MANAGER},
        )

    async def annotate(self, kind: Kind, metadata: Object, annotations: dict[str, str]) -> None:
        """Set annotations of exactly the object that `metadata` is of."""
        await self._request(
            "PATCH",
            kind,
            kind.path(metadata["namespace"], metadata["name"]),
            body={"metadata": {"uid": metadata["uid"], "annotations": annotations}},
            content_type="application/merge-patch+json",
            parameters={"fieldManager": FIELD_MANAGER},
        )

    async def create(self, wanted: Object, kind: Kind) -> Object:
        path = kind.path(wanted["metadata"]["namespace"])
        return await self._request(
            "POST", kind, path, body=wanted, parameters={"fieldManager": FIELD_MANAGER}
        )

    async def replace(self, wanted: Object, kind: Kind) -> Object:
        """Raises Conflict if the object is no longer at the resourceVersion in `wanted`."""
        metadata = wanted["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        return await self._request("PUT", kind, path, body=wanted, parameters={"fieldManager": FIELD_MANAGER})

    async def delete(self, target: Object, kind: Kind) -> None:
        """Delete exactly this object, not a successor of the same name. Gone already is fine."""
        metadata = target["metadata"]
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": metadata["uid"]},
        }
        try:
            await self._request("DELETE", kind, kind.path(metadata["namespace"], metadata["name"]), body=body)
        except (NotFound, Conflict):
            return

    # -- inside ----------------------------------------------------------------------------------------------

    async def _request(
        self,
        method: str,
        kind: Kind,
        path: str,
        *,
        body: Object | None = None,
        content_type: str = "application/json",
        parameters: dict[str, str] | None = None,
    ) -> Object:
        headers = self._authorization()
        data = None
        if body is not None:
            # JSON is YAML, so an apply patch may be JSON.
            data, headers["Content-Type"] = json.dumps(body).encode(), content_type
        async with self._session.request(
            method, self._server + path, params=parameters, data=data, headers=headers, allow_redirects=False
        ) as response:
            text = await response.text()
            if method in _WRITES and "dryRun" not in (parameters or {}):
                self._on_write(method, kind.kind)
            if response.status >= 400:
                raise _error(response.status, text)
        answer: Object = json.loads(text)
        return answer

    def _authorization(self) -> dict[str, str]:
        token = self._token
        if token and _TOKEN_FILE.exists():
            token = _TOKEN_FILE.read_text(encoding="ascii").strip() or token
        return {"Authorization": f"{self._scheme} {token}"} if token else {}


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


def _tls(info: kopf.ConnectionInfo) -> ssl.SSLContext | bool:
    if not info.server.startswith("https://"):
        return True
    authority = _text(info.ca_data)
    tls = ssl.create_default_context(cafile=str(info.ca_path) if info.ca_path else None, cadata=authority)
    if info.insecure:
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    if info.certificate_path and info.private_key_path:
        tls.load_cert_chain(str(info.certificate_path), str(info.private_key_path))
    elif info.certificate_data and info.private_key_data:
        # The ssl module reads certificates from files only.
        with tempfile.NamedTemporaryFile("w", prefix="leadline-") as both:
            both.write(f"{_text(info.certificate_data)}\n{_text(info.private_key_data)}")
            both.flush()
            tls.load_cert_chain(both.name)
    return tls


def _text(data: str | bytes | None) -> str | None:
    """PEM, from PEM or from base64 of it."""
    if not data:
        return None
    text = data.decode("ascii") if isinstance(data, bytes) else data
    return text if "-----BEGIN" in text else base64.b64decode(text).decode("ascii")
