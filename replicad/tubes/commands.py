"""The commands of tubes: leases of partitions, reading and acknowledging pods. protocol.md shows their use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from replicad.protocol.command import Command, command, declared_in
from replicad.protocol.fields import (
    FLAG,
    INTEGER,
    INTEGERS,
    SECONDS,
    SMALL,
    UNBOUNDED,
    Kind,
    one_of,
    option,
    optional,
    text,
    word,
)
from replicad.protocol.tokens import START, Cursor
from replicad.protocol.words import Side, bad, json_value
from replicad.tubes.keys import KEYS_OR_ALL, KINDS, Key

LINES, ARROW = "lines", "arrow"
ENCODINGS = (LINES, ARROW)  # of pods: one line each, or many in a block of Arrow IPC
MAX_BLOCK = 64 << 20  # bytes in a block, as in the longest line that clients accept
_PART = re.compile(r"[0-9]{1,5}/[0-9]{1,5}").fullmatch
MAX_KEPT = 1000  # terms in a KEEP: a few milliseconds in Postgres
LONGEST_KEEP = MAX_KEPT * 20 + 1024  # characters: terms of 19 digits, commas, and the words before
MAX_COUNTS = 4096  # characters of what a REPORT counts
MAX_TABLES = 100  # shards in a TABLES; the names and keys of their tables take some 10 kB
MAX_NOTE = 15_000  # characters of the note of an ATTEMPT: a few hundred ids, in a line of the usual length


@dataclass(frozen=True, slots=True)
class Part:
    """A partition of a tube: the shards s with `s % partitions == partition`. `0/2` on the wire."""

    partition: int
    partitions: int

    @classmethod
    @lru_cache(maxsize=1024)  # workers send the same ones again and again
    def parse(cls, command: str, text: str) -> Self:
        """Parse `partition/partitions`; partitions are numbered from 0.

        Raises:
            RemoteProtocolError: not of that form, or not 0 <= partition < partitions <= 32768.
        """
        if not _PART(text):
            raise bad(command, f"a partition is written like 0/2 (the first of two), got {text[:40]!r}")
        partition, partitions = map(int, text.split("/"))
        if not 0 <= partition < partitions <= 32768:
            raise bad(command, f"partition {text} is out of range: 0 <= partition < partitions <= 32768")
        return cls(partition, partitions)

    def covers(self, other: Part) -> bool:
        """Whether every shard of `other` belongs to this partition."""
        return other.partitions % self.partitions == 0 and other.partition % self.partitions == self.partition

    def __str__(self) -> str:
        return f"{self.partition}/{self.partitions}"


def _counts(command: str, what: str, found: str) -> str:
    if len(found) > MAX_COUNTS or not isinstance(json_value(command, found), dict):
        raise bad(command, f"{what} is a JSON object of up to {MAX_COUNTS} characters, got {found[:40]!r}")
    return found


def _note(command: str, what: str, found: str) -> str:
    if len(found) > MAX_NOTE or not isinstance(json_value(command, found), dict):
        raise bad(command, f"{what} is a JSON object of up to {MAX_NOTE} characters, got {found[:40]!r}")
    return found


def _tables(command: str, what: str, found: str) -> str:
    if not isinstance(json_value(command, found), dict):
        raise bad(command, f"{what} is a JSON object, got {found[:40]!r}")
    return found


_TABLES = Kind("json_object", _tables, longest=1 << 30)
PART = Kind("part", lambda command, _, found: Part.parse(command, found))
CURSOR = Kind("cursor", lambda _command, _, found: Cursor.parse(found))
_COUNTS = Kind("json_object", _counts, longest=1 << 30)
_NOTE = Kind("json_object", _note, longest=1 << 30)
_PARTITION = "partition/partitions"
_READY_WAITS = "ready needs wait: for how many seconds READY is wanted"


@command("TUBE", Side.BOTH, verb="list", on="tube", answer="TUBE")
class Tube(Command):
    """TUBE: a client asks for a tube; the server answers with its number of partitions.

    If the client says `made=1`, the answer has `made=us`: when the tube was made, in microseconds since 1970. Another
    time means another tube: the one before was dropped, and a cursor of it means nothing here. The answer has
    `keys=text` if the ids of the tube are texts and not numbers.
    """

    tube: str = word("tube")
    partitions: int | None = optional("partitions", INTEGER, default=None)
    made: int | None = option("us", INTEGER, default=None)
    keys: str | None = option("|".join(KINDS), one_of(*KINDS), default=None)


@command("TABLES", Side.CLIENT, verb="work", on="tube", answer="TABLED")
class TablesOf(Command):
    """TABLES: asks of which tables the ids of these shards are. At most MAX_TABLES shards."""

    tube: str = word("tube")
    shards: Sequence[int] = word("shard,shard,...", INTEGERS)


@command("TABLED", Side.SERVER, longest=UNBOUNDED)
class TablesFound(Command):
    """TABLED: a JSON object of the tables that a TABLES asked for, by shard.

    A table is an object with its name as SQL writes it (`table`), the columns of its key (`key`), and `attached`: false
    after it was detached or dropped. A shard is left out if it has no table or several tables, or if its table has a
    routing.
    """

    tube: str = word("tube")
    tables: str = text("{...}", _TABLES)


@command("CLAIM", Side.CLIENT, verb="work", on="tube", answer="LEASE")
class Claim(Command):
    """CLAIM: asks for the lease of a partition; `0/1` is the whole tube, whatever its number of partitions.

    `ttl` is how long the lease lasts when its holder sends nothing. `wait` is how long to wait while another holder has
    it; after that the answer is ERROR lease_held. `holder` is a name that survives a reconnect (default: the
    connection's name and number). With `NAME!KEY` several connections that know the key share the lease.
    `ready=1`: the answer comes at once; after lease_held READY is sent when the partition is free, within `wait`.
    `generation=1`: the answer names the generation of the tube's history.
    """

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    ttl: float | None = option("seconds", SECONDS, default=None)
    wait: float | None = option("seconds", SECONDS, default=None)
    holder: str | None = option("word", default=None)
    ready: bool = option("1", FLAG, default=False)
    generation: bool = option("1", FLAG, default=False)

    def check(self) -> None:
        """`Command.check`."""
        if self.ready and not self.wait:
            raise bad(self.NAME, _READY_WAITS)


@command("RENEW", Side.CLIENT, verb="work", on="tube", answer="LEASE")
class Renew(Command):
    """RENEW: restarts the lease's time to live. PODS, ACK and PARK do so as well."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    term: int = word("term", INTEGER)


@command("KEEP", Side.CLIENT, verb="work", on="tube", answer="KEPT", longest=LONGEST_KEEP)
class Keep(Command):
    """KEEP: RENEW for many leases of a tube at once, each by its term. KEPT lists the leases that are still held.

    At most MAX_KEPT terms.
    """

    tube: str = word("tube")
    terms: Sequence[int] = word("term,term,...", INTEGERS)


@command("KEPT", Side.SERVER, longest=LONGEST_KEEP)
class Kept(Command):
    """KEPT: the leases that a KEEP has renewed, by their terms. Leases that are not listed are lost."""

    tube: str = word("tube")
    terms: Sequence[int] = optional("term,term,...", INTEGERS, default=())


@command("RELEASE", Side.BOTH, verb="work", on="tube", answer="RELEASE")
class Release(Command):
    """RELEASE: a client gives its lease back; the server confirms it."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    term: int = word("term", INTEGER)


@command("LEASE", Side.SERVER)
class Lease(Command):
    """LEASE: the client holds the partition under `term`, until `ttl` seconds after its request.

    `generation`, if CLAIM has asked for it: cursors and seqs of another one mean nothing under this lease.
    """

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    term: int = word("term", INTEGER)
    ttl: float = word("ttl", SECONDS)
    generation: str | None = option("word", default=None)


@command("SEEN", Side.BOTH, verb="work", on="tube", answer="SEEN")
class Seen(Command):
    """SEEN: a client has passed on pods of a generation, the last of them with this seq. The answer says what is lost.

    `state`: `same`, nothing; `unknown`, history has forked, and the touches above `shared` are unknown: their changes
    are downstream, and may not be in the database. A backfill brings the downstream up to date. `scheduled`: the same,
    and the backfills are scheduled. `healed`: they are done. `since=us`: when `shared` was noted. `mended=seq`: the
    client may remember the present generation and this seq instead. Without it, ask again, also after the next fork.
    """

    tube: str = word("tube")
    generation: str = word("generation")
    seq: int = word("seq", INTEGER)
    state: str | None = optional("state", default=None)
    shared: int | None = option("seq", INTEGER, default=None)
    since: int | None = option("us", INTEGER, default=None)
    mended: int | None = option("seq", INTEGER, default=None)


@command("PODS", Side.CLIENT, verb="work", on="tube", answer="CURSOR")
class Pods(Command):
    """PODS: asks for pods under a lease that covers the partition. Answer: RDATA lines or ARROW blocks, then CURSOR.

    Without `upto`: the pods behind `after` (default: the start), regular pods by seq and then backfill pods by seq. At
    most `limit` pods, at most `backfill` backfill pods among them (0: none), and about `ids` ids (at least one pod). If
    there are none, the server waits up to `wait` seconds. With `upto`: exactly the pods of (after, upto], for a replay.
    `plan=1`: the CURSOR alone, no pods. `encoding=arrow`: blocks instead of RDATA lines, each announced by ARROW;
    `payload=1` adds the payloads, which lines always have. `ready=1`: the answer comes at once; if there are no pods,
    READY is sent when there are some, within `wait`. `early=seq,seq,...`: also pods above the tube's position, which
    CURSOR counts and does not pass, but not the pods with these seqs, which the reader has (0: none). Control pods are
    not among them.
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
    ready: bool = option("1", FLAG, default=False)
    early: Sequence[int] | None = option("seq,seq,...", INTEGERS, default=None)

    def check(self) -> None:
        """`Command.check`."""
        if self.ready and not self.wait:
            raise bad(self.NAME, _READY_WAITS)
        if self.early is not None and (self.plan or self.encoding == ARROW or self.upto is not None):
            raise bad(self.NAME, "early is for lines, and excludes plan, encoding=arrow and upto")
        if self.payload and self.encoding != ARROW:
            raise bad(self.NAME, "payload needs encoding=arrow; lines always have payloads")
        if self.plan and self.encoding is not None:
            raise bad(self.NAME, "plan and encoding exclude each other: plan asks for no pods")
        bounds = (self.limit, self.ids, self.backfill, self.wait)
        if self.upto is not None and (self.plan or any(bound is not None for bound in bounds)):
            raise bad(self.NAME, "upto names an exact range and excludes limit, ids, backfill, wait and plan")


@command("READY", Side.SERVER)
class Ready(Command):
    """READY: the last CLAIM, PODS or SHARE of this partition with `ready=1` should be sent again: it may succeed now.

    It answers no request, and may come at any time, also before the answer to the request that asked for it.
    """

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)


