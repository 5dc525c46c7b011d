"""Address and credentials of the API server, as a client of `kubernetes.aio`.

The library reads the token of a service account again every minute, since the kubelet renews the file;
`find_access` makes it do the same with the token file or exec plugin of a kubeconfig.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config.kube_config import KubeConfigLoader

from leadline.gateway.config.documents import read_document
from leadline.gateway.errors import ConfigError

__all__ = ["KubeAccess", "find_access"]

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REFRESH_SECONDS = 60.0
"""After which the token of a kubeconfig is read again."""


@dataclass(slots=True)
class KubeAccess:
    client: ApiClient
    """Close it."""
    namespace: str = "default"
    """Our own."""


async def find_access(kubeconfig: str = "") -> KubeAccess:
    """Use the kubeconfig named, else the pod's service account, else $KUBECONFIG, else ~/.kube/config.

    Raises ConfigError that says what is missing.
    """
    if kubeconfig:
        return await _from_kubeconfig(Path(kubeconfig))
    if os.environ.get("KUBERNETES_SERVICE_HOST") and (ACCOUNT / "token").exists():
        return _from_service_account()
    if (path := _default_kubeconfig()) is not None:
        return await _from_kubeconfig(path)
    raise ConfigError(
        "discovery.kind is kubernetes, but there is no service account in this place (is "
        "automountServiceAccountToken off?), and no kubeconfig: set discovery.kubeconfig"
    )


# -- inside --------------------------------------------------------------------------------------------------


def _default_kubeconfig() -> Path | None:
    places = (os.environ.get("KUBECONFIG", "").split(os.pathsep)[0], "~/.kube/config")
    paths = (Path(place).expanduser() for place in places if place)
    return next((path for path in paths if path.is_file()), None)


def _from_service_account() -> KubeAccess:
    configuration = Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
        namespace = (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        return KubeAccess(_client(configuration), namespace or "default")
    except (config.ConfigException, OSError) as error:
        raise ConfigError(f"the service account in {ACCOUNT} cannot be used: {error}") from None


async def _from_kubeconfig(path: Path) -> KubeAccess:
    document = read_document(path)  # its errors show no value of the file, which may be a secret
    configuration = Configuration()
    try:
        loader = KubeConfigLoader(document, config_base_path=str(path.parent))
        await _load(loader, configuration)
        client = _client(configuration)
    except (config.ConfigException, OSError, ValueError) as error:
        raise ConfigError(f"{path}: this kubeconfig cannot be used: {error}") from None
    except (AttributeError, KeyError, TypeError):
        raise ConfigError(f"{path}: not a kubeconfig with a current context") from None
    read_at = time.monotonic()

    async def refresh(_: Configuration) -> None:
        nonlocal read_at
        if time.monotonic() - read_at >= REFRESH_SECONDS:
            read_at = time.monotonic()
            await _load(loader, configuration)

    configuration.refresh_api_key_hook = refresh
    return KubeAccess(client, loader.current_context["context"].get("namespace") or "default")


async def _load(loader: KubeConfigLoader, configuration: Configuration) -> None:
    await loader.load_and_set(configuration)
    token = configuration.api_key.get("BearerToken")
    if token is not None:
        configuration.api_key["BearerToken"] = token.strip()  # a token file may end in a line break


def _client(configuration: Configuration) -> ApiClient:
    """Raises OSError for certificates that cannot be used."""
    configuration.client_session_kwargs = {"trust_env": False}
    client = ApiClient(configuration)
    client.user_agent = "leadline-gateway"
    return client
