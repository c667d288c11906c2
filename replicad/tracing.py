"""Spans of OpenTelemetry: for the requests of the sender, the calls of a worker, and the batches of a pipeline.

A library uses the API of OpenTelemetry alone, and the program decides where spans go. Without its packages (the extra
`otel`) and without an SDK that the program has set up, nothing is recorded. `exported` is for the commands of replicad:
it sets up the SDK where the environment names a collector, by the variables of OpenTelemetry.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from replicad.eventlog import get_logger

if TYPE_CHECKING:
    from opentelemetry.trace import Span

# W3C Trace Context, version 00: neither id is zero. A later version would have to be parsed by its own rules.
TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
LAST = 2  # seconds for the last spans at the end; what a collector does not take by then is dropped
MOST_LINKS = 32  # of a span to the rows of its request

log = get_logger(__name__)


def collected(what: Literal["traces", "metrics"]) -> bool:
    """Whether the variables of OpenTelemetry name a collector for these, and do not turn them off."""
    given, kind = os.environ, what.upper()
    return (
        bool(given.get("OTEL_EXPORTER_OTLP_ENDPOINT") or given.get(f"OTEL_EXPORTER_OTLP_{kind}_ENDPOINT"))
        and given.get(f"OTEL_{kind}_EXPORTER", "otlp") != "none"
        and given.get("OTEL_SDK_DISABLED", "").lower() != "true"
    )


@cache
def _has_api() -> bool:
    return importlib.util.find_spec("opentelemetry") is not None


class OpenSpan:
    """A span that is open. `traceparent`: what a request sends, so that its work belongs to the span; None: no span."""

    def __init__(self, span: Span | None = None, traceparent: str | None = None) -> None:
        self._span = span
        self.traceparent = traceparent

    def fail(self, reason: str) -> None:
        """The work has failed, and why."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, reason))


@contextmanager
def span(
    name: str,
    kind: Literal["CLIENT", "CONSUMER"],
    attributes: Mapping[str, str | int],
    parents: Sequence[str] = (),
) -> Iterator[OpenSpan]:
    """A span for the block. `parents`: texts of TRACEPARENT; the first is the parent, others are linked, up to 32."""
    if not _has_api():
        yield OpenSpan()
        return
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    begun = trace.get_tracer("replicad").start_span(name, **_placed(kind, attributes, parents))
    with trace.use_span(begun, end_on_exit=True) as made:
        sent: dict[str, str] = {}
        if made.is_recording():
            TraceContextTextMapPropagator().inject(sent)
        yield OpenSpan(made, sent.get("traceparent"))


def record_span(
    name: str,
    seconds: float,
    attributes: Mapping[str, str | int],
    parents: Sequence[str] = (),
    failure: str | None = None,
) -> None:
    """A span for work that has just ended after so many seconds, and whose parents were found while it was done."""
    if not _has_api():
        return
    from opentelemetry import trace

    now = time.time_ns()
    placed = _placed("CONSUMER", attributes, parents)
    made = trace.get_tracer("replicad").start_span(name, start_time=now - int(seconds * 1e9), **placed)
    if failure is not None:
        OpenSpan(made).fail(failure)
    made.end(now)


def _placed(
    kind: Literal["CLIENT", "CONSUMER"], attributes: Mapping[str, str | int], parents: Sequence[str]
) -> dict[str, Any]:
    """What a span is begun with, so that it has its place in the traces of `parents`."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()
    contexts = [propagator.extract({"traceparent": one}) for one in dict.fromkeys(parents)]
    return {
        "context": contexts[0] if contexts else None,
        "kind": trace.SpanKind[kind],
        "attributes": dict(attributes),
        "links": [trace.Link(trace.get_current_span(one).get_span_context()) for one in contexts[1 : MOST_LINKS + 1]],
    }


@contextmanager
def exported(service: str) -> Iterator[None]:
    """Send spans by OTLP over HTTP during the block, if the environment names a collector. `service`: the name of this
    service, unless OTEL_SERVICE_NAME has one. What waits for the collector is bounded, and dropped beyond.
    """
    if not collected("traces"):
        yield
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:  # such variables are often set for all programs of a machine
        log.warning("spans_not_exported", error=str(error), remedy="pip install 'replicad[otel]'")
        yield
        return
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=LAST)))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()