@command("ARROW", Side.SERVER)
class Arrow(Command):
    """ARROW: announces a block: `bytes` raw bytes, then a newline. The bytes are one Arrow IPC stream with `pods` pods.

    Only in an answer to PODS with `encoding=arrow`. There is at least one pod, and `size` is at most MAX_BLOCK.
    """

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    pods: int = word("pods", INTEGER)
    size: int = word("bytes", INTEGER)


@command("CURSOR", Side.SERVER)
class CursorAt(Command):
    """CURSOR: ends the answer to PODS: the cursor behind the last pod, and the number of pods (planned ones too)."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    cursor: Cursor = word("r.b", CURSOR)
    pods: int = word("pods", INTEGER)


@command("ACK", Side.CLIENT, verb="work", on="tube", answer="ACKED", longest=UNBOUNDED)
class Ack(Command):
    """ACK: removes pods that the downstream has from the tube: those listed, or all of (`after`, `upto`]."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    term: int = word("term", INTEGER)
    seqs: Sequence[int] = optional("seq,seq,...", INTEGERS, default=())
    upto: Cursor | None = option("r.b", CURSOR, default=None)
    after: Cursor = option("r.b", CURSOR, default=START)

    def check(self) -> None:
        """`Command.check`."""
        if bool(self.seqs) == (self.upto is not None):
            raise bad(self.NAME, "give either seqs, such as 5,6,9, or upto=r.b")
        if self.seqs and self.after != START:
            raise bad(self.NAME, "after= needs upto=")


