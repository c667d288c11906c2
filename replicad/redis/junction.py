"""When a follower may switch from TCP to Redis, and which lines it then gets. Pure: lines in, lines out.

A follower subscribes by TCP as always. This object sees its positions. On the channel of a stream all writers and
positions are published every few seconds (a *sync*); messages after the sync are kept. As soon as the follower has by
TCP everything up to a sync of the same generation, it gets the kept messages, and the lines of TCP for this stream are
dropped: so it misses nothing, and it drops repeated rows as always.

A message that does not continue at the follower's position (a gap, a fork, a new writer) raises `Missed`: then the
connection ends, and the follower resumes by TCP, with its token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from replicad.redis.messages import ALIVE
from replicad.streams.commands import BATCH

MAX_KEPT = 8 << 20  # bytes of lines after a sync, of one stream; beyond it the next sync is waited for
_BATCH = BATCH.encode()
_OWN = (b"NAME ", b"AUTH ", b"PING", b"STREAMS", b"REPLICATE ")  # what a plain follower sends


class Missed(Exception):
    """Redis does not go on where the follower is; the text says why."""


@dataclass(slots=True)
class _Stream:
    """One subscription."""

    name: str
    linear: bool = False
    epoch: bytes = b""  # as WRITERS had it on TCP
    numbers: frozenset[bytes] = frozenset()  # `writer=number`, likewise
    encoded: bytes = field(init=False)  # the name as lines have it
    rows: bytes = field(init=False)  # the begin of every row
    have: dict[bytes, int] = field(default_factory=dict)  # the position of each writer that the follower has
    torn: dict[bytes, int] = field(default_factory=dict)  # the rows of batches that are not complete, by writer
    joined: bool = False
    synced_at: float = float("-inf")
    coming: dict[bytes, int] | None = None  # the positions of a sync that is not complete
    writers: tuple[bytes, frozenset[bytes]] = (b"", frozenset())  # generation and numbers, as the sync has them
    sync: dict[bytes, int] | None = None  # the last complete sync, while not joined
    kept: list[bytes] = field(default_factory=list)  # lines after it
    kept_bytes: int = 0

    def __post_init__(self) -> None:
        self.encoded = self.name.encode()
        self.rows = b"RDATA %s " % self.encoded

    def names(self) -> set[bytes]:
        """The listed writers."""
        return {pair.rpartition(b"=")[0] for pair in self.writers[1]}


class Junction:
    """The subscriptions of one connection of a follower."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._plain = True  # nothing was asked but what a follower of single streams asks
        self._unanswered = 0  # STREAMS

    @property
    def wanted(self) -> list[str]:
        """The streams whose channels are of use."""
        return [one.name for one in self._streams.values() if not one.linear] if self._plain else []

    @property
    def joined(self) -> list[str]:
        """The streams that come by Redis."""
        return [one.name for one in self._streams.values() if one.joined]

    @property
    def needs_tcp(self) -> bool:
        """Whether the connection to the daemon is of use."""
        whole = self._streams and all(one.joined for one in self._streams.values())
        return not whole or not self._plain or self._unanswered > 0

    def silent(self, now: float, limit: float) -> bool:
        """Whether a stream that comes by Redis has had no sync for `limit` seconds."""
        return any(one.joined and now > one.synced_at + limit for one in self._streams.values())

    # --- lines ---

    def from_follower(self, line: bytes) -> None:
        """A line that the follower sends."""
        words = line.split(b" ")
        if line == b"STREAMS":
            self._unanswered += 1
        elif words[0] == b"REPLICATE" and len(words) > 1:
            name = words[1].decode(errors="replace")
            self._streams[name] = _Stream(name, linear=words[-1] == b"linear")
        elif not line.startswith(_OWN):
            self._plain = False

    def from_daemon(self, lines: list[bytes]) -> list[bytes]:
        """Lines of the daemon; returns those for the follower."""
        found: list[bytes] = []
        for line in lines:
            words = line.split(b" ", 4)
            stream = self._streams.get(words[1].decode(errors="replace")) if len(words) > 2 else None
            if words[0] == b"STREAMS":
                self._unanswered -= 1
            if stream is None or words[0] not in (b"RDATA", b"POSITION", b"WRITERS"):
                found.append(line)
            elif not stream.joined:
                _note(stream, words)
                found.append(line)
        return found

    def try_join(self) -> list[bytes]:
        """Join the streams that can be; returns the lines for the follower. Raises Missed."""
        found: list[bytes] = []
        for stream in self._streams.values() if self._plain else ():
            if not stream.joined and _can_join(stream):
                stream.joined = True
                kept, stream.kept, stream.kept_bytes, stream.sync = stream.kept, [], 0, None
                for line in kept:
                    found += self._redis_line(stream, line, stream.synced_at)
        return found

    def from_redis(self, name: str, line: bytes, now: float) -> list[bytes]:
        """A message on the channel of a stream; returns the lines for the follower. Raises Missed."""
        stream = self._streams.get(name)
        if stream is None or stream.linear:
            return []
        try:
            if stream.joined and line.startswith(stream.rows):
                return _row(stream, line)
            return self._redis_line(stream, line, now)
        except ValueError as error:
            raise Missed(f"Redis has a malformed line of stream {name}: {line[:100]!a}") from error

    def _redis_line(self, stream: _Stream, line: bytes, now: float) -> list[bytes]:
        if line == ALIVE:
            stream.synced_at = now
            if stream.joined:
                return [line]
            _forget_sync(stream)
            stream.coming, stream.writers = {}, (b"", frozenset())
            return []
        if stream.joined:
            return self._joined_line(stream, line)
        if stream.coming is not None:
            _sync(stream, line)
        elif stream.sync is not None:
            stream.kept.append(line)
            stream.kept_bytes += len(line)
            if stream.kept_bytes > MAX_KEPT:
                _forget_sync(stream)
        return []

    def lost_redis(self) -> None:
        """The subscription has ended. Raises Missed if a stream came by it."""
        if self.joined:
            raise Missed("the connection to Redis was lost")
        for stream in self._streams.values():
            _forget_sync(stream)
            stream.coming = None

    def _joined_line(self, stream: _Stream, line: bytes) -> list[bytes]:
        if line.startswith(stream.rows):
            return _row(stream, line)
        words = line.split(b" ", 4)
        if len(words) > 1 and words[1] != stream.encoded:
            raise Missed(f"on the channel of stream {stream.name} is a line of another: {line[:100]!a}")
        match words:
            case [b"BATCH", _, writer, rows]:
                if stream.torn.get(writer, 0) != int(rows):
                    raise Missed(f"rows of a batch of stream {stream.name} are missing")
                return []
            case [b"POSITION", _, writer, prev, new]:
                stream.coming = None
                return [line] if _moves(stream, writer, _number(prev), _number(new)) else []
            case [b"WRITERS", _, epoch, *_]:
                if (epoch, _numbers(line)) != (stream.epoch, stream.numbers):
                    raise Missed(f"the writers or the generation of stream {stream.name} have changed")
                return []
        raise Missed(f"Redis says of stream {stream.name}: {line[:200].decode(errors='replace')}")


