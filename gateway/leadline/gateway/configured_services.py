"""The services that the settings name, and the table of them that a gateway begins with.

Room: gateway. Without pods: discovery puts those in, and makes services in the same way that come later.
"""

from leadline.gateway.config import GatewayConfig, ServiceConfig
from leadline.gateway.errors import ConfigError
from leadline.gateway.policies.registry import PolicyError, load_policy
from leadline.gateway.services import Service, ServiceTable

__all__ = ["build_table", "make_service"]


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
