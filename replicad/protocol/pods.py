"""The commands about pods: read those of a partition, ack them, put aside what keeps failing.

`protocol.md` shows the conversation; here stands how each line of it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from replicad.protocol.tokens import START, Cursor
from replicad.protocol.tubing import Part
from replicad.protocol.words import (
    Command,
    Side,
    bad,
    decimal,
    flag,
    integer,
    integers,
    read_options,
    seconds,
    small,
    split_tail,
    split_words,
)

LINES, ARROW = "lines", "arrow"
ENCODINGS = (LINES, ARROW)  # of pods: a line each, or many in a block of Arrow IPC
MAX_BLOCK = 64 << 20  # bytes in a block: the longest line that clients take holds a pod as large


@dataclass(frozen=True, slots=True)
class Pods(Command):
    """PODS: asks for the pods of a partition under a lease that covers it. Answered by RDATA lines and CURSOR.

    Without `upto`: what lies behind `after` (default: the start), regular pods by seq and then backfill pods
    by seq, at most `limit` pods and `backfill` backfill pods among them (0 leaves backfill out), and about
    `ids` ids (at least one pod); with nothing there it waits up to `wait` seconds. `upto`: exactly the pods of
    (after, upto], for a replay. `plan=1`: the CURSOR alone, no rows. `encoding=arrow`: blocks, each announced by
    ARROW, instead of RDATA lines; `payload=1` has payloads in them, which lines always have.
    """

    NAME = "PODS"
    SENDER = Side.CLIENT
    USAGE = (
        "tube partition/partitions term [after=r.b] [upto=r.b] [limit=pods] [ids=ids] [backfill=pods] "
        "[wait=seconds] [plan=1] [encoding=lines|arrow] [payload=1]"
    )
    tube: str
    part: Part
    term: int
    after: Cursor = START
    upto: Cursor | None = None
    limit: int | None = None
    ids: int | None = None
    backfill: int | None = None
    wait: float | None = None
    plan: bool = False
    encoding: str | None = None
    payload: bool = False

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, term, *more = split_words(cls.NAME, rest, cls.USAGE, 3, 12)

        def count(what: str) -> Callable[[str], int]:
            def read(text: str) -> int:
                return small(cls.NAME, what, text)

            return read

        options = read_options(
            cls.NAME,
            more,
            {
                "after": Cursor.parse,
                "upto": Cursor.parse,
                "limit": count("limit"),
                "ids": count("ids"),
                "backfill": count("backfill"),
                "wait": lambda text: seconds(cls.NAME, "wait", text),
                "plan": lambda text: flag(cls.NAME, "plan", text),
                "encoding": _encoding,
                "payload": lambda text: flag(cls.NAME, "payload", text),
            },
        )
        if "payload" in options and options.get("encoding") != ARROW:
            raise bad(cls.NAME, "payload goes with encoding=arrow; lines always have it")
        if "plan" in options and "encoding" in options:
            raise bad(cls.NAME, "plan asks for no rows, so encoding does not go with it")
        if "upto" in options and len(options.keys() & {"limit", "ids", "backfill", "wait", "plan"}):
            raise bad(cls.NAME, "upto names an exact range; limit, ids, backfill, wait and plan do not go with it")
        return cls(tube, Part.parse(cls.NAME, part), integer(cls.NAME, "term", term), **options)

    def arguments(self) -> str:
        text = f"{self.tube} {self.part} {self.term}"
        if self.after != START:
            text += f" after={self.after}"
        for key in ("upto", "limit", "ids", "backfill"):
            if (value := getattr(self, key)) is not None:
                text += f" {key}={value}"
        if self.wait is not None:
            text += f" wait={decimal(self.wait)}"
        if self.plan:
            text += " plan=1"
        if self.encoding is not None:
            text += f" encoding={self.encoding}"
        return text + (" payload=1" if self.payload else "")


def _encoding(text: str) -> str:
    if text not in ENCODINGS:
        raise bad(Pods.NAME, f"there are the encodings {' and '.join(ENCODINGS)}, got {text[:40]!r}")
    return text


@dataclass(frozen=True, slots=True)
class Arrow(Command):
    """ARROW: so many pods come next, as `size` raw bytes and a newline. The bytes are one Arrow IPC stream.

    Only in an answer to PODS with `encoding=arrow`. There is at least one pod, and `size` is at most MAX_BLOCK.
    """

    NAME = "ARROW"
    SENDER = Side.SERVER
    USAGE = "tube partition/partitions pods bytes"
    tube: str
    part: Part
    pods: int
    size: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, pods, size = split_words(cls.NAME, rest, cls.USAGE, 4, 4)
        return cls(tube, Part.parse(cls.NAME, part), integer(cls.NAME, "pods", pods), integer(cls.NAME, "bytes", size))

    def arguments(self) -> str:
        return f"{self.tube} {self.part} {self.pods} {self.size}"


@dataclass(frozen=True, slots=True)
class CursorAt(Command):
    """CURSOR: ends the answer to PODS: how many pods there were (or would be) and the cursor behind the last."""

    NAME = "CURSOR"
    SENDER = Side.SERVER
    USAGE = "tube partition/partitions r.b pods"
    tube: str
    part: Part
    cursor: Cursor
    pods: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, cursor, pods = split_words(cls.NAME, rest, cls.USAGE, 4, 4)
        return cls(tube, Part.parse(cls.NAME, part), Cursor.parse(cursor), integer(cls.NAME, "pods", pods))

    def arguments(self) -> str:
        return f"{self.tube} {self.part} {self.cursor} {self.pods}"


@dataclass(frozen=True, slots=True)
class Ack(Command):
    """ACK: the downstream has these pods; they leave the tube. By `seqs`, or all of (`after`, `upto`]."""

    NAME = "ACK"
    SENDER = Side.CLIENT
    USAGE = "tube partition/partitions term seq,seq,...|upto=r.b [after=r.b]"
    tube: str
    part: Part
    term: int
    seqs: tuple[int, ...] = ()
    upto: Cursor | None = None
    after: Cursor = START

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, term, what = split_tail(cls.NAME, rest, cls.USAGE, 3)
        common = (tube, Part.parse(cls.NAME, part), integer(cls.NAME, "term", term))
        if "=" not in what:
            return cls(*common, seqs=integers(cls.NAME, "seq", what))
        options = read_options(cls.NAME, what.split(" "), {"upto": Cursor.parse, "after": Cursor.parse})
        if "upto" not in options:
            raise bad(cls.NAME, "after= goes with upto=")
        return cls(*common, **options)

    def arguments(self) -> str:
        text = f"{self.tube} {self.part} {self.term} "
        if self.upto is None:
            return text + ",".join(map(str, self.seqs))
        return text + f"upto={self.upto}" + (f" after={self.after}" if self.after != START else "")


@dataclass(frozen=True, slots=True)
class Acked(Command):
    """ACKED: how many pods an ACK removed; fewer than asked for means that some were gone already."""

    NAME = "ACKED"
    SENDER = Side.SERVER
    USAGE = "tube partition/partitions pods"
    tube: str
    part: Part
    pods: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, pods = split_words(cls.NAME, rest, cls.USAGE, 3, 3)
        return cls(tube, Part.parse(cls.NAME, part), integer(cls.NAME, "pods", pods))

    def arguments(self) -> str:
        return f"{self.tube} {self.part} {self.pods}"


@dataclass(frozen=True, slots=True)
class Park(Command):
    """PARK: an id (or, with no id, a whole pod) keeps failing: take it out of its pod and keep it with the error."""

    NAME = "PARK"
    SENDER = Side.CLIENT
    USAGE = "tube partition/partitions term seq id,id,...|* tries error text"
    tube: str
    part: Part
    term: int
    seq: int
    ids: tuple[int, ...]  # empty: the whole pod
    tries: int
    error: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, term, seq, ids, tries, error = split_tail(cls.NAME, rest, cls.USAGE, 6, unlimited=4)
        return cls(
            tube,
            Part.parse(cls.NAME, part),
            integer(cls.NAME, "term", term),
            integer(cls.NAME, "seq", seq),
            () if ids == "*" else integers(cls.NAME, "id", ids),
            small(cls.NAME, "tries", tries),
            error,
        )

    def arguments(self) -> str:
        ids = ",".join(map(str, self.ids)) or "*"
        return f"{self.tube} {self.part} {self.term} {self.seq} {ids} {self.tries} {self.error}"


@dataclass(frozen=True, slots=True)
class Parked(Command):
    """PARKED: how many ids a PARK put aside."""

    NAME = "PARKED"
    SENDER = Side.SERVER
    USAGE = "tube partition/partitions ids"
    tube: str
    part: Part
    ids: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, ids = split_words(cls.NAME, rest, cls.USAGE, 3, 3)
        return cls(tube, Part.parse(cls.NAME, part), integer(cls.NAME, "ids", ids))

    def arguments(self) -> str:
        return f"{self.tube} {self.part} {self.ids}"