def _note(stream: _Stream, words: list[bytes]) -> None:
    """What the follower has by TCP after this line."""
    match words:
        case [b"RDATA", _, writer, token, _]:
            if token == _BATCH:
                stream.torn[writer] = stream.torn.get(writer, 0) + 1
            else:
                stream.torn.pop(writer, None)
                stream.have[writer] = max(int(token), stream.have.get(writer, int(token)))
        case [b"POSITION", _, writer, _, new]:
            stream.torn.pop(writer, None)
            stream.have[writer] = int(new)
        case [b"WRITERS", _, epoch, *_]:
            stream.epoch, stream.numbers = epoch, _numbers(b" ".join(words))
            stream.have.clear()  # the POSITION of each writer follows


def _row(stream: _Stream, line: bytes) -> list[bytes]:
    """A row of a stream by Redis. Raises Missed, and ValueError for a text that is no row."""
    _, _, writer, token, _ = line.split(b" ", 4)
    have = stream.have.get(writer)
    if have is None:
        raise Missed(f"stream {stream.name} has a new writer")
    if token == _BATCH:
        stream.torn[writer] = stream.torn.get(writer, 0) + 1
        return [line]
    if stream.torn:
        stream.torn.pop(writer, None)
    number = int(token) if token.isdigit() and len(token) < 19 else _number(token)
    if number > have:
        stream.have[writer] = number
    return [line]


def _number(text: bytes) -> int:
    """A position. Raises ValueError for what a daemon would not write: blanks, underscores, more than 64 bits."""
    found = int(text)
    if b"%d" % found != text or abs(found) >= 1 << 63:
        raise ValueError
    return found


def _numbers(line: bytes) -> frozenset[bytes]:
    return frozenset(line.split(b" ")[3:])


def _can_join(stream: _Stream) -> bool:
    return (
        stream.sync is not None
        and not stream.linear
        and not stream.torn
        and stream.writers == (stream.epoch, stream.numbers)
        and all(stream.have.get(writer, position - 1) >= position for writer, position in stream.sync.items())
    )


def _sync(stream: _Stream, line: bytes) -> None:
    """A line of a sync, while the stream is not joined."""
    assert stream.coming is not None
    words = line.split(b" ", 4)
    match words:
        case [b"WRITERS", _, epoch, *_]:
            stream.writers = (epoch, _numbers(line))
        case [b"POSITION", _, writer, _, new]:
            stream.coming[writer] = int(new)
        case _:
            stream.coming = None
            return
    if stream.coming and stream.coming.keys() == stream.names():
        stream.sync, stream.coming = stream.coming, None
        stream.kept, stream.kept_bytes = [], 0


def _forget_sync(stream: _Stream) -> None:
    stream.sync, stream.kept, stream.kept_bytes = None, [], 0


def _moves(stream: _Stream, writer: bytes, prev: int, new: int) -> bool:
    """Whether a POSITION moves the follower; False if it has that already. Raises Missed."""
    have = stream.have.get(writer)
    if have is None:
        raise Missed(f"stream {stream.name} has a new writer")
    if writer in stream.torn:
        raise Missed(f"a batch of stream {stream.name} was not ended")
    if prev > have or new < prev:
        raise Missed(f"rows of stream {stream.name} after {have} are missing, Redis goes on from {prev}")
    if new <= have:
        return False
    stream.have[writer] = new
    return True
