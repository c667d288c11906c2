"""Webhooks as their receivers read them: Standard Webhooks and CloudEvents, by their libraries and by our examples."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from standardwebhooks import Webhook, WebhookVerificationError

from replicad.cli.app import run
from replicad.errors import UsageError
from replicad.sender.items import Order, Transaction, make_transaction
from replicad.sender.settings import Delivery, Secrets, SenderSettings
from replicad.sender.signing import derive, standard_secret
from replicad.sender.transport import open_transport
from tests.conftest import PATIENCE

from ..federation_receiver import Receiver, Request

EXAMPLES = Path(__file__).parents[2] / "docs/examples/receivers"
MASTER = "the-secret-that-never-leaves-the-sender"
DESTINATION = "a.example"
SECRET = standard_secret(derive(MASTER, DESTINATION))
HERE = ("127.0.0.1",)
FACTS = ('{"n":1}', '{"text":"größer 🐘"}')


def made(*facts: str, updates: tuple[str, ...] = (), serial: int = 1) -> Transaction:
    return make_transaction(
        DESTINATION, serial=serial, ts=1_700_000_000_123, upto=Order(serial, 0), pdus=facts, edus=updates
    )


def delivery(port: int, **changes: Any) -> Delivery:
    url = f"http://127.0.0.1:{port}/{{destination}}"
    base: dict[str, Any] = {"url": url, "allow_private": HERE, "allow_http": HERE, "request_timeout": PATIENCE}
    return Delivery(**(base | changes))


SIGNED = {"sign": "standard", "secrets": Secrets(federation_secret=MASTER)}


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver().listening() as listening:
        yield listening


async def received(receiver: Receiver, transaction: Transaction, **changes: Any) -> Request:
    async with open_transport(delivery(receiver.port, **changes)) as transport:
        outcome = await transport.send(DESTINATION, transaction)
    assert outcome.delivered, outcome
    (request,) = receiver.requests
    return request


async def test_the_library_of_standard_webhooks_accepts_a_signature(receiver: Receiver) -> None:
    transaction = made(*FACTS)
    request = await received(receiver, transaction, **SIGNED)
    assert request.headers["webhook-id"] == transaction.id
    assert Webhook(SECRET).verify(request.body, request.headers)["facts"] == [json.loads(fact) for fact in FACTS]
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(request.body + b" ", request.headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(standard_secret(derive(MASTER, "b.example"))).verify(request.body, request.headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(request.body, {**request.headers, "webhook-id": "another"})


def test_the_secret_is_printed_in_the_form_of_the_libraries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sender.toml"
    file.write_text(f'facts = "orders"\nsign = "standard"\nfederation_secret = "{MASTER}"\n')
    assert run(["sender", "secret", DESTINATION, "--config", str(file)]) == 0
    assert capsys.readouterr().out == f"{SECRET}\n"
    assert run(["sender", "secret", DESTINATION, "--config", str(file), "--sign", "hmac"]) == 0
    assert capsys.readouterr().out == f"{derive(MASTER, DESTINATION)}\n"


def read_event(text: bytes) -> CloudEvent:
    """The event as the library of CloudEvents reads it; it refuses an event without what 1.0 requires."""
    found = JSONFormat().read(None, text)
    assert isinstance(found, CloudEvent)
    return found


async def test_a_cloud_event_is_sent_alone(receiver: Receiver) -> None:
    transaction = made(FACTS[1])
    request = await received(
        receiver, transaction, form="cloudevents", event_source="/shop", event_type="order.changed"
    )
    assert request.headers["content-type"] == "application/cloudevents+json"
    event = read_event(request.body)
    assert (event.get_id(), event.get_source(), event.get_type()) == (transaction.id, "/shop", "order.changed")
    assert event.get_data() == json.loads(FACTS[1])
    time = event.get_time()
    assert time is not None
    assert time.timestamp() == 1_700_000_000.123


async def test_a_batch_of_cloud_events_has_an_id_for_each(receiver: Receiver) -> None:
    transaction = made(*FACTS, updates=('{"typing":true}',))
    request = await received(receiver, transaction, form="cloudevents-batch")
    assert request.headers["content-type"] == "application/cloudevents-batch+json"
    events = [read_event(json.dumps(one).encode()) for one in json.loads(request.body)]
    assert [event.get_data() for event in events] == [*map(json.loads, FACTS), {"typing": True}]
    assert [event.get_type() for event in events] == ["replicad.fact", "replicad.fact", "replicad.update"]
    assert len({event.get_id() for event in events}) == 3


CHANGE = '{"op":"%s",%s"schema":1,"xid":776,"at":"2026-01-01T00:00:00.5+00:00"}'
NUMBER = "12345678901234567890.10"
ROW = f'{{"id": 7, "price": {NUMBER}}}'
CHANGED = {  # what is between op and schema; the type; the data without op, schema and xid
    "i": (f'"key":7,"row":{ROW},', "insert", {"key": 7, "new": ROW}),
    "u": (f'"key":7,"row":{ROW},"old":{{"id":7}},', "update", {"key": 7, "new": ROW, "old": {"id": 7}}),
    "d": ('"key":["a",7], "old": null ,', "delete", {"key": ["a", 7], "old": None}),
    "r": (f'"key":"k","row":{ROW},', "read", {"key": "k", "new": ROW}),
    "t": ("", "truncate", {}),
    "s": (
        '"row":{"table":"t","key":["id"],"columns":[]},',
        "schema",
        {"new": '{"table":"t","key":["id"],"columns":[]}'},
    ),
}


@pytest.mark.parametrize("op", CHANGED)
@pytest.mark.parametrize("prefix", ["", "com.example.order"])
async def test_a_change_of_a_table_is_an_event_of_its_operation(receiver: Receiver, op: str, prefix: str) -> None:
    members, name, expected = CHANGED[op]
    request = await received(receiver, made(CHANGE % (op, members)), form="cloudevents", event_type=prefix)
    event = read_event(request.body)
    assert event.get_type() == f"{prefix or 'replicad.change'}.{name}"
    key = expected.get("key")
    assert event.get_subject() == (
        None if key is None else key if isinstance(key, str) else json.dumps(key).replace(", ", ",")
    )
    time = event.get_time()
    assert time is not None
    assert time.isoformat() == "2026-01-01T00:00:00.500000+00:00", "of the change, and not of the request"
    data: Any = event.get_data()
    read = {
        place: json.loads(value) if isinstance(value, str) and value[:1] == "{" else value
        for place, value in expected.items()
    }
    assert data == {"op": name, **read, "schema": 1, "xid": 776}
    if NUMBER in members:
        assert NUMBER.encode() in request.body, "numbers keep their digits"


@pytest.mark.parametrize(
    "row", ["{}", "{ }", "[]", "7", '{"op":"i"}', CHANGE % ("x", ""), CHANGE % ("u", '"price":7,'), '"{"', '{"a":{}}']
)
async def test_a_row_that_is_no_change_is_sent_as_it_is(receiver: Receiver, row: str) -> None:
    request = await received(receiver, made(row), form="cloudevents")
    event = read_event(request.body)
    assert (event.get_type(), event.get_data()) == ("replicad.fact", json.loads(row))


async def test_the_trace_of_a_changed_row_is_that_of_its_event(receiver: Receiver) -> None:
    change = CHANGE % ("u", f'"key":7,"row":{{"trace":"{TRACE}"}},')
    request = await received(receiver, made(change), form="cloudevents", traceparent="trace")
    assert request.headers["traceparent"] == json.loads(request.body)["traceparent"] == TRACE


async def test_facts_that_belong_together_are_a_batch_in_the_form_for_one_event(receiver: Receiver) -> None:
    request = await received(receiver, made(*FACTS), form="cloudevents")
    assert request.headers["content-type"] == "application/cloudevents-batch+json"
    assert len(json.loads(request.body)) == 2


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = TRACE.replace("b7ad6b71", "00f067aa")
UNFIT = {
    "none": '{"n":1}', "no text": '{"trace":7}', "NULL": '{"trace":null}', "no row": "7", "a list": "[]",
    "no parent": f'{{"trace":"{TRACE[:36]}{"0" * 16}-01"}}', "no trace": f'{{"trace":"00-{"0" * 32}{TRACE[35:]}"}}',
    "upper case": f'{{"trace":"{TRACE.upper()}"}}', "another version": f'{{"trace":"01{TRACE[2:]}"}}',
    "a header of its own": f'{{"trace":"{TRACE}\\r\\nx: y"}}',
}  # fmt: skip


async def test_the_trace_of_a_row_is_the_parent_of_its_request_and_of_its_event(receiver: Receiver) -> None:
    """Of several rows the first that has one; an event of a batch has its own."""
    facts = ('{"n":1}', f'{{"trace":"{TRACE}"}}', f'{{"trace":"{OTHER}"}}')
    for serial, form in enumerate(("webhook", "cloudevents-batch"), 1):
        async with open_transport(delivery(receiver.port, form=form, traceparent="trace")) as transport:
            await transport.send(DESTINATION, made(*facts, serial=serial))
    webhook, batch = receiver.requests
    assert webhook.headers["traceparent"] == batch.headers["traceparent"] == TRACE
    assert [one.get("traceparent") for one in json.loads(batch.body)] == [None, TRACE, OTHER]
    for event in json.loads(batch.body):
        read_event(json.dumps(event).encode())


@pytest.mark.parametrize("fact", UNFIT.values(), ids=UNFIT)
async def test_a_row_without_a_valid_trace_is_sent_without_the_header(receiver: Receiver, fact: str) -> None:
    async with open_transport(delivery(receiver.port, traceparent="trace")) as transport:
        await transport.send(DESTINATION, made(fact))
    [request] = receiver.requests
    assert not {"traceparent", "x"} & request.headers.keys()
    assert json.loads(request.body)["facts"] == [json.loads(fact)]


async def test_without_the_setting_no_trace_is_sent(receiver: Receiver) -> None:
    async with open_transport(delivery(receiver.port)) as transport:
        await transport.send(DESTINATION, made(f'{{"traceparent":"{TRACE}"}}'))
    assert "traceparent" not in receiver.requests[0].headers


def test_a_sender_of_single_events_makes_transactions_of_one_fact() -> None:
    settings = SenderSettings(facts="orders", delivery=Delivery(form="cloudevents"))
    assert settings.bounds.terms().pdus == 1
    with pytest.raises(UsageError, match="cloudevents-batch"):
        SenderSettings(facts="orders", updates=("typing",), delivery=Delivery(form="cloudevents"))


def receiver_command(language: str, folder: Path) -> list[str]:
    match language:
        case "python":
            return [sys.executable, str(EXAMPLES / "receiver.py")]
        case "node" if shutil.which("node"):
            return ["node", str(EXAMPLES / "receiver.mjs")]
        case "go" if shutil.which("go"):
            program = str(folder / "receiver")
            environment = {**os.environ, "GOCACHE": str(folder / "cache")}
            command = ["go", "build", "-o", program, str(EXAMPLES / "receiver.go")]
            built = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
            assert built.returncode == 0, built.stderr
            return [program]
        case _:
            pytest.skip(f"{language} is not installed")


async def wait_listening(port: int) -> None:
    with trio.fail_after(PATIENCE):
        while True:
            try:
                async with await trio.open_tcp_stream("127.0.0.1", port):
                    return
            except OSError:
                await trio.sleep(0.05)


@pytest.mark.parametrize("language", ["python", "node", "go"])
async def test_a_receiver_of_the_examples_takes_each_event_once_and_refuses_others(
    language: str, tmp_path: Path
) -> None:
    command = receiver_command(language, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = partial(subprocess.Popen, stdout=subprocess.PIPE, env={**os.environ, "WEBHOOK_SECRET": SECRET})
    process = start([*command, str(port)])
    try:
        await wait_listening(port)
        outcomes = []
        for changes, transaction in (
            ({}, made(*FACTS, updates=('{"u":1}',))),
            ({}, made(*FACTS, updates=('{"u":1}',))),  # the same once more
            ({"form": "cloudevents"}, made('{"n":2}', serial=2)),
            ({"form": "cloudevents-batch"}, made('{"n":3}', '{"n":4}', serial=3)),
            ({"secrets": Secrets(federation_secret=f"{MASTER}-other")}, made('{"forged":1}', serial=4)),
        ):
            async with open_transport(delivery(port, **(SIGNED | changes))) as transport:
                outcomes.append((await transport.send(DESTINATION, transaction)).reason)
        assert outcomes == ["status 204"] * 4 + ["status 401"]
    finally:
        process.terminate()
        said, _ = await trio.to_thread.run_sync(process.communicate)
    taken = [json.loads(line) for line in said.decode().splitlines()]
    assert taken == [*map(json.loads, FACTS), {"u": 1}, {"n": 2}, {"n": 3}, {"n": 4}]
