"""What the answers of a Redis that refuses mean: whether the next try may help, and what the operator should change."""

from __future__ import annotations

import hiredis
import pytest
import trio
import trio.testing

from replicad.errors import RedisRefused, RedisUnavailable, ReplicadError
from replicad.redis.address import parse_redis
from replicad.redis.link import MOST_BYTES, RedisLink, refused
from replicad.streams.chunks import MAX_ROW

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
    ours, _theirs = trio.testing.memory_stream_pair()
    link = RedisLink(ours, ADDRESS, 5.0)
    began = trio.current_time()
    with pytest.raises(RedisUnavailable, match="did not answer within 5 s"):
        await link.call("PING")
    assert trio.current_time() == began + 5
    with pytest.raises(RedisUnavailable):
        await link.call("PING")  # it is closed: no answer is taken for that of another command


@pytest.mark.parametrize("said", [b"", b"+PONG", b"HTTP/1.1 400 Bad Request\r\n"])
async def test_what_is_no_redis_is_given_up(said: bytes) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    link = RedisLink(ours, ADDRESS, 5.0)
    await theirs.send_all(said)
    await theirs.send_eof()
    with pytest.raises(RedisUnavailable, match=r"closed the connection|does not speak the protocol"):
        await link.call("PING")


async def test_a_message_that_comes_together_with_the_answer_to_subscribe_is_not_lost() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    link = RedisLink(ours, ADDRESS, 5.0)
    confirmed = b"*3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n"
    await theirs.send_all(confirmed + b"*3\r\n$7\r\nmessage\r\n$1\r\na\r\n$3\r\none\r\n")
    await link.subscribe(["a"])
    with trio.fail_after(60):
        assert await link.messages() == [(b"a", b"one")]


async def test_a_message_beyond_the_longest_row_is_not_kept_in_memory() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    link = RedisLink(ours, ADDRESS, 60.0)
    head = b"*3\r\n$7\r\nmessage\r\n$1\r\na\r\n"
    most = b"$%d\r\n%s\r\n" % (MAX_ROW, b"x" * MAX_ROW)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(theirs.send_all, head + most)
        assert [len(message) for _, message in await link.messages()] == [MAX_ROW]
        nursery.start_soon(theirs.send_all, head + b"$500000000\r\n" + b"x" * (MOST_BYTES + 1))
        with pytest.raises(RedisUnavailable, match=f"over {MOST_BYTES} bytes"):
            await link.messages()
