"""The commands about tubes as such: which there are, who holds which partition, and what readers have counted.

`protocol.md` shows the conversation; here stands how each line of it is written. Pods have a file of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from replicad.protocol.words import (
    Command,
    Side,
    bad,
    decimal,
    integer,
    json_value,
    read_options,
    seconds,
    split_words,
)

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
        if counts and (len(counts) > MAX_COUNTS or not isinstance(json_value(cls.NAME, counts), dict)):
            raise bad(cls.NAME, f"counts are a JSON object of up to {MAX_COUNTS} characters, got {counts[:40]!r}")
        return cls(tube, reporter, counts)

    def arguments(self) -> str:
        return f"{self.tube} {self.reporter}" + (f" {self.counts}" if self.counts else "")
