"""Connects the server with the publisher: the pod's identity and its load reports."""

from __future__ import annotations

import socket

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.publisher.publisher import Identity, Publisher, load_report
from leadline.engine.publisher.settings import PublishSettings, new_epoch
from leadline.engine.server.settings import ServerSettings
from leadline.engine.server.state import Phase, ServerState
from leadline.protocol.load import LoadReport

__all__ = ["announce", "publisher_of"]


def publisher_of(settings: ServerSettings, listener: socket.socket) -> Publisher | None:
    """None without `redis_url`. Raises ConfigError for settings that do not go together."""
    if settings.redis_url is None:
        return None
    where = PublishSettings.of(
        settings.redis_url,
        settings.service,
        pod=settings.pod_name,
        advertise=settings.advertise_address,
        host=settings.host,
        port=listener.getsockname()[1],
        credentials=settings.redis_credentials,
    )
    return Publisher(where, new_epoch())


async def announce(publisher: Publisher, engine: AsyncEngine, state: ServerState) -> None:
    """Begin to publish. Returns when gateways can know this epoch of the pod, or after a second."""
    chain = engine.prefix_chain
    identity = Identity(
        pod=publisher.settings.pod,
        address=publisher.settings.address,
        epoch=publisher.epoch,
        model=engine.served_name if chain is None else chain.model,
        revision="" if chain is None else chain.revision,
        served_names=state.names,
        block_size=engine.config.block_size,
        max_model_len=engine.max_model_len,
        max_concurrent_requests=engine.config.max_concurrent_requests,
        tokenizer=engine.tokenizer_digest,
        task=engine.task,
    )

    def report() -> LoadReport:
        # A frozen core is nothing that gateways should send requests to either.
        draining = state.phase is Phase.DRAINING or engine.frozen is not None
        return load_report(identity, engine.stats(), engine.speeds(), draining=draining)

    await publisher.start(report)
