"""Spans: a request of the sender continues the trace of its row, a worker's call has one, and a collector gets them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import trio

from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.postgres.bridge import Database
from replicad.sender.transport import open_transport
from replicad.tracing import exported, span
from tests.conftest import PATIENCE
from tests.daemons import Daemon

from ..federation_receiver import Receiver
from .conftest import OpenClient
from .test_sender_webhooks import DESTINATION, OTHER, TRACE, delivery, made

trace = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The spans of a program that has set up an SDK."""
    found, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield found
    provider.shutdown()


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


def test_without_a_collector_nothing_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    before = trace.get_tracer_provider()
    with exported("replicad-sender"), span("x", "CLIENT", {}) as opened:
        assert opened.traceparent is None
    assert trace.get_tracer_provider() is before
