"""Offsets: how far a query has read, as Spark stores it in the checkpoint. Knows neither Spark nor sockets.

Spark compares offsets as JSON text, so each position must have exactly one text: keys are sorted everywhere. A tube's
offset is `{"n":2,"p":{"0":{"b":88,"c":1004,"r":120},"1":{...}},"v":1}`: the number of partitions and, for each of them,
the cursor (`r` regular, `b` backfill) and `c`, the number of pods read so far. With `c` a task can check that it
received every planned pod. `t` is the tube's name and `m` when it was made: a checkpoint of another tube would ack pods
that no reader has read. `g` is the generation of the tube's history (docs/positions.md), outside of which the cursors
mean nothing. A stream's offset is `{"t":"58~2.61","v":1}`: the vector token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from replicad.errors import BadToken, UsageError
from replicad.protocol.tokens import START, Cursor, Vector
from replicad.tubes.commands import Part

VERSION = 1  # of the JSON form; other versions are refused


@dataclass(frozen=True, slots=True)
class TubeCursor:
    """A place in one partition: the cursor, and how many pods the query has read up to there."""

    cursor: Cursor = START
    pods: int = 0

    def advanced(self, cursor: Cursor, pods: int) -> TubeCursor:
        """The place at `cursor`, after reading `pods` more pods."""
        return TubeCursor(cursor, self.pods + pods)


@dataclass(frozen=True, slots=True)
class Range:
    """Exactly the `pods` pods of one partition that lie in (`after`, `upto`]."""

    part: Part
    after: Cursor
    upto: Cursor
    pods: int


@dataclass(frozen=True, slots=True)
class TubeOffset:
    """A place in every partition of a tube; `places[i]` belongs to partition i of `len(places)`."""

    places: tuple[TubeCursor, ...]

    @staticmethod
    def tube_of(value: Mapping[str, Any]) -> tuple[str | None, int | None]:
        """The name of the tube to which an offset belongs, and when the tube was made, if they are known."""
        name, made = value.get("t"), value.get("m")
        if not isinstance(name, str | None) or not isinstance(made, int | None):
            raise foreign(value)
        return name, made

    @staticmethod
    def generation_of(value: Mapping[str, Any]) -> str | None:
        """The generation to which the cursors of an offset belong; None: it was made before anything was read."""
        generation = value.get("g")
        if not isinstance(generation, str | None):
            raise foreign(value)
        return generation

    @classmethod
    def beginning(cls, partitions: int) -> Self:
        """The offset before the first pod of a tube with that many partitions."""
        return cls((TubeCursor(),) * partitions)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote.

        Raises:
            UsageError: not of that form: the checkpoint belongs to another source.
        """
        check_version(value)
        try:
            partitions, places = int(value["n"]), value["p"]
            found = tuple(_place(places[str(number)]) for number in range(partitions))
        except (KeyError, TypeError, ValueError):
            raise foreign(value) from None
        if not found or len(places) != partitions:
            raise foreign(value)
        return cls(found)

    def to_json(
        self, tube: str | None = None, made: int | None = None, generation: str | None = None
    ) -> dict[str, Any]:
        """The offset for Spark, of a tube that was made then, in that generation. Equal offsets give equal text."""
        places = {
            str(number): {"b": place.cursor.backfill, "c": place.pods, "r": place.cursor.regular}
            for number, place in enumerate(self.places)
        }
        known = {"g": generation, "m": made, "t": tube}
        whose = {key: value for key, value in known.items() if value is not None}
        return dict(sorted({"n": len(self.places), "p": dict(sorted(places.items())), "v": VERSION, **whose}.items()))

    @property
    def partitions(self) -> int:
        """The tube's number of partitions when this offset was made."""
        return len(self.places)

    @property
    def pods(self) -> int:
        """Pods of all partitions read since the number of partitions last changed."""
        return sum(place.pods for place in self.places)

    def part(self, number: int) -> Part:
        """Partition `number`."""
        return Part(number, len(self.places))

    @property
    def last_seq(self) -> int:
        """The highest seq up to which any partition was read."""
        return max(self.furthest.regular, self.furthest.backfill)

    @property
    def furthest(self) -> Cursor:
        """The highest cursor of any partition. When all are read to their ends, no unread pod lies below it."""
        return Cursor(
            max(place.cursor.regular for place in self.places), max(place.cursor.backfill for place in self.places)
        )

    @property
    def lowest(self) -> Cursor:
        """The lowest cursor of any partition: every unread pod lies behind it, and acked pods do not."""
        return Cursor(
            min(place.cursor.regular for place in self.places), min(place.cursor.backfill for place in self.places)
        )

    def ranges_to(self, end: TubeOffset) -> list[Range]:
        """The ranges between this offset and `end`, without empty ones.

        If the number of partitions changed in between, or a cursor went back (a restored tube, with
        failOnDataLoss=false), reading started again: the range starts at the first pod, and `end` counts from there.
        """
        same = self.partitions == end.partitions
        ranges = []
        for number, upto in enumerate(end.places):
            after = self.places[number] if same and _not_behind(self.places[number], upto) else TubeCursor()
            if upto != after:
                ranges.append(Range(end.part(number), after.cursor, upto.cursor, upto.pods - after.pods))
        return ranges


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """A vector token of a stream."""

    token: Vector

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote.

        Raises:
            UsageError: not of that form: the checkpoint belongs to another source.
        """
        check_version(value)
        try:
            return cls(Vector.parse(value["t"]))
        except (KeyError, TypeError, BadToken):
            raise foreign(value) from None

    def to_json(self) -> dict[str, Any]:
        """The offset for Spark. Equal offsets give equal text."""
        return {"t": str(self.token), "v": VERSION}


def ranges_between(start: Mapping[str, Any] | None, end: Mapping[str, Any]) -> list[Range]:
    """The ranges of a batch of one tube, without empty ones, in the order of its tasks. `start` None: the first pod.

    Raises:
        UsageError: an offset is not of a tube.
    """
    finish = TubeOffset.from_json(end)
    begin = TubeOffset.beginning(finish.partitions)
    if start is not None:
        (_, before), (_, made) = TubeOffset.tube_of(start), TubeOffset.tube_of(end)
        other_tube = before is not None and before != made  # with failOnDataLoss=false
        if not other_tube and TubeOffset.generation_of(start) in (None, TubeOffset.generation_of(end)):
            begin = TubeOffset.from_json(start)
    return begin.ranges_to(finish)


def last_pod(offset: Mapping[str, Any]) -> int:
    """The highest number of a pod that an offset of a tube, or of the tubes of islands, covers.

    Raises:
        UsageError: not of that form.
    """
    tubes = offset["i"].values() if "i" in offset else (offset,)
    found = [TubeOffset.from_json(one).furthest for one in tubes]
    return max(max(cursor.regular, cursor.backfill) for cursor in found)


def _place(value: Mapping[str, Any]) -> TubeCursor:
    backfill, pods, regular = (value[key] for key in ("b", "c", "r"))
    if not all(type(number) is int and number >= 0 for number in (backfill, pods, regular)):
        raise ValueError("not a place")
    return TubeCursor(Cursor(regular, backfill), pods)


def _not_behind(start: TubeCursor, end: TubeCursor) -> bool:
    return (
        start.cursor.regular <= end.cursor.regular
        and start.cursor.backfill <= end.cursor.backfill
        and start.pods <= end.pods
    )


def check_version(value: Mapping[str, Any]) -> None:
    """Raise UsageError for an offset of another version or of another source."""
    if not isinstance(value, Mapping) or "v" not in value:
        raise foreign(value)
    if value["v"] != VERSION:
        raise UsageError(
            f"the checkpoint was written by another version of replicad (offsets of version {value['v']!r}, "
            f"this one knows {VERSION}); use that version, or a new checkpointLocation"
        )


def foreign(value: object) -> UsageError:
    """The error for an offset that is not of this source."""
    return UsageError(
        f"the checkpoint has an offset that is not of this source: {str(value)[:120]}; use another checkpointLocation"
    )
