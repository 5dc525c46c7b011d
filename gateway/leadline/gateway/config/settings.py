"""Settings of the gateway: what may be set, what it is when it is not set, and what cannot be together.

Data only: file.py and options.py fill them.
Every ConfigError begins with the path of the field (`services[1].pods[0]`). As in a file:

    redis_url: redis://valkey:6379/0
    keys_file: /etc/leadline/keys.yaml
    discovery: {kind: kubernetes, namespace: default}
    services:
      - name: default/qwen
        model: /models/qwen3-8b
        served_names: [Qwen/Qwen3-8B, qwen]
      - name: default/small
        pods: [10.0.0.7:8000, 10.0.0.8:8000]
    models:
      qwen-next: {default/qwen: 90, default/qwen-canary: 10}
"""

# ruff: noqa: RUF012 (msgspec copies mutable defaults; ruff does not see that Strict is a Struct)

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from leadline.gateway.config.documents import Strict
from leadline.gateway.errors import ConfigError
from leadline.protocol.http.cors import invalid_origin
from leadline.protocol.keys import ServiceKeys

__all__ = [
    "AdmissionConfig",
    "DiscoveryConfig",
    "GatewayConfig",
    "PodConfig",
    "RateLimitConfig",
    "ResponsesConfig",
    "ServerConfig",
    "ServiceConfig",
    "UpstreamConfig",
    "split_address",
]

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
NonEmpty = Annotated[str, Meta(min_length=1)]


class PodConfig(Strict):
    """One pod of a static list. In a file, the address alone will do."""

    address: NonEmpty
    """host:port of its HTTP API."""
    id: str = ""
    """Name it reports with its load (`leadline serve --pod-name`); the address when left out."""


class ServiceConfig(Strict):
    """One service: pods of one model."""

    def __repr__(self) -> str:
        return f"ServiceConfig({self.name!r}, …)"

    name: NonEmpty
    """<namespace>/<name>, as in its Redis keys."""
    model: str = ""
    """Model folder with the tokenizer; when empty, the gateway fetches the tokenizer from a pod."""
    served_names: list[NonEmpty] = []
    """Names and aliases that clients may use, in addition to those that pods report."""
    policy: NonEmpty | None = None
    """Routing policy; the gateway's `policy` when left out."""
    policy_options: dict[str, Any] = {}
    """Parameters of the policy."""
    block_size: AtLeastOne = 64
    """Tokens per block, until a pod reports its own block size."""
    pod_concurrency: Count | None = None
    """Concurrent requests per pod; `admission.pod_concurrency` when left out."""
    tokenizer: Literal["auto", "approximate"] = "auto"
    """auto: match tokens. approximate: match pieces of text, without a tokenizer."""
    pods: list[PodConfig] = []
    """Static list of pods; when empty, pods come from discovery."""
    api_key: str = ""
    """Sent to its pods; `upstream.api_key` when left out."""
    kubernetes_service: str = ""
    """Kubernetes Service with the EndpointSlices of the pods; the service's own name when empty."""


class DiscoveryConfig(Strict):
    """Where pods come from, for services without a static list."""

    kind: Literal["static", "kubernetes"] = "static"
    """static: the pods in `services`. kubernetes: watch EndpointSlices."""
    namespace: str = ""
    """Kubernetes namespace to watch; empty: the namespace of the gateway's pod; "*": all."""
    trust: Literal["inferenceservices", "labels"] = "inferenceservices"
    """Source of names and pods. inferenceservices: the status of InferenceServices, which the operator
    writes. labels: every Service labelled `serving.leadline.io/service`, with the names that its pods report.
    Use labels only without the operator: a user who may create a Service or a pod in a watched namespace can
    then take any name."""
    label_selector: str = ""
    """Label selector of EndpointSlices; when empty, slices of configured services and slices labelled
    `serving.leadline.io/service`."""
    operator: str | None = None
    """Serve only services of the operator with this name; "": of the operator without a name; when left out,
    all services labelled `serving.leadline.io/service`."""
    port: str = "http"
    """Name or number of the endpoint port; the first port if no port matches."""
    resync_seconds: Positive = 300.0
    """Interval at which the whole list is read again."""
    kubeconfig: str = ""
    """Kubeconfig file; empty: the pod's service account, or $KUBECONFIG outside a pod."""


