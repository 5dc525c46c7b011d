"""OpenTelemetry spans, where an endpoint is configured. One span a request, child of the client's trace,
parent of the engine's: `traceparent` is read and passed on (W3C Trace Context).

The packages are optional (opentelemetry-sdk, opentelemetry-exporter-otlp-proto-http) and imported only when
tracing is on.
"""

import logging
import os
import threading
from typing import Any

from leadline.gateway.errors import ConfigError
from leadline.gateway.request.context import Call

__all__ = ["Tracing", "start_tracing"]

logger = logging.getLogger("leadline.gateway")

_LAST_EXPORT = 1.0
"""Seconds that the last spans get when the gateway stops."""


class Tracing:
    """Starts and ends spans. `close` sends what is left."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("leadline.gateway")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._spans: dict[Call, Any] = {}

    def start(self, call: Call) -> None:
        """Begin the span and put it into the headers that the pod gets."""
        from opentelemetry.trace import set_span_in_context

        carried = {
            name.decode(): value.decode("latin-1")
            for name, value in call.headers
            if name in (b"traceparent", b"tracestate")
        }
        span = self._tracer.start_span(
            call.dialect.operation,
            context=self._propagator.extract(carried),
            kind=self._kind,
            attributes={
                "leadline.service": call.service.name,
                "gen_ai.request.model": call.incoming.fields.model or "",
                "gen_ai.request.stream": call.incoming.stream,
                "leadline.prompt_tokens": call.prompt.tokens,
            },
        )
        self._spans[call] = span
        out: dict[str, str] = {}
        self._propagator.inject(out, context=set_span_in_context(span))
        call.headers = [pair for pair in call.headers if pair[0] not in (b"traceparent", b"tracestate")] + [
            (name.encode(), value.encode()) for name, value in out.items()
        ]

    def end(self, call: Call) -> None:
        span = self._spans.pop(call, None)
        if span is None:
            return
        decision, usage = call.decision, call.usage
        span.set_attribute("http.response.status_code", call.status)
        span.set_attribute("leadline.attempts", call.attempts)
        span.set_attribute("leadline.migrations", call.migrations)
        if decision is not None:
            span.set_attribute("leadline.pod", decision.pod.id)
            span.set_attribute("leadline.predicted_cached_tokens", call.predicted)
        if usage is not None:
            span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        if call.first_byte_at:
            span.set_attribute("leadline.first_byte_seconds", call.first_byte_at - call.arrived)
        if call.status >= 500:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def close(self) -> None:
        """Export the spans that are left. A collector that does not answer delays the end by one second; the
        exporter alone would try for ten."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(_LAST_EXPORT)
        if closing.is_alive():
            logger.warning("the trace collector does not answer; the last spans are lost")


def start_tracing(endpoint: str) -> Tracing | None:
    """Tracing to an OTLP/HTTP endpoint; None when neither `endpoint` nor OTEL_EXPORTER_OTLP_ENDPOINT is set.
    Raises ConfigError when the packages are missing."""
    if not endpoint and not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "traces are asked for, but OpenTelemetry is not installed: "
            f"pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http ({error})"
        ) from None
    provider = TracerProvider(
        resource=Resource.create({"service.name": "leadline-gateway"}),
        shutdown_on_exit=False,  # it would wait for the collector once more
    )
    exporter = (
        OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces") if endpoint else OTLPSpanExporter()
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)
