"""What is published on which channel. Pure: events of a follower in, messages out.

Two kinds of channels carry the same rows. The channel named like the server has what plain REPLICATE sends, which is
what Synapse expects. `server/STREAM` has the rows of one stream for followers that have tokens: before the rows of a
chunk comes `POSITION stream writer prev prev`, so that a follower which missed something finds it, and every few
seconds all writers and positions come again (`sync`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from replicad.client.events import RowBatch
from replicad.streams.commands import BATCH
from replicad.streams.writer_set import WRITERS_ON_LINE, writers_lines

ALIVE = b"PING"  # the first line of a `sync`
MISSED = b"ERROR stream_forked: this stream begins a generation; go on by TCP, from your token"
UNLISTED = "+"  # the one writer of a stream that has too many (protocol.md)


def stream_channel(server: str, stream: str) -> str:
    """The channel of one stream."""
    return f"{server}/{stream}"


def key_of(server: str) -> str:
    """The key in Redis with the present publisher's term and the address of its daemon."""
    return f"replicad:{server}"


@dataclass(frozen=True, slots=True)
class Message:
    """A line, without its end. `common`: for the channel of the server, `own`: for that of the stream."""

    line: bytes
    common: bool = True
    own: bool = True


@dataclass(slots=True)
class Published:
    """What has been published of one stream: its generation, its writers' numbers and positions."""

    stream: str
    epoch: str
    numbers: Mapping[str, int]
    positions: dict[str, int]

    @property
    def is_joinable(self) -> bool:
        """Whether followers may join by Redis: its writers are listed, and fit into one line."""
        return 0 < len(self.numbers) <= WRITERS_ON_LINE and UNLISTED not in self.numbers

    def sync(self) -> list[Message]:
        """The present writers and positions for the followers of this stream."""
        if not self.is_joinable or not self.numbers.keys() <= self.positions.keys():
            return []
        writers = writers_lines(self.stream, self.epoch, self.numbers).rstrip(b"\n")
        lines = [ALIVE, writers, *(self._position(name, self.positions[name]) for name in self.numbers)]
        return [Message(line, common=False) for line in lines]

    def all_positions(self) -> list[Message]:
        """POSITION of every writer, as REPLICATE is answered on the channel of the server."""
        return [Message(self._position(name, at), own=False) for name, at in sorted(self.positions.items())]

    def rows(self, batches: Iterable[RowBatch]) -> list[Message]:
        """Rows of this stream, and where the writers stood before. Moves the positions."""
        found: list[Message] = []
        begun: set[str] = set()
        for batch in batches:
            instance = batch.instance
            if instance not in begun:
                begun.add(instance)
                if self.is_joinable and instance in self.positions:
                    found.append(Message(self._position(instance, self.positions[instance]), common=False))
            head = f"RDATA {self.stream} {instance} "
            found += [Message(f"{head}{BATCH} {row}".encode()) for row in batch.rows[:-1]]
            found.append(Message(f"{head}{batch.token} {batch.rows[-1]}".encode()))
            if instance in self.numbers or instance in self.positions:
                self.positions[instance] = batch.token
        return found

    def moved(self, instance: str, to: int) -> list[Message]:
        """A writer's position moved without rows; back, where history forked."""
        prev = self.positions.get(instance, to)
        self.positions[instance] = to
        return [Message(self._position(instance, prev, to), own=to >= prev)]

    def back(self, instance: str | None, to: int) -> list[Message]:
        """A Reset: the rows of a writer (None: of all) above `to` are void."""
        writers = list(self.positions) if instance is None else [instance]
        found = [Message(MISSED, common=False)]
        for name in writers:
            if self.positions.get(name, to) > to:
                found += self.moved(name, to)
        return found

    def _position(self, instance: str, prev: int, new: int | None = None) -> bytes:
        return f"POSITION {self.stream} {instance} {prev} {prev if new is None else new}".encode()
