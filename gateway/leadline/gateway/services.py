"""The services behind one gateway, and which of them a request's `model` means.

A service is a set of interchangeable pods of one model, `<namespace>/<name>` as in Kubernetes
and in the Redis keys. Clients do not know services; they send names:

    model: "X" ──► weights of X, if configured (canary)     "x": {ns/stable: 90, ns/canary: 10}
               ├─► served names and aliases in the configuration
               ├─► ns/name of a service that no operator has made
               ├─► names that the operator has given to its InferenceServices
               ├─► served names that pods report with their load
               └─► the name after the slash

The last two lines are for services that no operator has made: what the pods of an InferenceService report
gives no names. The first line that knows the name decides. Names are compared as strings and may be any
(P17): nothing is folded, cut or escaped. The operator gives a name to one service; where two of them have it
all the same, the older one counts, and else the first by service name, on every gateway replica alike.
"""

import random
import time
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from leadline.gateway.config.settings import GatewayConfig, ServiceConfig
from leadline.gateway.errors import ConfigError, NoPods, UnknownModel, unknown_model
from leadline.gateway.index.service_index import ServiceIndex
from leadline.gateway.pods import Pod
from leadline.gateway.policies.base import PolicyError, RoutingPolicy, load_policy
from leadline.gateway.tokens.mode import TokenMode
from leadline.protocol.isvc import Reason
from leadline.protocol.keys import ServiceKeys
from leadline.protocol.openai.service import ModelCard

if TYPE_CHECKING:
    from leadline.gateway.tokens.approximate import ApproximateTokens
    from leadline.gateway.tokens.service import TokenService
    from leadline.protocol.load import LoadReport

__all__ = ["Service", "ServiceTable", "build_table", "make_service"]


_REPORTED_EVERY = 1.0
"""Seconds for which the names that pods reported are remembered; a miss asks again after a tenth of that."""


@dataclass(slots=True, eq=False)
class Service:
    """One service. Compared and hashed by identity; lives as long as the gateway knows the service."""

    name: str
    """<namespace>/<name>."""
    model: str
    """Model folder, for the tokenizer; where there is none, pods are asked for theirs."""
    policy: RoutingPolicy
    served_names: tuple[str, ...] = ()
    """Configured names and aliases. Those that pods report come on top."""
    granted: tuple[str, ...] | None = None
    """Names that the operator has given to the InferenceService; None: there is none. Written by discovery
    only, as the fields up to `stuck`."""
    undecided: tuple[str, ...] = ()
    """Names that it claims while the operator has not decided on any."""
    age: tuple[str, str] = ("", "")
    """Of the InferenceService; the oldest is the lowest."""
    reason: str = ""
    """Why the InferenceService is not ready, as the operator says; empty where that is not known."""
    wake_seconds: float = 0.0
    """How long a request may wait for a first pod, where the service sleeps without requests. 0: the service
    does not, and the configuration says how long."""
    stuck: bool = False
    """The operator says that no pod can come as things are."""
    api_key: str = field(default="", repr=False)
    """Sent to its pods; empty: none."""
    pods: dict[str, Pod] = field(default_factory=dict)
    """Pod id → pod. Written by discovery only."""
    index: ServiceIndex = field(default_factory=ServiceIndex)
    tokens: "TokenService | ApproximateTokens | None" = None
    token_mode: TokenMode = field(default_factory=TokenMode)
    """What `tokens` is, and why. Only tokenizers/loader.py writes both."""
    block_size: int = 64
    """Tokens a block, until a pod reports its own."""
    pod_concurrency: int = 0
    """Requests a pod is given at once; 0: what the pod reports as its limit, if it does."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since the Unix epoch, for /v1/models."""
    namespaces: "Sequence[LoadReport]" = ()
    """A report for each namespace of block hashes that pods have; maintained by request/prompt.py."""
    _names: dict[str, None] = field(default_factory=dict)

    @property
    def keys(self) -> ServiceKeys:
        """Names of the service's Redis keys."""
        namespace, _, name = self.name.partition("/")
        return ServiceKeys(namespace, name)

    def reported_names(self) -> dict[str, None]:
        """Names beside the configured ones: those that the operator has given, else those that pods reported.
        A service scaled to zero keeps the last ones: requests for them must be held, not refused."""
        if self.granted is not None:
            return dict.fromkeys(self.granted)
        reported = {name: None for pod in self.pods.values() for name in pod.served_names}
        self._names = reported or self._names
        return self._names

    def without_pods(self) -> str:
        """Return the message to a client when no pod takes requests."""
        why = f": the operator reports {self.reason}" if self.reason else ""
        return f"{self.name} has no pod that takes requests{why}"

    @property
    def task(self) -> str:
        """What the pods' model is served for: generate, embed or rerank."""
        return next((pod.task for pod in self.pods.values()), "generate")

    def can_serve(self) -> bool:
        """Some pod is ready and not leaving."""
        return any(pod.ready and not pod.draining for pod in self.pods.values())

    def can_wake(self) -> bool:
        """It gets a pod because a request waits, as far as the operator says."""
        return self.wake_seconds > 0 and not self.stuck

    def upstream_model(self, model: str, pod: Pod) -> str | None:
        """What the body's `model` must be changed to for this pod; None: pass the body unchanged.

        A pod refuses names it does not serve, so an alias or canary name has to become one of its own.
        """
        if not pod.served_names or model in pod.served_names:
            return None
        return pod.served_names[0]


