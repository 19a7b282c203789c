"""OpenTelemetry traces, if the library is installed and an endpoint is configured."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class TraceSpan(Protocol):
    """The methods of a span that are used here."""

    def set_attribute(self, name: str, value: Any) -> Any:
        """Set an attribute of the request."""
        ...

    def add_event(self, name: str) -> Any:
        """Record an event at the present time."""
        ...

    def end(self) -> Any:
        """Note that the request has ended."""
        ...


class NoSpan:
    """A span that records nothing, used without a tracer."""

    def set_attribute(self, name: str, value: Any) -> None:
        """See TraceSpan."""

    def add_event(self, name: str) -> None:
        """See TraceSpan."""

    def end(self) -> None:
        """See TraceSpan."""


# The library is optional, also for type checkers, so it is imported by name.
class Tracer:
    """Makes a span per request, as a child of the caller's (`traceparent`). Attributes are OpenTelemetry's
    gen_ai.
    """

    def __init__(self, provider: Any | None = None) -> None:
        self._tracer = provider.get_tracer("nearfar") if provider is not None else None

    @classmethod
    def from_environment(cls) -> Tracer:
        """Make a tracer from OpenTelemetry's own environment variables."""
        if not any(os.environ.get(name) for name in ENDPOINTS):
            return cls()
        try:
            exporter = import_module(
                "opentelemetry.exporter.otlp.proto.http.trace_exporter"
            ).OTLPSpanExporter()
            sdk = import_module("opentelemetry.sdk.trace")
            resource = import_module("opentelemetry.sdk.resources").Resource.create(
                {"service.name": "nearfar"}
            )
            processor = import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor(exporter)
        except ImportError as error:
            log.warning(
                "no traces: %s is missing; pip install opentelemetry-sdk and an OTLP exporter", error.name
            )
            return cls()
        provider = sdk.TracerProvider(resource=resource)
        provider.add_span_processor(processor)
        return cls(provider)

    def span(self, operation: str, model: str, headers: Mapping[str, str]) -> TraceSpan:
        """Start the span of a request."""
        if self._tracer is None:
            return NoSpan()
        parent = import_module("opentelemetry.propagate").extract(headers)
        kind = import_module("opentelemetry.trace").SpanKind.SERVER
        span: TraceSpan = self._tracer.start_span(f"{operation} {model}", context=parent, kind=kind)
        span.set_attribute("gen_ai.operation.name", operation)
        span.set_attribute("gen_ai.request.model", model)
        return span
