"""The pods that were read of a tube and that some downstream does not have yet. Each downstream has its own place.

The reader adds chunks in the order of the tube. Each downstream takes all chunks from its place on as one batch, at its
own pace. A chunk that every downstream has is acked and forgotten. The log is bounded: a reader that is ahead of the
slowest downstream by `MOST_IDS` waits. An id of more than `ID_BYTES` counts as several, so that the bound is one
in bytes too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pyarrow as pa

from replicad.protocol.tokens import Cursor
from replicad.spark.touches import Control, collect

MOST_IDS = 1_000_000  # in the log: some 60 MB of numbers, or 100 MB of texts
BATCH_IDS = 200_000  # in one batch downstream, about
ID_BYTES = 100  # that an id takes in the log, or in the table of a backlog: a uuid as text takes some 90
READ_BYTES = 16 << 20  # of the pods of one answer, about
_FIRST_IDS = 10_000  # in the first answer, when the length of the ids is not known


@dataclass(frozen=True, slots=True)
class TouchChunk:
    """The pods of one answer. `touches` has each id once per shard, `end` is the cursor behind the last pod."""

    number: int
    pods: tuple[pa.RecordBatch, ...]
    touches: pa.Table
    controls: tuple[Control, ...]
    end: Cursor
    count: int
    ids: int
    oldest: float | None
    weight: int  # ids, of which a long one counts as several

    @classmethod
    def of(cls, number: int, batches: Iterable[pa.RecordBatch], end: Cursor) -> TouchChunk:
        """From the batches of an answer."""
        held = tuple(batches)
        found = collect(held)
        controls = tuple(sorted(found.controls, key=lambda control: control.seq))
        size = sum(one.nbytes for one in held) + found.table.nbytes
        weight = max(found.ids, size // ID_BYTES)
        return cls(number, held, found.table, controls, end, found.pods, found.ids, found.oldest, weight)


def ids_to_read(last: TouchChunk | None, most: int) -> int:
    """How many ids to ask for: `most`, or about `READ_BYTES` of ids as long as those of the last answer."""
    if last is None:
        return min(most, _FIRST_IDS)
    return max(1, min(most, READ_BYTES * max(1, last.ids) // max(1, last.weight * ID_BYTES)))


@dataclass(slots=True)
class TouchLog:
    """The log, for one reader and a thread for each name in `places`, which has the number of the next chunk that the
    downstream does not have for sure.
    """

    places: dict[str, int] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)  # likewise of a downstream that has more, and not for sure
    ended: bool = False  # nothing is added any more
    _chunks: deque[TouchChunk] = field(default_factory=deque)
    _weight: int = 0
    _stirs: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def weight(self) -> int:
        """The ids in the log, of which a long one counts as several."""
        return self._weight

    def add(self, chunk: TouchChunk) -> None:
        """Add the next chunk."""
        with self._changed:
            self._chunks.append(chunk)
            self._weight += chunk.weight
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing is added any more: `take` returns nothing when a downstream has all."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def take(self, name: str, timeout: float) -> list[TouchChunk]:
        """The chunks that a downstream has not written, about BATCH_IDS ids; waits for the first one."""
        with self._changed:
            place = max(self.places[name], self.taken.get(name, 0))
            if not self._from(place):
                self._wait_for(lambda: bool(self._from(place)), timeout)
            taken: list[TouchChunk] = []
            weight = 0
            for chunk in self._from(max(place, self.places[name])):
                if taken and weight + chunk.weight > BATCH_IDS:
                    break
                taken.append(chunk)
                weight += chunk.weight
            return taken

    def behind(self, name: str) -> int:
        """How many ids a downstream does not have yet."""
        with self._changed:
            return sum(chunk.ids for chunk in self._from(self.places[name]))

    def lacking(self, name: str) -> list[TouchChunk]:
        """All chunks that a downstream does not have for sure."""
        with self._changed:
            return self._from(self.places[name])

    def _from(self, place: int) -> list[TouchChunk]:
        return [chunk for chunk in self._chunks if chunk.number >= place]

    def wrote(self, name: str, number: int) -> None:
        """A downstream has written all chunks up to this number, and may lose them again if it crashes."""
        with self._changed:
            self.taken[name] = number + 1

    def done(self, name: str, number: int) -> None:
        """A downstream has all chunks up to this number."""
        with self._changed:
            self.places[name] = max(self.places[name], number + 1)  # the main thread may have put it further
            self._changed.notify_all()

    def take_finished(self) -> TouchChunk | None:
        """Forget the chunks that every downstream has; returns the last of them."""
        with self._changed:
            last = None
            lowest = min(self.places.values())
            while self._chunks and self._chunks[0].number < lowest:
                last = self._chunks.popleft()
                self._weight -= last.weight
            return last

    def gather(self, name: str, enough: int, timeout: float) -> None:
        """Until a downstream lacks `enough` ids, nothing is added any more, or `stir`."""
        with self._changed:
            self._wait_for(lambda: self.ended or self.behind(name) >= enough, timeout)

    def _wait_for(self, there: Callable[[], bool], timeout: float) -> None:
        stirs = self._stirs
        self._changed.wait_for(lambda: there() or self._stirs != stirs, timeout)

    def wait(self, timeout: float) -> None:
        """Until something has changed."""
        with self._changed:
            self._changed.wait(timeout)

    def stir(self) -> None:
        """Let all who wait look again."""
        with self._changed:
            self._stirs += 1
            self._changed.notify_all()

    @property
    def is_empty(self) -> bool:
        """Whether every downstream has everything."""
        with self._changed:
            return not self._chunks
