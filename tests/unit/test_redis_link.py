"""What the answers of a Redis that refuses mean: whether the next try may help, and what the operator should change."""

from __future__ import annotations

import time
import tracemalloc
from contextlib import suppress

import hiredis
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from replicad.errors import RedisRefused, RedisUnavailable, ReplicadError
from replicad.reading import Unreadable
from replicad.redis.link import MOST_BYTES, NOTHING, RedisLink, RespReader, parse_redis, refused
from replicad.streams.chunks import MAX_ROW
from tests.loops import memory_bytes_pair

ADDRESS = parse_redis("redis://:s3cret@db1")


@pytest.mark.parametrize(
    ("said", "kind", "remedy"),
    [
        ("NOAUTH Authentication required.", RedisRefused, "REPLICAD_REDIS_PASSWORD"),
        ("WRONGPASS invalid username-password pair or user is disabled.", RedisRefused, "REPLICAD_REDIS_PASSWORD"),
        ("ERR AUTH <password> called without any password configured", RedisRefused, "REPLICAD_REDIS_PASSWORD"),
        ("NOPERM this user has no permissions to run the 'evalsha' command", RedisRefused, "docs/transports.md"),
        ("LOADING Redis is loading the dataset in memory", RedisUnavailable, "LOADING"),
        ("READONLY You can't write against a read only replica.", RedisUnavailable, "READONLY"),
        ("MASTERDOWN Link with MASTER is down", RedisUnavailable, "MASTERDOWN"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", RedisUnavailable, "WRONGTYPE"),
        ("ERR DB index is out of range", RedisRefused, "DB index"),
        ("what", RedisUnavailable, "what"),
        ("OOM command not allowed when used memory > 'maxmemory'.", RedisRefused, "OOM"),
    ],
)
def test_a_refusal_says_whether_to_try_again_and_what_to_change(
    said: str, kind: type[ReplicadError], remedy: str
) -> None:
    error = refused(ADDRESS, hiredis.ReplyError(said))
    assert type(error) is kind
    assert remedy in str(error)
    assert "s3cret" not in str(error)


async def test_a_redis_that_does_not_answer_is_given_up_in_time(autojump_clock: trio.testing.MockClock) -> None:
    ours, _theirs = memory_bytes_pair()
    link = RedisLink(ours, ADDRESS, 5.0)
    began = trio.current_time()
    with pytest.raises(RedisUnavailable, match="did not answer within 5 s"):
        await link.call("PING")
    assert trio.current_time() == began + 5
    with pytest.raises(RedisUnavailable):
        await link.call("PING")  # it is closed: no answer is taken for that of another command


@pytest.mark.parametrize("said", [b"", b"+PONG", b"HTTP/1.1 400 Bad Request\r\n"])
async def test_what_is_no_redis_is_given_up(said: bytes) -> None:
    ours, theirs = memory_bytes_pair()
    link = RedisLink(ours, ADDRESS, 5.0)
    await theirs.send_all(said)
    await theirs.send_eof()
    with pytest.raises(RedisUnavailable, match=r"closed the connection|does not answer as a Redis"):
        await link.call("PING")


async def test_a_message_that_comes_together_with_the_answer_to_subscribe_is_not_lost() -> None:
    ours, theirs = memory_bytes_pair()
    link = RedisLink(ours, ADDRESS, 5.0)
    confirmed = b"*3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n"
    await theirs.send_all(confirmed + b"*3\r\n$7\r\nmessage\r\n$1\r\na\r\n$3\r\none\r\n")
    await link.subscribe(["a"])
    with trio.fail_after(60):
        assert await link.messages() == [(b"a", b"one")]


async def test_a_message_beyond_the_longest_row_is_not_kept_in_memory() -> None:
    ours, theirs = memory_bytes_pair()
    link = RedisLink(ours, ADDRESS, 60.0)
    head = b"*3\r\n$7\r\nmessage\r\n$1\r\na\r\n"
    most = b"$%d\r\n%s\r\n" % (MAX_ROW, b"x" * MAX_ROW)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(theirs.send_all, head + most)
        assert [len(message) for _, message in await link.messages()] == [MAX_ROW]
        nursery.start_soon(theirs.send_all, head + b"$500000000\r\n" + b"x" * (MOST_BYTES + 1))
        with pytest.raises(RedisUnavailable, match=f"over {MOST_BYTES} bytes"):
            await link.messages()


ODD = {
    "a list of a thousand million": b"*1000000000\r\n",
    "such a list of the other protocol": b">1000000000\r\n",
    "lists in lists": b"*1\r\n" * 100_000,
    "sets in sets": b"~1\r\n" * 100_000,
    "lists in the last place": b"*3\r\n$7\r\nmessage\r\n$1\r\na\r\n" * 20_000,
    "a number": b":1\r\n",
    "a number without an end": b":" + b"9" * 5000,
    "a number of 5,000 digits": b"(" + b"9" * 5000 + b"\r\n",
    "nothing": b"$-1\r\n",
    "no list": b"*-1\r\n",
    "an empty list": b"*0\r\n",
    "a list of lists": b"*3\r\n*0\r\n*0\r\n*0\r\n",
    "a map with lists as keys": b"%1\r\n*0\r\n+a\r\n",
    "too short a message": b"*2\r\n$7\r\nmessage\r\n$1\r\na\r\n",
    "a message that is a number": b"*3\r\n$7\r\nmessage\r\n$1\r\na\r\n:1\r\n",
    "a message of no channel": b"*3\r\n$7\r\nmessage\r\n$-1\r\n$1\r\na\r\n",
    "a message on a list": b"*3\r\n$7\r\nmessage\r\n*0\r\n$1\r\na\r\n",
    "no UTF-8": b"$2\r\n\xff\xfe\r\n",
    "a negative length": b"$-5\r\n",
    "a length that is too large": b"$99999999999999999999\r\n",
    "a fraction": b",1.5\r\n",
    "yes": b"#t\r\n",
    "half": b"*3\r\n$9\r\nsubscri",
    "no Redis": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "an error that is no UTF-8": b"-\xff\x1b[2J\r\n",
    "a list that comes in pieces": b"*100",
}


@pytest.mark.parametrize("what", ODD)
async def test_an_odd_reply_is_a_redis_that_is_unavailable_at_once(
    what: str, autojump_clock: trio.testing.MockClock
) -> None:
    began = time.monotonic()
    for ask in (RedisLink.messages, lambda link: link.subscribe(["a"]), lambda link: link.call_text("HGET", "k", "f")):
        ours, theirs = memory_bytes_pair()
        link = RedisLink(ours, ADDRESS, 5.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(theirs.send_all, ODD[what])
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(_send_and_end, theirs, b"\r\n" * 3)
            try:
                found = await ask(link)
            except (RedisUnavailable, RedisRefused) as error:
                text = str(error)
                assert str(ADDRESS) in text
                assert text.isprintable()
                assert len(text) < 500
            else:
                assert found is None or found == [] or isinstance(found, str)
            nursery.cancel_scope.cancel()
    assert time.monotonic() - began < 10


async def _send_and_end(stream: trio.testing.MemorySendStream, data: bytes) -> None:
    with suppress(trio.BusyResourceError, trio.BrokenResourceError):
        await stream.send_all(data)
        await stream.send_eof()  # type: ignore[attr-defined]  # a stapled stream


PIECES = (
    b"*3\r\n", b"$7\r\nmessage\r\n", b"$1\r\na\r\n", b"$3\r\nx\r\n\r\n", b"*", b"$", b">", b"%", b"~", b"|", b"(", b"=",
    b"#", b":1\r\n", b"+OK\r\n", b"-ERR x\r\n", b"$-1\r\n", b"*-1\r\n", b"\r\n", b"\r", b"\n", b"1", b"99",
    b"1000000000\r\n", b"\xff", b"\0", b"*1\r\n" * 3000, b"9" * 5000, b"$5000000\r\n",
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=5), max_size=20), st.integers(1, 50))
def test_any_bytes_are_replies_or_unreadable_and_take_no_memory(pieces: list[bytes], step: int) -> None:
    data = b"".join(pieces)
    tracemalloc.start()
    try:
        for parts in ([data], [data[at : at + step] for at in range(0, min(len(data), 2000), step)]):
            reader = RespReader()
            with suppress(Unreadable):
                for part in parts:
                    reader.feed(part)
                    while reader.reply() is not NOTHING:
                        pass
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


LINES = st.binary(max_size=40).filter(lambda line: b"\r\n" not in line and line[:1] not in (b">", b"*"))


@given(st.lists(LINES, max_size=20), st.integers(1, 60))
def test_messages_are_read_however_they_are_cut(lines: list[bytes], step: int) -> None:
    data = b"".join(b"*3\r\n$7\r\nmessage\r\n$1\r\na\r\n$%d\r\n%s\r\n" % (len(line), line) for line in lines)
    reader, found = RespReader(), []
    for at in range(0, len(data), step):
        reader.feed(data[at : at + step])
        while (reply := reader.reply()) is not NOTHING:
            found.append(reply[2])
    assert found == lines