class ServiceTable:
    """All services of the gateway and the names that lead to them."""

    __slots__ = (
        "_configured",
        "_reported",
        "_reported_at",
        "_services",
        "_undecided",
        "_weights",
        "complete",
    )

    def __init__(
        self, services: Iterable[Service] = (), weights: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """`weights`: client-facing name → service name → share. Raises ConfigError for shares that are
        negative or all zero. Services that do not exist (yet) get no share."""
        self.complete = True
        """False while discovery has not heard yet which services there are."""
        self._services: dict[str, Service] = {}
        self._weights = {name: dict(shares) for name, shares in (weights or {}).items()}
        for name, shares in self._weights.items():
            if any(share < 0 for share in shares.values()) or not sum(shares.values()) > 0:
                raise ConfigError(
                    f"models[{name!r}]: weights must not be negative, and one of them must be above 0"
                )
        self._configured: dict[str, Service] = {}
        self._reported: dict[str, Service] = {}
        self._undecided: set[str] = set()
        self._reported_at = float("-inf")
        for service in services:
            self.add(service)

    # The set of services

    def add(self, service: Service) -> None:
        """Raises ConfigError when there is one of that name."""
        if service.name in self._services:
            raise ConfigError(f"there are two services named {service.name}")
        self._services[service.name] = service
        self._rebuild()

    def remove(self, name: str) -> Service | None:
        service = self._services.pop(name, None)
        self._rebuild()
        return service

    def get(self, name: str) -> Service | None:
        """By `<namespace>/<name>`."""
        return self._services.get(name)

    def __iter__(self) -> Iterator[Service]:
        """In order of name."""
        return iter(list(self._services.values()))

    def __len__(self) -> int:
        return len(self._services)

    # Names

    def resolve(self, model: str | None, rng: random.Random | None = None) -> Service:
        """The service for a request that names this model.

        None is allowed where there is one service only. With weights, services that have no pod to serve are
        passed over unless none has, but not those that sleep: a request starts their pods. Raises
        UnknownModel (404, code model_not_found), or NoPods (503) while not all services are known.
        """
        if model is None:
            if len(self._services) == 1:
                return next(iter(self._services.values()))
            raise UnknownModel(
                "`model` is missing: it says what to ask", param="model", code="model_not_found"
            )
        if model in self._weights:
            service = self._weighted(model, rng or random)  # type: ignore[arg-type]
            if service is not None:
                return service
        found = self._configured.get(model) or self._full_name(model) or self._find_reported(model)
        if found is None:
            found = self._short_name(model)
        if found is None and not self.complete:
            raise NoPods("the gateway does not know the services yet", code="starting", retry_after=1)
        if found is None and model in self._undecided:
            raise NoPods(
                "the operator has not decided yet which service has this name", code="starting", retry_after=1
            )
        if found is None:
            raise unknown_model(model)
        return found

    def names_changed(self) -> None:
        """Names that the operator gives have changed."""
        self._reported_at = float("-inf")

    def names(self) -> list[tuple[str, Service]]:
        """Every name that clients may use and the service it leads to, sorted by name; of a name with weights
        the service with the largest share. Services' own names are left out where they have served names."""
        self._collect_reported(force=True)
        reported = {name: service for name, service in self._reported.items() if name != service.name}
        found = {**reported, **self._configured}
        named = set(found.values())
        for service in self._services.values():
            if service not in named and (service.granted is None or service.name in service.granted):
                found[service.name] = service
        for name, shares in self._weights.items():
            known = [(share, other) for other, share in shares.items() if other in self._services]
            if known:
                found[name] = self._services[max(known, key=lambda pair: pair[0])[1]]
        return sorted(found.items(), key=lambda item: item[0])

    def model_cards(self) -> list[ModelCard]:
        """The data of `GET /v1/models`. `max_model_len` is the least of the service's pods."""
        cards = []
        for name, service in self.names():
            card = ModelCard(id=name, created=service.created)
            match service.task:
                case "embed" | "rerank" as task:
                    card.task = task
                case _:
                    card.prefix_matching = service.token_mode.card()
            lengths = [
                pod.report.max_model_len
                for pod in service.pods.values()
                if pod.report is not None and pod.report.max_model_len
            ]
            if lengths:
                card.max_model_len = min(lengths)
            cards.append(card)
        return cards

    # -- inside ----------------------------------------------------------------------------------------------

    def _rebuild(self) -> None:
        self._services = dict(sorted(self._services.items()))
        self._configured = {}
        for service in self._services.values():
            for name in service.served_names:
                self._configured.setdefault(name, service)
        self._reported_at = float("-inf")

    def _weighted(self, model: str, rng: random.Random) -> Service | None:
        shares = [
            (service, share)
            for name, share in self._weights[model].items()
            if share > 0 and (service := self._services.get(name)) is not None
        ]
        able = [pair for pair in shares if pair[0].can_serve() or pair[0].reason == Reason.ASLEEP] or shares
        if len(able) < 2:
            return able[0][0] if able else None
        bounds = list(accumulate(share for _, share in able))
        # min: random() * total may round up to total.
        place = min(bisect(bounds, rng.random() * bounds[-1]), len(able) - 1)
        return able[place][0]

    def _find_reported(self, model: str) -> Service | None:
        self._collect_reported()
        found = self._reported.get(model)
        if found is None and time.monotonic() - self._reported_at > _REPORTED_EVERY / 10:
            # A pod may have come a moment ago; but names that no service has must stay cheap.
            self._collect_reported(force=True)
            found = self._reported.get(model)
        return found

    def _collect_reported(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._reported_at > _REPORTED_EVERY:
            self._reported_at = now
            self._reported = {}
            self._undecided = set()
            for service in sorted(self._services.values(), key=lambda one: (one.granted is None, one.age)):
                self._undecided.update(service.undecided)
                for name in service.reported_names():
                    self._reported.setdefault(name, service)

    def _full_name(self, model: str) -> Service | None:
        service = self._services.get(model)
        return service if service is not None and service.granted is None else None

    def _short_name(self, model: str) -> Service | None:
        return next(
            (
                service
                for name, service in self._services.items()
                if service.granted is None and name.partition("/")[2] == model
            ),
            None,
        )


def make_service(config: ServiceConfig, defaults: GatewayConfig) -> Service:
    """The service of an entry, without pods. Raises ConfigError for a policy that cannot be made."""
    name = config.policy or defaults.policy
    options = config.policy_options if config.policy else {**defaults.policy_options, **config.policy_options}
    try:
        policy = load_policy(name, **options)
    except PolicyError as error:
        raise ConfigError(f"service {config.name}: {error}") from None
    concurrency = config.pod_concurrency
    return Service(
        name=config.name,
        model=config.model,
        policy=policy,
        served_names=tuple(config.served_names),
        block_size=config.block_size,
        api_key=config.api_key or defaults.upstream.api_key,
        pod_concurrency=defaults.admission.pod_concurrency if concurrency is None else concurrency,
    )


def build_table(config: GatewayConfig) -> ServiceTable:
    """The configured services, without pods: discovery puts those in."""
    return ServiceTable((make_service(entry, config) for entry in config.services), config.models)
