"""The API server: where it is, who we are, and GET requests.

Room: gateway/discovery. In a pod, the service account's files: the token is read again for every request,
since the kubelet renews it there. Elsewhere a kubeconfig, with a token or a client certificate (no exec
plugins).
"""

import base64
import os
import ssl
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from leadline.gateway.documents import read_document
from leadline.gateway.errors import ConfigError

__all__ = ["KubeAPI", "KubeAccess", "find_access"]

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(slots=True)
class KubeAccess:
    """How to reach the API server."""

    server: str
    """https://host:port"""
    namespace: str = "default"
    """Our own."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    """Read for every request; goes before `token`."""

    def authorization(self) -> dict[str, str]:
        token = self.token
        if self.token_file is not None:
            # Between two swaps of the symlink the file may be missing: the last token is good for a while.
            with suppress(OSError):
                token = self.token = self.token_file.read_text(encoding="ascii").strip()
        return {"Authorization": f"Bearer {token}"} if token else {}


def find_access(kubeconfig: str = "") -> KubeAccess:
    """From the kubeconfig named, else the pod's service account, else $KUBECONFIG, else ~/.kube/config.

    Raises ConfigError that says what is missing.
    """
    if kubeconfig:
        return _from_kubeconfig(Path(kubeconfig))
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if host and (ACCOUNT / "token").exists():
        return _from_service_account(host, port)
    for place in (os.environ.get("KUBECONFIG", "").split(os.pathsep)[0], "~/.kube/config"):
        path = Path(place).expanduser()
        if place and path.is_file():
            return _from_kubeconfig(path)
    raise ConfigError(
        "discovery.kind is kubernetes, but there is no service account in this place (is "
        "automountServiceAccountToken off?), and no kubeconfig: set discovery.kubeconfig"
    )


class KubeAPI:
    """GET requests. Needs a running loop; `close` it."""

    def __init__(self, access: KubeAccess) -> None:
        self.access = access
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=access.tls if access.tls is not None else True),
            headers={"User-Agent": "leadline-gateway", "Accept": "application/json"},
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    def get(self, path: str, params: dict[str, str], *, timeout: aiohttp.ClientTimeout) -> Any:
        """An aiohttp request context. Whatever the status is, it is the caller's to look at."""
        return self._session.get(
            self.access.server.rstrip("/") + path,
            params=params,
            headers=self.access.authorization(),
            timeout=timeout,
            allow_redirects=False,
        )


# -- inside --------------------------------------------------------------------------------------------------


def _from_service_account(host: str, port: str) -> KubeAccess:
    try:
        tls = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        namespace = (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the service account in {ACCOUNT} cannot be used: {error}") from None
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return KubeAccess(server, namespace or "default", tls, token_file=ACCOUNT / "token")


def _from_kubeconfig(path: Path) -> KubeAccess:
    document = read_document(path)
    try:
        context = _named(document, "contexts", document.get("current-context"))["context"]
        cluster = _named(document, "clusters", context["cluster"])["cluster"]
        user = _named(document, "users", context["user"])["user"] or {}
        server = str(cluster["server"])
    except (KeyError, TypeError, AttributeError, LookupError) as error:
        raise ConfigError(f"{path}: not a kubeconfig with a current context: {error} is missing") from None
    if "exec" in user or "auth-provider" in user:
        raise ConfigError(f"{path}: exec and auth-provider plugins are not supported: use a token")
    access = KubeAccess(server, context.get("namespace") or "default", token=str(user.get("token", "")))
    if user.get("tokenFile"):
        access.token_file = path.parent / user["tokenFile"]
    if server.startswith("https://"):
        try:
            access.tls = _tls(path.parent, cluster, user)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(f"{path}: its certificates cannot be used: {error}") from None
    return access


def _named(document: Any, kind: str, name: Any) -> Any:
    for one in document[kind]:
        if one["name"] == name:
            return one
    raise LookupError(f"{kind}[{name!r}]")


def _tls(folder: Path, cluster: dict[str, Any], user: dict[str, Any]) -> ssl.SSLContext:
    authority = _content(folder, cluster, "certificate-authority")
    tls = ssl.create_default_context(cadata=authority.decode("ascii") if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    certificate, key = _content(folder, user, "client-certificate"), _content(folder, user, "client-key")
    if certificate and key:
        # The ssl module reads certificates from files only.
        with tempfile.NamedTemporaryFile(prefix="leadline-") as both:
            both.write(certificate + b"\n" + key)
            both.flush()
            tls.load_cert_chain(both.name)
    return tls


def _content(folder: Path, holder: dict[str, Any], name: str) -> bytes:
    if holder.get(f"{name}-data"):
        return base64.b64decode(holder[f"{name}-data"])
    return (folder / holder[name]).read_bytes() if holder.get(name) else b""
