"""Lines as server-sent events: ids are the tokens of our clients, and shared blocks are the same for each reader."""

from __future__ import annotations

import tracemalloc
import weakref

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from replicad.client.follower import Follower
from replicad.errors import BadToken
from replicad.operations.http.live import Events, EventStream, Translations
from replicad.protocol.commands import CORE
from replicad.protocol.words import Side
from replicad.streams.commands import COMMANDS

VOCABULARY = CORE.with_(*COMMANDS)
EPOCH, NEXT = "7c1fd2a90b31", "09d3b7c1e2aa"
HELLO = b"SERVER example.com\nPING 1\n"
ONE = f"WRITERS s {EPOCH} a=1\nPOSITION s a 5 5\n".encode()
TWO = f"WRITERS s {EPOCH} a=1 b=2\nPOSITION s a 5 5\nPOSITION s b 5 7\n".encode()
BLOCKS = [
    b"RDATA s a 8 {}\nRDATA s b 9 [1, 2]\n",
    b"RDATA s a batch 1\n",
    b"RDATA s a batch 2\nRDATA s a 11 3\nPING 2\nPOSITION s b 9 12\n",
    b'RDATA s b 14 {"a": "\xc3\xa9"}\nRDATA s stranger 3 4\n',
]


def ids(events: bytes) -> list[str]:
    return [line[4:] for line in events.decode().split("\n") if line.startswith("id: ")]


@pytest.mark.parametrize("preamble", [ONE, TWO])
def test_the_ids_are_the_tokens_of_our_clients_and_shared_blocks_change_nothing(preamble: bytes) -> None:
    shared = Translations()
    first, second, alone = (Events("s", "5", one) for one in (shared, shared, Translations()))
    follower = Follower()
    follower.want("s", "5")
    for block in [HELLO, preamble, *BLOCKS]:
        found = first.feed(block).events
        assert second.feed(block).events == found == alone.feed(block).events
        list(follower.feed(block, lambda line: VOCABULARY.parse(line.decode(), Side.SERVER) if line else None))
        if ids(found):
            assert ids(found)[-1] == follower.token("s")
    assert first.started
    assert len(shared._kept) == 3, "those of rows alone"
    assert second.feed(b"RDATA s a 20 0\n").events.endswith(b'data: {"instance":"a","token":20,"row":0}\n\n')


def test_readers_of_a_long_row_share_its_event_as_long_as_one_of_them_sends_it() -> None:
    shared = Translations()
    readers = [Events("s", "5", shared) for _ in range(3)]
    for reader in readers:
        reader.feed(HELLO + ONE)
    row = b'RDATA s a 8 "%s"\n' % (b"x" * (1 << 20))
    first, second = readers[0].feed(row), readers[1].feed(row)
    assert first.events is second.events
    held = weakref.ref(first)
    del first, second
    assert held() is None
    later = readers[2].feed(row).events
    assert ids(later[-100:]) == [] != ids(later[:100])
    assert [reader.feed(b"RDATA s a 9 0\n").events for reader in readers] == [
        f'id: {EPOCH}!9\ndata: {{"instance":"a","token":9,"row":0}}\n\n'.encode()
    ] * 3


SHORT = b"".join(b"RDATA s a %d 0\n" % number for number in range(6, 90))


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (SHORT, b""), (b"", SHORT), (SHORT, SHORT)],
    ids=["alone", "last", "first", "between"],
)
async def test_a_long_row_is_in_memory_once_however_many_readers_it_is_sent_to(before: bytes, after: bytes) -> None:
    free = trio.Event()

    class Below(trio.abc.SendStream):
        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            if len(data) > 100:
                await free.wait()

        wait_send_all_might_not_block = aclose = trio.lowlevel.checkpoint

    shared = Translations()
    readers = [EventStream(Events("s", "5", shared), "s", b"", Below) for _ in range(8)]
    for reader in readers:
        await reader.send_all(HELLO + ONE)
    chunk = bytearray(b'%sRDATA s a 99 "%s"\n%s' % (before, b"x" * (1 << 20), after))  # as a COPY gives it
    tracemalloc.start()
    try:
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(reader.send_pieces, [chunk])
            await wait_all_tasks_blocked()
            held = tracemalloc.get_traced_memory()[0]
            free.set()
    finally:
        tracemalloc.stop()
    assert len(chunk) < held < 3 * len(chunk), "one event, and a small part of it for each reader"


def test_positions_behind_a_reset_of_all_writers_move_no_reader() -> None:
    """Writer b is ahead of what all share, and its rows above that are void for who is told to discard all."""
    events = Events("s", f"{EPOCH}!5", Translations())
    events.feed(HELLO + TWO + b"RDATA s b 9 1\nPOSITION s a 5 8\n")
    fork = f"POSITION s a 8 5\nWRITERS s {NEXT} a=1 b=2\nPOSITION s a 5 5\nPOSITION s b 9 9\n"
    found = events.feed(fork.encode()).events
    assert ids(found)[-1] == f"{NEXT}!5"
    assert events.over, "the reader asks again"
    assert events.feed(b"RDATA s b 10 1\n").events == b""


def test_a_position_behind_a_gap_ends_the_answer_and_moves_nothing() -> None:
    events = Events("s", f"{EPOCH}!5", Translations())
    events.feed(HELLO + TWO)
    assert ids(events.feed(b"POSITION s a 6 8\n").events) == []
    assert events.over


def test_a_fork_an_error_and_a_notice_have_events_of_their_own() -> None:
    events = Events("s", f"{EPOCH}!5", Translations())
    assert events.feed(HELLO + TWO).events.count(b"event: position") == 2
    fork = f"POSITION s b 7 6\nWRITERS s {NEXT} a=1 b=2\nPOSITION s a 5 5\nPOSITION s b 6 6\n"
    found = events.feed(fork.encode()).events
    assert f'id: {EPOCH}!5~2.6\nevent: reset\ndata: {{"instance":"b","discard_after":6'.encode() in found
    assert ids(found)[-1] == f"{NEXT}!5~2.6"
    assert b"event: notice" in events.feed(b"ERROR stream_waits: stream s does not move: a right is missing\n").events
    assert not events.over
    refused = events.feed(b"ERROR slow_reader: resume from your token\n").events
    assert b'event: refused\ndata: {"code":"slow_reader"' in refused
    assert events.over
    forked = Events("s", f"{EPOCH}!9", Translations())
    text = f"ERROR bad_token: stream s forked after 4: discard the rows after 4 and resume from {NEXT}!4\n"
    assert ids(forked.feed(text.encode()).events) == [forked.again] == [f"{NEXT}!4"]
    unknown = Events("s", "NOW", Translations())
    assert unknown.feed(b"ERROR unknown_stream: there is no stream s\n").events == b""
    assert unknown.problem is not None
    assert (unknown.problem.status, unknown.problem.code) == (404, "unknown_stream")
    with pytest.raises(BadToken):
        Events("s", "nonsense", Translations())
