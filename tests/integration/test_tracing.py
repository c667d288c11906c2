"""Spans: a request of the sender continues the trace of its row, a worker's call has one, and a collector gets them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.request import urlopen

import pytest
import structlog
import trio

from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.config.settings import Address, ServerSettings
from replicad.daemon.figures import DELAYS, HISTOGRAM, Delays, Family
from replicad.operations.http import metrics
from replicad.operations.http.metrics import _otlp_metric, _otlp_point
from replicad.postgres.bridge import Database
from replicad.sender.transport import open_transport
from replicad.tracing import exported, span
from tests.conftest import PATIENCE
from tests.daemons import Daemon, open_daemon

from ..federation_receiver import Receiver
from .conftest import OpenClient
from .test_sender_webhooks import DESTINATION, OTHER, TRACE, delivery, made

trace = pytest.importorskip("opentelemetry.trace")


async def test_a_request_continues_the_trace_of_its_row_and_links_the_others(finished: Any) -> None:
    async with Receiver().listening() as receiver:
        async with open_transport(delivery(receiver.port, traceparent="trace")) as transport:
            await transport.send(DESTINATION, made(f'{{"trace":"{TRACE}"}}', f'{{"trace":"{OTHER}"}}'))
        [request] = receiver.requests
    [one] = finished.get_finished_spans()
    _, trace_id, span_id, _ = request.headers["traceparent"].split("-")
    assert (trace_id, f"{one.parent.span_id:016x}") == tuple(TRACE.split("-")[1:3])
    assert (f"{one.context.trace_id:032x}", f"{one.context.span_id:016x}") == (trace_id, span_id)
    assert [f"{link.context.span_id:016x}" for link in one.links] == [OTHER.split("-")[2]]
    assert one.status.is_ok


async def test_a_request_that_fails_is_a_span_with_its_reason(finished: Any) -> None:
    async with Receiver().listening() as receiver:
        port = receiver.port
    async with open_transport(delivery(port)) as transport:
        result = await transport.send(DESTINATION, made('{"n":1}'))
    [one] = finished.get_finished_spans()
    assert (one.status.is_ok, one.status.description, one.parent) == (False, result.reason, None)


async def test_each_call_of_a_worker_is_a_span(
    finished: Any, database: Database, daemon: Daemon, open_worker_client: OpenClient
) -> None:
    await database.execute("SELECT tube.tube_ensure_exists('items', 1)")
    await database.execute("SELECT tube.items_touch(0, ARRAY[1, 2, 3], 'U')")
    traces: list[int] = []

    async def handle(batch: Batch) -> None:
        traces.append(trace.get_current_span().get_span_context().trace_id)
        if len(traces) == 1:
            raise ValueError("not yet")

    settings = WorkerSettings(poll=0.2, backoff_first=0.01)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Worker(open_worker_client, "items", handle, settings=settings).run)
        with trio.fail_after(PATIENCE):
            while len(finished.get_finished_spans()) < 2:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    first, second, *_ = finished.get_finished_spans()
    assert [first.context.trace_id, second.context.trace_id] == traces[:2], "spans of the handler are within"
    assert first.attributes["messaging.destination.name"] == "items"
    assert (first.status.is_ok, "not yet" in (first.status.description or "")) == (False, True)
    assert second.status.is_ok


def test_a_collector_that_the_environment_names_gets_the_spans() -> None:
    """In a process of its own: a program sets up one SDK."""
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    program = (
        "from replicad.tracing import exported, span\n"
        "with exported('replicad-sender'), span('replicad deliver', 'CLIENT', {}): pass\n"
    )
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        named = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        }
        done = subprocess.run(
            [sys.executable, "-c", program], env={**clean, **named}, capture_output=True, timeout=PATIENCE, check=False
        )
        server.shutdown()
    assert done.returncode == 0, done.stderr
    [(path, body)] = got
    assert path == "/v1/traces"
    assert b"replicad deliver" in body
    assert b"replicad-sender" in body


async def test_a_collector_gets_the_figures_of_the_daemon_and_is_told_of_again_after_an_outage(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pb2 = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    got: list[Any] = []
    answers = [200, 400, 200]  # not one that the exporter tries again by itself

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = answers[min(len(got), 2)]
            got.append(pb2.ExportMetricsServiceRequest.FromString(body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Collector) as server, structlog.testing.capture_logs() as events:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1000")
        failing = iter([True])

        def metric(*words: Any) -> Any:
            if next(failing, False):
                raise ValueError("a defect of the exporter hurts nobody, and it begins anew")
            return _otlp_metric(*words)

        monkeypatch.setattr(metrics, "_otlp_metric", metric)
        settings = ServerSettings(
            listen=Address("127.0.0.1", 0), http=Address("127.0.0.1", 0), server_name="example.com"
        )
        async with open_daemon(settings, database_url) as daemon:
            assert daemon.http is not None
            address = f"http://127.0.0.1:{daemon.http.port}/metrics"
            with await trio.to_thread.run_sync(partial(urlopen, address, timeout=PATIENCE)) as answer:
                exposed = answer.read().decode()
            with trio.fail_after(PATIENCE):
                while len(got) < 3:
                    await trio.sleep(0.02)
                while not any(event["event"] == "metrics_exported" for event in events):
                    await trio.sleep(0.02)
        server.shutdown()
    [resource] = got[0].resource_metrics
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (named["service.name"], named["service.instance.id"]) == ("replicad", "example.com")
    [scope] = resource.scope_metrics
    sent = {one.name: one for one in scope.metrics}
    assert len(sent) == len(scope.metrics), "a figure is sent once"
    shown = set(re.findall(r"^(replicad_\w+?)(?:_bucket|_sum|_count)?\{", exposed, re.MULTILINE))
    assert shown - set(sent) <= {"replicad_look_failures"}, "what /metrics shows is sent"
    assert sent["replicad_ready"].gauge.data_points[0].as_double == 1
    assert sent["replicad_start_time_seconds"].unit == "s"
    counters = [one for one in scope.metrics if one.HasField("sum")]
    assert counters
    assert all(one.name.endswith("_total") and one.sum.is_monotonic for one in counters)
    told = [event for event in events if event["event"].startswith("metrics_")]
    assert [event["event"] for event in told] == ["metrics_not_exported", "metrics_exported"]
    assert "400" in told[0]["error"], "the log says why"


def test_delays_are_sent_with_their_ranges() -> None:
    encode = pytest.importorskip("opentelemetry.exporter.otlp.proto.common.metrics_encoder").encode_metrics
    points = pytest.importorskip("opentelemetry.sdk.metrics.export")
    delays = Delays()
    delays.observe(0.02, 3)
    delays.observe(7200.0, 1)
    family = Family("replicad_test_delay_seconds", HISTOGRAM, "For this test.", ("stream",))
    metric = _otlp_metric(family, [_otlp_point(family(delays, "events"), 1, 2)])
    name = pytest.importorskip("opentelemetry.sdk.util.instrumentation").InstrumentationScope("replicad")
    scope = points.ScopeMetrics(name, [metric], "")
    resource = pytest.importorskip("opentelemetry.sdk.resources").Resource({})
    data = encode(points.MetricsData([points.ResourceMetrics(resource, [scope], "")]))
    [sent] = data.resource_metrics[0].scope_metrics[0].metrics
    [point] = sent.histogram.data_points
    assert (point.count, point.sum, list(point.explicit_bounds)) == (4, 7200.06, list(DELAYS))
    assert (list(point.bucket_counts), point.HasField("min")) == (delays.counts, False)


def test_without_a_collector_nothing_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    before = trace.get_tracer_provider()
    with exported("replicad-sender"), span("x", "CLIENT", {}) as opened:
        assert opened.traceparent is None
    assert trace.get_tracer_provider() is before
