"""The commands about tubes: which there are, who holds which partition, their pods, and what readers have counted.

protocol.md shows the conversation; this file says how each line of it is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from replicad.protocol.command import Command, command, declared_in
from replicad.protocol.fields import (
    FLAG,
    INTEGER,
    INTEGERS,
    INTEGERS_OR_ALL,
    SECONDS,
    SMALL,
    Kind,
    one_of,
    option,
    optional,
    text,
    word,
)
from replicad.protocol.tokens import START, Cursor
from replicad.protocol.words import Side, bad, json_value

LINES, ARROW = "lines", "arrow"
ENCODINGS = (LINES, ARROW)  # of pods: a line each, or many in a block of Arrow IPC
MAX_BLOCK = 64 << 20  # bytes in a block: the longest line that clients take holds a pod as large
_PART = re.compile(r"[0-9]{1,5}/[0-9]{1,5}").fullmatch
MAX_COUNTS = 4096  # characters of what a REPORT counts


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
        if not _PART(text):
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


def _counts(command: str, what: str, found: str) -> str:
    if len(found) > MAX_COUNTS or not isinstance(json_value(command, found), dict):
        raise bad(command, f"{what} is a JSON object of up to {MAX_COUNTS} characters, got {found[:40]!r}")
    return found


PART = Kind("part", lambda command, _, found: Part.parse(command, found))
CURSOR = Kind("cursor", lambda _command, _, found: Cursor.parse(found))
_COUNTS = Kind("json_object", _counts, longest=1 << 30)
_PARTITION = "partition/partitions"


@command("TUBE", Side.BOTH, verb="list", answer="TUBE")
class Tube(Command):
    """TUBE: from a client, asks for a tube; from the server, the number of its partitions."""

    tube: str = word("tube")
    partitions: int | None = optional("partitions", INTEGER, default=None)


@command("CLAIM", Side.CLIENT, verb="work", answer="LEASE")
class Claim(Command):
    """CLAIM: asks for the lease of a partition; `0/1` is the whole tube, whatever its number of partitions.

    `ttl` is how long the lease lasts when its holder sends nothing; `wait` how long to wait for a lease that
    another holds; `holder` an identity that survives a reconnect (default: the connection's name and number).
    Where another holds it: ERROR lease_held.
    """

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    ttl: float | None = option("seconds", SECONDS, default=None)
    wait: float | None = option("seconds", SECONDS, default=None)
    holder: str | None = option("word", default=None)


@command("RENEW", Side.CLIENT, verb="work", answer="LEASE")
class Renew(Command):
    """RENEW: the holder is alive. PODS, ACK and PARK renew as well."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    term: int = word("term", INTEGER)


@command("RELEASE", Side.BOTH, verb="work", answer="RELEASE")
class Release(Command):
    """RELEASE: the holder is done; from a client a request, from the server its confirmation."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    term: int = word("term", INTEGER)


@command("LEASE", Side.SERVER)
class Lease(Command):
    """LEASE: the holder has the partition under `term`, for `ttl` seconds since it asked."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    term: int = word("term", INTEGER)
    ttl: float = word("ttl", SECONDS)


@command("PODS", Side.CLIENT, verb="work", answer="CURSOR")
class Pods(Command):
    """PODS: asks for pods, under a lease that covers the partition: RDATA lines or ARROW blocks, and then CURSOR.

    Without `upto`: what lies behind `after` (default: the start), regular pods by seq and then backfill pods
    by seq, at most `limit` pods and `backfill` backfill pods among them (0 leaves backfill out), and about
    `ids` ids (at least one pod); with nothing there it waits up to `wait` seconds. `upto`: exactly the pods of
    (after, upto], for a replay. `plan=1`: the CURSOR alone, no rows. `encoding=arrow`: blocks, each announced by
    ARROW, instead of RDATA lines; `payload=1` has payloads in them, which lines always have.
    """

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    term: int = word("term", INTEGER)
    after: Cursor = option("r.b", CURSOR, default=START)
    upto: Cursor | None = option("r.b", CURSOR, default=None)
    limit: int | None = option("pods", SMALL, default=None)
    ids: int | None = option("ids", SMALL, default=None)
    backfill: int | None = option("pods", SMALL, default=None)
    wait: float | None = option("seconds", SECONDS, default=None)
    plan: bool = option("1", FLAG, default=False)
    encoding: str | None = option("lines|arrow", one_of(*ENCODINGS), default=None)
    payload: bool = option("1", FLAG, default=False)

    def check(self) -> None:
        """`Command.check`."""
        if self.payload and self.encoding != ARROW:
            raise bad(self.NAME, "payload goes with encoding=arrow; lines always have it")
        if self.plan and self.encoding is not None:
            raise bad(self.NAME, "plan asks for no rows, so encoding does not go with it")
        bounds = (self.limit, self.ids, self.backfill, self.wait)
        if self.upto is not None and (self.plan or any(bound is not None for bound in bounds)):
            raise bad(self.NAME, "upto names an exact range; limit, ids, backfill, wait and plan do not go with it")


@command("ARROW", Side.SERVER)
class Arrow(Command):
    """ARROW: so many pods come next, as so many raw bytes and a newline. The bytes are one Arrow IPC stream.

    Only in an answer to PODS with `encoding=arrow`. There is at least one pod, and `size` is at most MAX_BLOCK.
    """

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    pods: int = word("pods", INTEGER)
    size: int = word("bytes", INTEGER)


@command("CURSOR", Side.SERVER)
class CursorAt(Command):
    """CURSOR: ends the answer to PODS: the cursor behind the last pod, and how many there were (or would be)."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    cursor: Cursor = word("r.b", CURSOR)
    pods: int = word("pods", INTEGER)


@command("ACK", Side.CLIENT, verb="work", answer="ACKED")
class Ack(Command):
    """ACK: the downstream has these pods, and they leave the tube: either those listed, or all of (`after`, `upto`]."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    term: int = word("term", INTEGER)
    seqs: tuple[int, ...] = optional("seq,seq,...", INTEGERS, default=())
    upto: Cursor | None = option("r.b", CURSOR, default=None)
    after: Cursor = option("r.b", CURSOR, default=START)

    def check(self) -> None:
        """`Command.check`."""
        if bool(self.seqs) == (self.upto is not None):
            raise bad(self.NAME, "give either seqs, such as 5,6,9, or upto=r.b")
        if self.seqs and self.after != START:
            raise bad(self.NAME, "after= goes with upto=")


@command("ACKED", Side.SERVER)
class Acked(Command):
    """ACKED: how many pods an ACK removed; fewer than asked for means that some were removed before."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    pods: int = word("pods", INTEGER)


@command("PARK", Side.CLIENT, verb="park", answer="PARKED")
class Park(Command):
    """PARK: these ids (`*`: the whole pod) keep failing: take them out of the tube and keep them with the error."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    term: int = word("term", INTEGER)
    seq: int = word("seq", INTEGER)
    ids: tuple[int, ...] = word("id,id,...|*", INTEGERS_OR_ALL)  # empty: the whole pod
    tries: int = word("tries", SMALL)
    error: str = text("error text")


@command("PARKED", Side.SERVER)
class Parked(Command):
    """PARKED: how many ids a PARK put aside."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    ids: int = word("ids", INTEGER)


@command("REPORT", Side.BOTH, verb="report", answer="REPORT")
class Report(Command):
    """REPORT: what a reader of the tube has counted, a JSON object, for whoever watches (`replicad top`).

    `reporter` says who counts; its last report stands for it. Confirmed by the server without the counts.
    """

    tube: str = word("tube")
    reporter: str = word("reporter")
    counts: str = text("{name: count, ...}", _COUNTS, empty=True, default="")


COMMANDS = declared_in(__name__)
