"""What a fake daemon serves: rows of streams and pods of tubes, in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from replicad.protocol.tokens import Cursor
from replicad.tubes.commands import Part
from tests import vocabulary as c

Fact = tuple[int, str, list[str]]  # token, writer, rows


@dataclass
class FakeStream:
    """What was written, in the order of its ids; every id is finished."""

    facts: list[Fact] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    joined_at: dict[str, int] = field(default_factory=dict)
    last: int = 0
    epoch: str = "a1b2c3d4"
    forks: dict[str, int] = field(default_factory=dict)  # up to where each earlier epoch is shared with this one


@dataclass
class FakeTube:
    partitions: int = 1
    pods: dict[int, dict[str, Any]] = field(default_factory=dict)
    leases: dict[Part, tuple[int, str]] = field(default_factory=dict)
    parked: list[c.Park] = field(default_factory=list)
    last: int = 0

    def within(self, part: Part, after: Cursor, upto: Cursor | None) -> list[int]:
        """Seqs of the pods of a partition in a range, regular ones first."""
        found = []
        for seq, pod in self.pods.items():
            backfill = pod["op"] == "B"
            low = after.backfill if backfill else after.regular
            high = None if upto is None else upto.backfill if backfill else upto.regular
            if pod["shard"] % part.partitions == part.partition and seq > low and (high is None or seq <= high):
                found.append((backfill, seq))
        return [seq for _, seq in sorted(found)]


class World:
    """Streams and tubes; outlives the daemons that serve it. Safe to use from any thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: dict[str, FakeStream] = {}
        self.tubes: dict[str, FakeTube] = {}
        self.terms = 0
        self.watchers: list[Callable[[], None]] = []

    def commit(self, stream: str, writer: str, *rows: str, skip: int = 1) -> int:
        """Write a fact of some rows (none: a rollback) whose id is `skip` above the last one."""
        with self.lock:
            found = self.streams[stream]
            if writer not in found.numbers:
                found.numbers[writer] = len(found.numbers) + 1
                found.joined_at[writer] = found.last
            found.last += skip
            if rows:
                found.facts.append((found.last, writer, list(rows)))
            token = found.last
        self.changed()
        return token

    def reset(self, stream: str, epoch: str) -> None:
        """As after a restore: nothing is left, ids begin anew."""
        with self.lock:
            self.streams[stream] = FakeStream(epoch=epoch)

    def fork(self, stream: str, epoch: str, shared: int) -> None:
        """As after a standby was promoted that had only the rows up to `shared`: later ids are given out again."""
        with self.lock:
            found = self.streams[stream]
            found.forks = {known: min(at, shared) for known, at in {**found.forks, found.epoch: shared}.items()}
            found.facts = [fact for fact in found.facts if fact[0] <= shared]
            found.last, found.epoch = shared, epoch
        self.changed()

    def touch(self, tube: str, *ids: int, op: str = "U", shard: int = 0, payload: Any = None) -> int:
        """Write a pod."""
        with self.lock:
            self.tubes[tube].last = seq = self.tubes[tube].last + 1
            pod = {"seq": seq, "op": op, "shard": shard, "ids": list(ids), "ts": "2026-01-01T00:00:00.000000+00:00"}
            if payload is not None:
                pod["payload"] = payload
            self.tubes[tube].pods[seq] = pod
        self.changed()
        return seq

    def changed(self) -> None:
        for watcher in list(self.watchers):
            watcher()
