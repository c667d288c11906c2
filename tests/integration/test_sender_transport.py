"""Requests of the sender to a real server that misbehaves in every way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest
import trio

from replicad.sender import signing
from replicad.sender.items import Order, make_transaction
from replicad.sender.settings import Delivery, Secrets
from replicad.sender.transport import HttpTransport, RequestBuilder, SendResult, _seconds, open_transport
from tests.conftest import PATIENCE

from ..federation_receiver import Receiver, Reply

MADE = make_transaction(
    "a.example", serial=1, ts=1_700_000_000_000, upto=Order(2, 0), pdus=['{"n":1}', '{"é":"\\u0000"}'], edus=['{"e":1}']
)
MASTER = "the secret that never leaves the sender".replace(" ", "-")
SECRET = signing.derive(MASTER, "a.example")
SECRETS = Secrets(federation_secret=MASTER)
HERE = ("127.0.0.1",)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver().listening() as listening:
        yield listening


def delivery(receiver: Receiver, path: str = "/{destination}/{transaction}", **changes: Any) -> Delivery:
    base: dict[str, Any] = {
        "form": "webhook",
        "url": f"http://127.0.0.1:{receiver.port}{path}",
        "allow_private": HERE,
        "allow_http": HERE,
        "request_timeout": 5.0,
    }
    return Delivery(**(base | changes))


async def send(receiver: Receiver, **changes: Any) -> SendResult:
    async with open_transport(delivery(receiver, **changes)) as transport:
        return await transport.send("a.example", MADE)


async def test_the_matrix_form_is_a_put_with_the_transaction_in_the_path(receiver: Receiver) -> None:
    path = "/{destination}/_matrix/federation/v1/send/{transaction}"
    outcome = await send(receiver, form="matrix", origin="us.example", path=path)
    assert outcome == SendResult(True, "status 200")
    (request,) = receiver.requests
    assert (request.method, request.target) == ("PUT", f"/a.example/_matrix/federation/v1/send/{MADE.id}")
    assert request.json == {
        "origin": "us.example",
        "origin_server_ts": 1_700_000_000_000,
        "pdus": [{"n": 1}, {"é": "\0"}],
        "edus": [{"e": 1}],
    }


async def test_a_webhook_is_a_post_that_says_its_id_in_headers_and_body(receiver: Receiver) -> None:
    await send(receiver)
    (request,) = receiver.requests
    assert request.method == "POST"
    assert request.headers["idempotency-key"] == request.headers["replicad-transaction"] == MADE.id
    assert request.json["transaction"] == MADE.id
    assert request.json["facts"] == [{"n": 1}, {"é": "\0"}]
    assert request.headers["content-type"] == "application/json"


async def test_a_repeat_is_the_same_request_byte_for_byte(receiver: Receiver) -> None:
    for _ in range(2):
        await send(receiver, sign="bearer", secrets=SECRETS)
    first, second = receiver.requests
    assert first == second


async def test_a_signed_repeat_differs_in_the_signature_alone_which_has_the_time_of_the_try(receiver: Receiver) -> None:
    for _ in range(2):
        await send(receiver, sign="hmac", secrets=SECRETS)
        await trio.sleep(0.002)
    first, second = receiver.requests
    assert first.headers.pop("replicad-signature") != second.headers.pop("replicad-signature")
    assert first == second


async def test_a_signature_covers_destination_method_path_id_time_and_body(receiver: Receiver) -> None:
    await send(receiver, sign="hmac", secrets=SECRETS, path="/{destination}/x?y=%C3%A9")
    (request,) = receiver.requests
    signature = request.headers["replicad-signature"]
    parts: dict[str, Any] = {
        "destination": "a.example",
        "method": request.method,
        "target": request.target,
        "transaction": request.transaction,
        "ts": int(request.headers["replicad-time"]),
        "body": request.body,
    }
    assert signing.verify(SECRET, signature, **parts)
    assert not signing.verify("another", signature, **parts)
    others = {"destination": "b", "method": "PUT", "target": "/", "transaction": "x", "ts": 1, "body": b"{}"}
    for name, other in others.items():
        assert not signing.verify(SECRET, signature, **(parts | {name: other})), f"{name} is not covered"
    assert not signing.verify(signing.derive(MASTER, "b"), signature, **(parts | {"destination": "b"}))
    assert SECRET not in str(request)
    assert MASTER not in str(request)


async def test_a_bearer_token_is_sent_as_such(receiver: Receiver) -> None:
    await send(receiver, sign="bearer", secrets=SECRETS)
    assert receiver.requests[0].headers["authorization"] == f"Bearer {SECRET}"


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Reply(204, body=b""), SendResult(True, "status 204")),
        (Reply(503), SendResult(False, "status 503")),
        (Reply(429, (("retry-after", "17"),)), SendResult(False, "status 429", retry_after=17.0)),
        (Reply(503, (("retry-after", "Sun, 06 Nov 1994 08:49:37 GMT"),)), SendResult(False, "status 503")),
        (Reply(302, (("location", "http://127.0.0.1:1/"),)), SendResult(False, "status 302")),
        (Reply(404), SendResult(False, "status 404")),
        (Reply(413), SendResult(False, "status 413", refused=True)),
    ],
    ids=lambda value: value.reason if isinstance(value, SendResult) else "",
)
async def test_the_status_line_decides(receiver: Receiver, reply: Reply, outcome: SendResult) -> None:
    receiver.behave = lambda _: reply
    assert await send(receiver) == outcome


async def test_a_reset_a_refused_connection_and_silence_are_failures_with_a_reason(receiver: Receiver) -> None:
    receiver.behave = lambda _: Reply(reset=True)
    reset = await send(receiver)
    receiver.behave = lambda _: Reply(delay=60)
    silent = await send(receiver, request_timeout=0.2)
    gone = Receiver()
    async with gone.listening():
        pass
    refused = await send(gone)
    assert not any(outcome.delivered or outcome.refused for outcome in (reset, silent, refused))
    assert "request failed" in reset.reason
    assert "ConnectError" in refused.reason
    assert "imeout" in silent.reason or "no answer within" in silent.reason


async def test_a_body_that_never_ends_or_crawls_costs_little_and_the_status_counts(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicad.sender.transport.ANSWER_TIME", 0.2)
    async with open_transport(delivery(receiver, request_timeout=3600.0)) as transport:
        for reply in (Reply(body=b"x" * 65536, chunks=10_000), Reply(body=b"x", chunks=10_000, pause=0.05)):
            receiver.behave = lambda _, reply=reply: reply
            with trio.fail_after(PATIENCE):
                assert (await transport.send("a.example", MADE)).delivered
    assert receiver.connections == 2, "a connection with unread answers on it was used again"


async def test_connections_are_kept_for_the_next_request(receiver: Receiver) -> None:
    async with open_transport(delivery(receiver)) as transport:
        for _ in range(5):
            await transport.send("a.example", MADE)
    assert receiver.connections == 1


async def test_a_cancelled_request_leaves_the_transport_usable(receiver: Receiver) -> None:
    async with open_transport(delivery(receiver, concurrency=1, probes=1)) as transport:
        receiver.behave = lambda _: Reply(delay=60)
        for _ in range(5):
            with trio.move_on_after(0.05) as scope:
                await transport.send("a.example", MADE)
            assert scope.cancelled_caught
        receiver.behave = lambda _: Reply()
        assert (await transport.send("a.example", MADE)).delivered


def checker(**changes: Any) -> HttpTransport:
    return HttpTransport([], Delivery(**({"form": "matrix", "origin": "us.example"} | changes)))


def test_what_can_be_no_destination_is_known_before_it_is_tried() -> None:
    matrix = checker()
    for name in ("a.example", "a.example:8448", "127.0.0.1:80", "[::1]:8448", "localhost"):
        assert matrix.objection(name) is None, name
    for name in (
        "us.example",
        "",
        "a b",
        "a.example/x",
        "a.example?x",
        "a@b",
        "a.example:99999",
        "x" * 2000,
        "é.ex",
    ):
        assert matrix.objection(name), name
    hook = checker(form="webhook", origin="")
    assert hook.objection("https://a.example/hook?x=1") is None
    for name in ("ftp://a.example", "a.example", "http://", "https://a.example/ x", "http://[broken"):
        assert hook.objection(name), name


def test_a_name_in_a_path_is_quoted() -> None:
    hook = checker(form="webhook", origin="", url="https://hub.example/{destination}/{transaction}")
    assert hook.objection("a/../b?c#d") is None
    requests = RequestBuilder(Delivery(url="https://hub.example/{destination}/{transaction}"), lambda: 0)
    for made in ("T", "0123456789abcdef" * 2, "two words"):  # an id of before may be any text
        assert requests.target("a/../b?c#d", made).path.decode() == f"/a%2F..%2Fb%3Fc%23d/{quote(made)}"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("2.5", 2.5),
        ("120.", 120.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 97.0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 97.0),
        ("Sun Nov  6 08:49:37 1994", 97.0),
        ("Sun, 06 Nov 1994 08:46:00 GMT", 0.0),
        ("-5", 0.0),
        ("soon", 0.0),
        ("nan", 0.0),
        ("Sun, 99 Nov 1994 08:49:37 GMT", 0.0),
        ("", 0.0),
    ],
)
def test_a_pause_may_be_asked_for_in_seconds_or_as_a_date(text: str, seconds: float) -> None:
    """RFC 9110, 5.6.7 has the three forms of a date."""
    now = datetime(1994, 11, 6, 8, 48, tzinfo=UTC).timestamp()
    assert _seconds(text, now) == seconds