class AdmissionConfig(Strict):
    """When requests wait and when they are refused."""

    pod_concurrency: Count = 0
    """Concurrent requests per pod; 0: the limit that the pod reports."""
    pod_queue: Count = 8
    """Requests that may wait inside a pod before it counts as saturated."""
    max_queued: Count = 1000
    """Requests that may wait in the gateway for one service; more are refused with 429."""
    queue_timeout_seconds: Positive = 60.0
    """Longest wait in the gateway's queue; then the request is refused with 503."""
    hold_without_pods_seconds: NonNegative = 60.0
    """How long requests wait for a service without any pod (scaled to zero)."""
    class_weights: dict[str, Positive] = msgspec.field(
        default_factory=lambda: {"interactive": 4.0, "batch": 1.0}
    )
    """Shares of the capacity under load. A class that is not named has weight 1."""
    tenant_weights: dict[str, Positive] = {}
    """Shares within a class. A tenant that is not named has weight 1."""


class RateLimitConfig(Strict):
    """Requests and tokens a minute; the numbers come with each key."""

    redis_timeout_seconds: Positive = 0.02
    """Timeout of Redis; after it, this gateway counts by itself."""
    replicas: AtLeastOne = 1
    """Number of gateways that share the limits; without Redis each allows its part."""
    requests_per_minute: Count = 0
    """Default requests per minute for keys without a limit of their own; without a keys file, for all clients
    together. 0: no limit."""
    tokens_per_minute: Count = 0
    """The same for tokens of prompt and output together."""


class ResponsesConfig(Strict):
    """Storing of responses, for `previous_response_id`."""

    store_seconds: NonNegative = 0.0
    """How long responses of `/v1/responses`, and their input, are stored in Redis; 0: not at all."""
    max_bytes: AtLeastOne = 1 << 20
    """A response that is larger together with its input is not stored."""
    max_per_tenant: AtLeastOne = 1000
    """Responses that are stored for one tenant; beyond them the oldest are deleted."""


class ServerConfig(Strict):
    """The side that clients see."""

    host: str = "0.0.0.0"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080
    """Port to listen on; 0 picks a free one."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """Separate port for `/metrics`, which the API port then answers with 404; null: `/metrics` on the API
    port; 0: a free port."""
    workers: AtLeastOne = 1
    """Processes that share the port."""
    max_body_bytes: AtLeastOne = 32 << 20
    """Larger requests are refused with 413."""
    request_timeout_seconds: Positive = 60.0
    """Longest time from the first to the last byte of a request; a slower one is answered with 408."""
    write_timeout_seconds: Positive = 60.0
    """A client that stays connected and reads nothing for this long is disconnected."""
    keep_alive_seconds: Positive = 120.0
    """How long a connection without a request stays open. Proxies in front must close theirs sooner."""
    shutdown_seconds: NonNegative = 30.0
    """How long streams may continue after SIGTERM."""
    access_log: bool = True
    """Write one JSON line per completion, without prompts, answers and keys."""
    cors_origins: list[NonEmpty] = []
    """Origins whose pages may call the gateway from a browser, such as `https://app.example`; `*`: any;
    empty: none."""
    tokenizer_info: bool = False
    """Serve `GET /tokenizer_info`, which shows a model's special tokens and its chat template."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector for traces; empty: no traces."""


class UpstreamConfig(Strict):
    """The side that pods see."""

    connect_timeout_seconds: Positive = 2.0
    """Timeout for connecting to a pod."""
    first_byte_timeout_seconds: Positive = 300.0
    """Streams: longest time from sending the request to the first byte of the answer."""
    answer_timeout_seconds: Positive = 3600.0
    """Other answers: longest time until the complete answer. A pod that hangs is detected much sooner than
    either timeout."""
    idle_timeout_seconds: Positive = 120.0
    """Longest time without data within an answer."""
    retries: Count = 2
    """How many other pods are tried before the first byte."""
    migrations: Count = 3
    """How often a stream may move to another pod after its first byte."""
    breaker_failures: AtLeastOne = 3
    """Consecutive failures after which a pod's circuit opens."""
    breaker_seconds: Positive = 5.0
    """How long the circuit stays open at first; longer each time, up to half a minute."""
    api_key: str = ""
    """Sent to the pods of services without an `api_key` of their own. Clients' keys are never sent to
    pods."""

    def __repr__(self) -> str:
        return "UpstreamConfig(…)"


