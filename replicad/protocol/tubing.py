"""The commands of the conversation about tubes: claim a partition, read its pods, ack them, let go.

`protocol.md` shows the conversation; here stands how each line of it is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from replicad.protocol.tokens import START, Cursor
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
    split_tail,
    split_words,
)

LINES, ARROW = "lines", "arrow"
ENCODINGS = (LINES, ARROW)  # of pods: a line each, or many in a block of Arrow IPC
MAX_COUNTS = 4096  # characters of what a REPORT counts
MAX_BLOCK = 64 << 20  # bytes in a block: the longest line that clients take holds a pod as large


@dataclass(frozen=True, slots=True)
class Part:
    """A partition of a tube: the shards s with `s % partitions == partition`. `0/2` on the wire."""

    partition: int
    partitions: int

    @classmethod
    def parse(cls, command: str, text: str) -> Self:
        """Read `partition/partitions`, the first counted from 0.

        Raises:
            RemoteProtocolError: not of that form, or outside of 0 <= partition < partitions <= 32768.
        """
        if not re.fullmatch(r"[0-9]{1,5}/[0-9]{1,5}", text):
            raise bad(command, f"a partition is written like 0/2 (the first of two), got {text[:40]!r}")
        partition, partitions = map(int, text.split("/"))
        if not 0 <= partition < partitions <= 32768:
            raise bad(command, f"partition {text} is out of range: 0 <= partition < partitions <= 32768")
        return cls(partition, partitions)

    def covers(self, other: Part) -> bool:
        """Whether every shard of `other` is one of ours."""
        return other.partitions % self.partitions == 0 and other.partition % self.partitions == self.partition

    def __str__(self) -> str:
        return f"{self.partition}/{self.partitions}"


@dataclass(frozen=True, slots=True)
class Tube(Command):
    """TUBE: from a client, asks for a tube (`TUBE name`); from the server, `TUBE name partitions`."""

    NAME = "TUBE"
    SENDER = Side.BOTH
    USAGE = "tube [partitions]"
    tube: str
    partitions: int | None = None

    @classmethod
    def parse(cls, rest: str) -> Self:
        words = split_words(cls.NAME, rest, cls.USAGE, 1, 2)
        return cls(words[0], integer(cls.NAME, "partitions", words[1]) if len(words) == 2 else None)

    def arguments(self) -> str:
        return self.tube if self.partitions is None else f"{self.tube} {self.partitions}"


@dataclass(frozen=True, slots=True)
class Claim(Command):
    """CLAIM: asks for the lease of a partition. `0/1` is the whole tube, whatever its number of partitions.

    `ttl` is how long the lease lasts without a word from its holder; `wait` how long to wait for one that
    another holds; `holder` an identity that survives a reconnect (default: the connection's name and number).
    Answered by LEASE, or ERROR lease_held.
    """

    NAME = "CLAIM"
    SENDER = Side.CLIENT
    USAGE = "tube partition/partitions [ttl=seconds] [wait=seconds] [holder=word]"
    tube: str
    part: Part
    ttl: float | None = None
    wait: float | None = None
    holder: str | None = None

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, *more = split_words(cls.NAME, rest, cls.USAGE, 2, 5)
        options = read_options(
            cls.NAME,
            more,
            {
                "ttl": lambda text: seconds(cls.NAME, "ttl", text),
                "wait": lambda text: seconds(cls.NAME, "wait", text),
                "holder": str,
            },
        )
        return cls(tube, Part.parse(cls.NAME, part), **options)

    def arguments(self) -> str:
        text = f"{self.tube} {self.part}"
        if self.ttl is not None:
            text += f" ttl={decimal(self.ttl)}"
        if self.wait is not None:
            text += f" wait={decimal(self.wait)}"
        if self.holder is not None:
            text += f" holder={self.holder}"
        return text


@dataclass(frozen=True, slots=True)
class _Leased(Command):
    """Common to what names a lease: tube, partition, term."""

    tube: str
    part: Part
    term: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, term = split_words(cls.NAME, rest, cls.USAGE, 3, 3)
        return cls(tube, Part.parse(cls.NAME, part), integer(cls.NAME, "term", term))

    def arguments(self) -> str:
        return f"{self.tube} {self.part} {self.term}"


@dataclass(frozen=True, slots=True)
class Renew(_Leased):
    """RENEW: the holder is alive. Every PODS, PLAN and ACK renews as well. Answered by LEASE."""

    NAME = "RENEW"
    SENDER = Side.CLIENT
    USAGE = "tube partition/partitions term"


@dataclass(frozen=True, slots=True)
class Release(_Leased):
    """RELEASE: the holder is done; from a client a request, from the server its confirmation."""

    NAME = "RELEASE"
    SENDER = Side.BOTH
    USAGE = "tube partition/partitions term"


@dataclass(frozen=True, slots=True)
class Lease(Command):
    """LEASE: the holder has the partition under `term`, for `ttl` seconds since it asked."""

    NAME = "LEASE"
    SENDER = Side.SERVER
    USAGE = "tube partition/partitions term ttl"
    tube: str
    part: Part
    term: int
    ttl: float

    @classmethod
    def parse(cls, rest: str) -> Self:
        tube, part, term, ttl = split_words(cls.NAME, rest, cls.USAGE, 4, 4)
        return cls(tube, Part.parse(cls.NAME, part), integer(cls.NAME, "term", term), seconds(cls.NAME, "ttl", ttl))

    def arguments(self) -> str:
        return f"{self.tube} {self.part} {self.term} {decimal(self.ttl)}"


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
                value = integer(cls.NAME, what, text)
                if value < 0:
                    raise bad(cls.NAME, f"{what} must not be negative")
                return value

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
            integer(cls.NAME, "tries", tries),
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


@dataclass(frozen=True, slots=True)
class Report(Command):
    """REPORT: what a reader of the tube has counted, a JSON object, for whoever watches (`replicad top`).

    `reporter` says who counts; its last report stands for it. Confirmed by the server without the counts.
    """

    NAME = "REPORT"
    SENDER = Side.BOTH
    USAGE = "tube reporter [json_object]"
    tube: str
    reporter: str
    counts: str = ""

    @classmethod
    def parse(cls, rest: str) -> Self:
        words = rest.strip(" ").split(" ", 2)
        tube, reporter = split_words(cls.NAME, " ".join(words[:2]), cls.USAGE, 2, 2)
        counts = words[2].strip(" ") if len(words) == 3 else ""
        if counts and (len(counts) > MAX_COUNTS or not _is_object(counts)):
            raise bad(cls.NAME, f"counts are a JSON object of up to {MAX_COUNTS} characters, got {counts[:40]!r}")
        return cls(tube, reporter, counts)

    def arguments(self) -> str:
        return f"{self.tube} {self.reporter}" + (f" {self.counts}" if self.counts else "")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
