"""HTTP/1.1 on a connection in memory: each request is read in one way or refused, and nothing of it stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import pytest
import trio
import trio.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replicad.operations.http import wire
from replicad.operations.http.wire import (
    Answer,
    Ended,
    Head,
    HttpWire,
    Refused,
    look_at_head,
    origin_form,
    split_target,
)
from tests.lengths import examples

HOST = b"host: localhost\r\n"
REFUSED = {
    "both lengths": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    "two lengths that differ": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 4\r\nContent-Length: 5\r\n\r\n", 400),
    "two equal lengths": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 4\r\ncontent-length: 4\r\n\r\n", 400),
    "a list of lengths": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 4, 4\r\n\r\n", 400),
    "a length with a sign": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: +4\r\n\r\n", 400),
    "a length of twenty digits": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: " + b"9" * 20 + b"\r\n\r\n", 400),
    "chunked twice": (b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked, chunked\r\n\r\n", 501),
    "another coding": (b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: xchunked\r\n\r\n", 501),
    "a coding in HTTP/1.0": (b"POST / HTTP/1.0\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n", 400),
    "a folded line": (b"GET / HTTP/1.1\r\n" + HOST + b"x: a\r\n b\r\n\r\n", 400),
    "a bare CR": (b"GET / HTTP/1.1\r\n" + HOST + b"x: a\rb\r\n\r\n", 400),
    "bare LFs": (b"GET / HTTP/1.1\nhost: localhost\n\n", 400),
    "a bare LF in a value": (b"GET / HTTP/1.1\r\n" + HOST + b"x: a\ncontent-length: 5\r\n\r\n", 400),
    "a NUL": (b"GET / HTTP/1.1\r\n" + HOST + b"x: a\0b\r\n\r\n", 400),
    "a blank before a colon": (b"GET / HTTP/1.1\r\n" + HOST + b"content-length : 5\r\n\r\n", 400),
    "a name that is none": (b"GET / HTTP/1.1\r\n" + HOST + b"a(b): c\r\n\r\n", 400),
    "no colon": (b"GET / HTTP/1.1\r\n" + HOST + b"abc\r\n\r\n", 400),
    "two blanks": (b"GET  / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "no version": (b"GET /\r\n" + HOST + b"\r\n", 400),
    "no Host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two Hosts": (b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400),
    "two Hosts in HTTP/1.0": (b"GET / HTTP/1.0\r\n" + HOST + HOST + b"\r\n", 400),
    "a Host with a path": (b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n", 400),
    "a Host with a user": (b"GET / HTTP/1.1\r\nhost: a@b\r\n\r\n", 400),
    "an address of another host": (b"GET http://evil/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "an address with a user": (b"GET http://a@localhost/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a target without a path": (b"GET localhost HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a tunnel": (b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a fragment": (b"GET /a#b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a letter that is encoded": (b"GET /%73tatus HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a slash that is encoded": (b"GET /streams%2fevents/rows HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a backslash that is encoded": (b"GET /streams%5Cevents HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "two dots that are encoded": (b"GET /streams/%2e%2e/status HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "two dots": (b"GET /streams/../status HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "one dot at the end": (b"GET /status/.?a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "two slashes": (b"GET //status HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a percent sign alone": (b"GET /%zz HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "two dots in an address": (b"GET http://localhost/a/../b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "another expectation": (b"GET / HTTP/1.1\r\n" + HOST + b"expect: tea\r\n\r\n", 417),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\n" + HOST + b"\r\n", 505),
    "a head that is too long": (b"GET / HTTP/1.1\r\nx: " + b"y" * wire.HEAD_BYTES, 431),
    "another protocol": (b"REPLICATE events NOW\r\n\r\n", 400),
}
GET = b"GET /a?b=c HTTP/1.1\r\n" + HOST + b"\r\n"
SEEN = Head("GET", "/a?b=c", {"host": "localhost"})


@contextmanager
def connected() -> Iterator[tuple[HttpWire, trio.testing.MemorySendStream, trio.testing.MemoryReceiveStream]]:
    ours, theirs = trio.testing.memory_stream_pair()
    yield HttpWire(ours, nullcontext), theirs.send_stream, theirs.receive_stream


async def read(data: bytes) -> Head | None:
    with connected() as (line, send, _):
        await send.send_all(data)
        await send.aclose()
        return await line.next_head()


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED)
async def test_a_request_that_two_programs_may_read_in_two_ways_is_refused_and_the_connection_is_closed(
    data: bytes, status: int
) -> None:
    with connected() as (line, send, receive):
        await send.send_all(data + b"x" * 10)
        await send.aclose()
        with pytest.raises(Refused) as caught:
            await line.next_head()
        assert caught.value.status == status
        await line.refuse(caught.value)
        answer = bytes(await receive.receive_some(4096))
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close\r\n" in answer


ACCEPTED = [
    (GET, SEEN),
    (b"\r\n" + GET, SEEN),
    (b"GET http://LOCALHOST/a?b=c HTTP/1.1\r\n" + HOST + b"\r\n", SEEN),
    (b"GET / HTTP/1.0\r\n\r\n", Head("GET", "/", {})),
    (
        b"GET /streams/a%20b%25%C3%BC.~x/rows?after=%41//../%zz HTTP/1.1\r\n" + HOST + b"\r\n",
        Head("GET", "/streams/a%20b%25%C3%BC.~x/rows?after=%41//../%zz", {"host": "localhost"}),
    ),
    (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", Head("OPTIONS", "/*", {"host": "localhost"})),
    (b"GET / HTTP/1.1\r\nHost:[::1]:80\r\nX:\r\nx: b \r\n\r\n", Head("GET", "/", {"host": "[::1]:80", "x": ", b"})),
    (
        b"GET / HTTP/1.1\r\n" + HOST + b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\n\r\n",
        Head("GET", "/", {"host": "localhost", "upgrade": "h2c", "connection": "upgrade, http2-settings"}),
    ),
]


@pytest.mark.parametrize(("data", "head"), ACCEPTED)
async def test_other_requests_are_read_whole_and_byte_by_byte(data: bytes, head: Head) -> None:
    assert await read(data) == head
    with connected() as (line, send, _):
        async with trio.open_nursery() as nursery:

            async def drip() -> None:
                for byte in data:
                    await send.send_all(bytes([byte]))

            nursery.start_soon(drip)
            assert await line.next_head() == head


async def test_a_head_that_is_sent_again_is_not_parsed_again_and_no_secret_is_kept() -> None:
    kept = wire._head_without_body
    kept.cache_clear()
    for _ in range(3):
        assert await read(GET) == SEEN
    assert (kept.cache_info().hits, kept.cache_info().currsize) == (2, 1)
    for secret in (
        b"GET / HTTP/1.1\r\n" + HOST + b"Authorization: Bearer abc\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"x: y\r\nCOOKIE:replicad_token=abc\r\n\r\n",
        b"GET /a?access_token=abc HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /a?after=1&acces%73_token=abc HTTP/1.1\r\n" + HOST + b"\r\n",
        GET[:-2] + b"x: " + b"y" * wire.REPEATED_BYTES + b"\r\n\r\n",
    ):
        assert await read(secret) is not None
        assert kept.cache_info().currsize == 1, secret
    with connected() as (line, send, receive):  # what one peer wants of its connection is not kept for another one
        await send.send_all(GET[:-2] + b"connection: close\r\n\r\n")
        assert await line.next_head() is not None
        assert not await line.send(Answer.text("a"), head_only=False, close=False)
        assert b"connection: close\r\n" in bytes(await receive.receive_some(4096))
    with connected() as (line, send, _):
        await send.send_all(GET)
        assert await line.next_head() == SEEN
        assert await line.send(Answer.text("a"), head_only=False, close=False)


async def test_bodies_are_bounded_and_what_follows_them_is_the_next_request() -> None:
    posts = [
        b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 5\r\n\r\nhello",
        b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
    ]
    for post in posts:
        with connected() as (line, send, receive):
            await send.send_all(post + GET + post)
            assert await line.next_head() is not None
            assert await line.read_body(5) == b"hello"
            assert await line.send(Answer.text("a"), head_only=False, close=False)
            assert await line.next_head() == SEEN
            assert await line.send(Answer.text("b"), head_only=True, close=False)
            assert await line.next_head() is not None
            with pytest.raises(Refused) as caught:
                await line.read_body(4)
            assert caught.value.status == 413
            await send.aclose()
            assert not await line.send(Answer.text("c"), head_only=False, close=False), "a body was left unread"
            answers = bytes(await receive.receive_some(4096))
            assert answers.count(b"HTTP/1.1 200 OK\r\n") == 3
            assert answers.count(b"content-length: 1\r\n") == 3
            assert answers.count(b"connection: close\r\n") == 1
            assert b"\r\n\r\nb" not in answers


@pytest.mark.parametrize("body", [b"x\r\n", b"3\r\nhelxx", b"-1\r\n", b"5 \r\n", b"\r\n\r\n" + b"f" * 100])
async def test_a_chunk_that_is_none_is_refused(body: bytes) -> None:
    with connected() as (line, send, _):
        await send.send_all(b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n" + body)
        await send.aclose()
        assert await line.next_head() is not None
        with pytest.raises((Refused, Ended)):
            await line.read_body(1000)


async def test_who_asks_whether_to_go_on_is_told_so_when_the_body_is_wanted() -> None:
    with connected() as (line, send, receive):
        await send.send_all(b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n")
        assert await line.next_head() is not None
        async with trio.open_nursery() as nursery:

            async def go_on() -> None:
                assert bytes(await receive.receive_some(100)).startswith(b"HTTP/1.1 100 ")
                await send.send_all(b"ok")

            nursery.start_soon(go_on)
            assert await line.read_body(2) == b"ok"


async def test_a_peer_that_does_not_go_on_is_left(autojump_clock: trio.testing.MockClock) -> None:
    with connected() as (line, _, _receive):
        assert await line.next_head() is None
        assert trio.current_time() == pytest.approx(wire.IDLE, abs=0.1)
    for begun in (b"GET ", GET[:-2]):
        with connected() as (line, send, _):
            await send.send_all(begun)
            with pytest.raises(Ended):
                await line.next_head()
    with connected() as (line, send, _):
        await send.send_all(b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 5\r\n\r\nhel")
        assert await line.next_head() is not None
        with pytest.raises(Ended):
            await line.read_body(10)


@settings(max_examples=examples(50))
@given(st.binary(max_size=400))
@example(GET)
@example(b"\xff" * 20 + b"\r\n\r\n")
def test_no_bytes_are_a_defect(data: bytes) -> None:
    async def run() -> None:
        for start in (
            b"",
            b"GET / HTTP/1.1\r\n",
            b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n",
        ):
            with suppress(Refused, Ended):
                with connected() as (line, send, _):
                    await send.send_all(start + data)
                    await send.aclose()
                    while (head := await line.next_head()) is not None:
                        split_target(head.target)
                        await line.read_body(100)
                        await line.send(Answer.text("x"), head_only=False, close=False)

    trio.run(run)


@settings(max_examples=examples(50))
@given(st.from_regex(r"[!-~]{1,40}", fullmatch=True))
def test_a_target_has_one_meaning(target: str) -> None:
    with suppress(Refused):
        found = origin_form(target, "localhost")
        assert found.startswith("/")
        assert "#" not in found
        look_at_head(f"GET {found} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())


class Scripted(trio.abc.Stream):
    """Gives its bytes, and takes everything."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data, self._data = self._data, b""
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None: ...

    async def wait_send_all_might_not_block(self) -> None: ...

    async def aclose(self) -> None: ...


async def test_a_connection_leaves_no_cycles_of_references() -> None:
    async def ask(data: bytes) -> None:
        line = HttpWire(Scripted(data), nullcontext)
        with suppress(Ended):
            try:
                while await line.next_head() is not None:
                    await line.read_body(100)
                    await line.send(Answer.text("x"), head_only=False, close=False)
            except Refused as refused:
                await line.refuse(refused)

    requests = [GET, GET[:-3], GET + GET, *(data for data, _ in REFUSED.values())]
    for data in requests:
        await ask(data)
    gc.collect()
    gc.disable()
    try:
        for data in requests:
            await ask(data)
        assert gc.collect() == 0
    finally:
        gc.enable()