@command("ACKED", Side.SERVER)
class Acked(Command):
    """ACKED: how many pods an ACK removed. Fewer than asked for: some were removed before."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    pods: int = word("pods", INTEGER)


@command("PARK", Side.CLIENT, verb="park", on="tube", answer="PARKED", longest=UNBOUNDED)
class Park(Command):
    """PARK: takes ids that keep failing (`*`: all ids of the pod) out of the tube and stores them with the error.

    Keys of kind text are a JSON array of strings without blanks: a blank in a key is written `\\u0020`.
    """

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    term: int = word("term", INTEGER)
    seq: int = word("seq", INTEGER)
    ids: Sequence[Key] = word('id,id,...|["key","key",...]|*', KEYS_OR_ALL)  # empty: the whole pod
    tries: int = word("tries", SMALL)
    error: str = text("error text")


@command("PARKED", Side.SERVER)
class Parked(Command):
    """PARKED: how many ids a PARK took out."""

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    ids: int = word("ids", INTEGER)


@command("ATTEMPT", Side.BOTH, verb="work", on="tube", answer="ATTEMPT")
class Attempt(Command):
    """ATTEMPT: stores what the reader of a partition is doing, a JSON object; answered by the object before.

    Without an object the stored one stays. It outlives the lease, so that a reader finds what the reader before it was
    doing when it ended. The server does not read it. An answer without an object: none was stored.
    """

    tube: str = word("tube")
    part: Part = word(_PARTITION, PART)
    term: int = word("term", INTEGER)
    note: str = text("{...}", _NOTE, empty=True, default="")


@command("SHARE", Side.BOTH, verb="work", on="tube", answer="SHARE")
class PartitionShare(Command):
    """SHARE: a worker that divides the partitions of a tube with others is alive for `ttl` seconds; its share.

    `holder`: as in CLAIM. `ttl=0`: it ends. `ready=1`: READY is sent for `0/1` when a lease of the tube is over, within
    `ttl`. The answer: the tube has so many `partitions`, this worker should hold at most `most` of them, nobody holds
    `free`, and `workers` divide them. SHARE gives no right to a partition: it is claimed as always, and given back with
    RELEASE.
    """

    tube: str = word("tube")
    ttl: float | None = option("seconds", SECONDS, default=None)
    holder: str | None = option("word", default=None)
    ready: bool = option("1", FLAG, default=False)
    partitions: int | None = option("partitions", SMALL, default=None)
    most: int | None = option("partitions", SMALL, default=None)
    free: int | None = option("partitions", SMALL, default=None)
    workers: int | None = option("workers", SMALL, default=None)


@command("REPORT", Side.BOTH, verb="report", on="tube", answer="REPORT")
class Report(Command):
    """REPORT: the counts of a reader of the tube, a JSON object, for `replicad top`.

    The server keeps the last report of each `reporter` and confirms it without the counts.
    """

    tube: str = word("tube")
    reporter: str = word("reporter")
    counts: str = text("{name: count, ...}", _COUNTS, empty=True, default="")


COMMANDS = declared_in(__name__)
