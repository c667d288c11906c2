"""The messages for each channel. Pure: events of a follower in, messages out.

Two kinds of channels carry the same rows. The channel named like the server has what plain REPLICATE sends, which is
what Synapse expects. `server/STREAM` has the rows of one stream for followers that have tokens. There each step says
before the rows of a writer where that one stood: `POSITION stream writer prev prev`, or within a batch `BATCH stream
writer rows`. So a follower which missed something finds it. Every few seconds all writers and positions come again
(`sync`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from replicad.client.events import RowBatch
from replicad.streams.commands import BATCH, WRITERS_ON_LINE, writers_lines

ALIVE = b"PING"  # the first line of a `sync`
MISSED = b"ERROR stream_forked: this stream begins a generation; go on by TCP, from your token"
STOPPED = b"ERROR row_unreadable: this stream has stopped before a row; a daemon says which, by TCP"
LINES = 400  # in a step, about: Redis serves no other client meanwhile
STEP_BYTES = 1 << 18  # likewise
WITHIN = "BATCH"  # on the channel of a stream: so many rows of a batch were published before
UNLISTED = "+"  # the one writer of a stream that has too many (protocol.md)


def stream_channel(server: str, stream: str) -> str:
    """The channel of one stream."""
    return f"{server}/{stream}"


def key_of(server: str) -> str:
    """The key in Redis with the present publisher's term and the address of its daemon."""
    return f"replicad:{server}"


# For the channel of the server, for that of the stream, for both (publishing.lua). Bytes are packed fastest.
COMMON, OWN, BOTH = b"1", b"2", b"3"

Step = list[str | bytes]
"""What is published at once: a follower gets all of it, or nothing. For each line where it goes, and the line without
its end. One flat list: it is made for every row.
"""


@dataclass(slots=True)
class PublishedState:
    """The published state of one stream: its generation, its writers' numbers and positions."""

    stream: str
    epoch: str
    numbers: Mapping[str, int]
    positions: dict[str, int]
    stopped: bool = False  # before a row that cannot be read; followers get the reason by TCP

    @property
    def is_joinable(self) -> bool:
        """Whether followers may join by Redis: its writers are listed, and fit into one line."""
        return 0 < len(self.numbers) <= WRITERS_ON_LINE and UNLISTED not in self.numbers

    def sync(self) -> Step:
        """The present writers and positions for the followers of this stream."""
        if self.stopped or not self.is_joinable or not self.numbers.keys() <= self.positions.keys():
            return []
        writers = writers_lines(self.stream, self.epoch, self.numbers).rstrip(b"\n")
        found: Step = [OWN, ALIVE, OWN, writers]
        for name in self.numbers:
            found += (OWN, self._position(name, self.positions[name]))
        return found

    def all_positions(self) -> Step:
        """POSITION of every writer, as REPLICATE is answered on the channel of the server."""
        found: Step = []
        for name, at in sorted(self.positions.items()):
            found += (COMMON, self._position(name, at))
        return found

    def rows(self, batches: Iterable[RowBatch]) -> list[Step]:
        """Rows of this stream, and before them where their writers stood. Moves the positions.

        This is the work for each row, so the names that it needs are local, and a batch of one row has no inner loop.
        """
        positions, stream, joinable = self.positions, self.stream, self.is_joinable
        steps: list[Step] = []
        step: Step = []
        most, size, begun = LINES * 2, 0, set[str]()
        present, head, counts = "", "", False
        for _, instance, token, rows in batches:
            if instance != present:
                present, head = instance, f"RDATA {stream} {instance} "
                counts = instance in self.numbers or instance in positions
            last = len(rows) - 1
            for number, row in enumerate(rows) if last else ((0, rows[0]),):
                if len(step) >= most or size >= STEP_BYTES:
                    steps.append(step)
                    step, size, begun = [], 0, set()
                if instance not in begun:
                    begun.add(instance)
                    if joinable and instance in positions:
                        step += (OWN, self._begin(instance, number))
                line = f"{head}{token} {row}" if number == last else f"{head}{BATCH} {row}"
                step += (BOTH, line)
                size += len(line)
            if counts:
                positions[instance] = token
        return [*steps, step] if step else steps

    def _begin(self, instance: str, rows: int) -> str:
        """What a step says before the rows of a writer: its position, or how many rows of a batch came before."""
        if rows:
            return f"{WITHIN} {self.stream} {instance} {rows}"
        return self._position(instance, self.positions[instance])

    def moved(self, instance: str, to: int) -> Step:
        """A writer's position moved without rows; back, where history forked."""
        prev = self.positions.get(instance, to)
        self.positions[instance] = to
        return [BOTH if to >= prev else COMMON, self._position(instance, prev, to)]

    def back(self, instance: str | None, to: int) -> Step:
        """A Reset: the rows of a writer (None: of all) above `to` are void."""
        writers = list(self.positions) if instance is None else [instance]
        found: Step = [OWN, MISSED]
        for name in writers:
            if self.positions.get(name, to) > to:
                found += self.moved(name, to)
        return found

    def _position(self, instance: str, prev: int, new: int | None = None) -> str:
        return f"POSITION {self.stream} {instance} {prev} {prev if new is None else new}"