class GatewayConfig(Strict):
    """Everything. `file.read_config` reads and checks it."""

    redis_url: str = ""
    """redis://, rediss:// or unix://; empty: route without cache events. Holds the password: never log it."""
    keys_file: str = ""
    """File with the clients' keys; empty: no key is needed."""
    policy: NonEmpty = "prefix"
    """Routing policy: prefix, least-load, session, random, or the name of an entry point."""
    policy_options: dict[str, Any] = {}
    """Parameters of the policy (policies/README.md)."""
    services: list[ServiceConfig] = []
    """Services; with `discovery.kind: kubernetes` only those with settings of their own."""
    models: dict[str, dict[str, NonNegative]] = {}
    """Served name → service → weight, for canaries."""
    discovery: DiscoveryConfig = msgspec.field(default_factory=DiscoveryConfig)
    admission: AdmissionConfig = msgspec.field(default_factory=AdmissionConfig)
    limits: RateLimitConfig = msgspec.field(default_factory=RateLimitConfig)
    responses: ResponsesConfig = msgspec.field(default_factory=ResponsesConfig)
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    upstream: UpstreamConfig = msgspec.field(default_factory=UpstreamConfig)

    def __repr__(self) -> str:
        # Neither the Redis password nor the upstream key shall reach a log by way of a repr.
        return f"GatewayConfig(services={[service.name for service in self.services]!r}, …)"

    def validate(self) -> "GatewayConfig":
        """Checks what types cannot say; raises ConfigError. Returns self."""
        self._check_services()
        self._check_names()
        self._check_models()
        if self.redis_url and not self.redis_url.startswith(("redis://", "rediss://", "unix://")):
            raise ConfigError("redis_url: must begin with redis://, rediss:// or unix://")
        if self.responses.store_seconds and not self.redis_url:
            raise ConfigError("responses.store_seconds: needs redis_url, where responses are stored")
        if (wrong := invalid_origin(self.server.cors_origins)) is not None:
            raise ConfigError(
                f"server.cors_origins: {wrong!r} is no origin; write scheme://host[:port], or *"
            )
        if self.server.metrics_port and self.server.metrics_port == self.server.port:
            raise ConfigError("server.metrics_port: must differ from server.port; leave it out for one port")
        if not self.services and self.discovery.kind == "static":
            raise ConfigError("services: at least one is needed, unless discovery.kind is kubernetes")
        return self

    def _check_services(self) -> None:
        seen: dict[str, int] = {}
        for position, service in enumerate(self.services):
            path = f"services[{position}]"
            _check_service_name(service.name, f"{path}.name")
            if service.name in seen:
                raise ConfigError(f"{path}.name: {service.name} is services[{seen[service.name]}] already")
            seen[service.name] = position
            for number, pod in enumerate(service.pods):
                split_address(pod.address, f"{path}.pods[{number}].address")
            ids = [pod.id or pod.address for pod in service.pods]
            if twice := {name for name in ids if ids.count(name) > 1}:
                raise ConfigError(f"{path}.pods: {min(twice)} is listed twice")

    def _check_names(self) -> None:
        """One name for clients is of two services only where `models` says how they share it."""
        claimed: dict[str, str] = {}
        for position, service in enumerate(self.services):
            for name in service.served_names:
                other = claimed.setdefault(name, service.name)
                if other != service.name and name not in self.models:
                    raise ConfigError(
                        f"services[{position}].served_names: {name!r} is served by {other} already; to share "
                        f"it, give both a weight: models: {{{name}: {{{other}: 90, {service.name}: 10}}}}"
                    )

    def _check_models(self) -> None:
        known = {service.name for service in self.services}
        for name, shares in self.models.items():
            if not sum(shares.values()) > 0:
                raise ConfigError(f"models[{name!r}]: one weight must be above 0")
            for other in shares:
                _check_service_name(other, f"models[{name!r}]")
                if self.discovery.kind == "static" and other not in known:
                    raise ConfigError(f"models[{name!r}]: there is no service {other!r} in services")


def split_address(address: str, path: str) -> tuple[str, int]:
    """(host, port) of `host:port` or `[v6]:port`. Raises ConfigError that begins with `path`."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    bad_v6 = ":" in host and bare == host
    if (
        not colon
        or not bare
        or bad_v6
        or not port.isascii()
        or not port.isdigit()
        or not 0 < int(port) < 65536
    ):
        raise ConfigError(f"{path}: must be HOST:PORT (or [IPv6]:PORT), not {address!r}")
    return bare, int(port)


# -- inside --------------------------------------------------------------------------------------------------


def _check_service_name(name: str, path: str) -> None:
    namespace, slash, rest = name.partition("/")
    try:
        if not slash:
            raise ValueError("a slash is missing")
        ServiceKeys(namespace, rest)
    except ValueError as error:
        raise ConfigError(f"{path}: must be NAMESPACE/NAME, not {name!r}: {error}") from None
