"""A sharded table with touches, for tests of the pipeline:
every change goes to Postgres first and to the daemon's tube then.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fake_daemon import FakeDaemon
from helpers import PODS, make_pods, psql

from replicad.spark.database import connection
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.sinks.base import Sink

SHARDS = (1, 2, 3)


class Cities:
    """`shard_0001.cities` and so on, attached to tube `t` of a daemon."""

    def __init__(self, url: str, daemon: FakeDaemon, partitions: int = 2) -> None:
        self.url, self.daemon = url, daemon
        daemon.make_tube("t", partitions)
        make_pods(url, 0)
        daemon.record = lambda seq: self.execute(
            f"INSERT INTO {PODS} (seq, op, shard, ids) VALUES ($1, 'T', 1, '{{}}')", seq
        )
        tables = "".join(
            f"CREATE SCHEMA shard_{shard:04d}; CREATE TABLE shard_{shard:04d}.cities "
            "(id bigint PRIMARY KEY, name text, people integer, area numeric);"
            for shard in SHARDS
        )
        psql(url, tables)

    def execute(self, sql: str, *parameters: Any) -> None:
        with connection(self.url).cursor() as cursor:
            cursor.execute(sql, parameters=parameters or None)

    def put(self, shard: int, ids: Iterable[int], people: int, op: str = "U") -> None:
        """Insert or update cities and touch them."""
        found = list(ids)
        self.execute(
            f"INSERT INTO shard_{shard:04d}.cities SELECT i, 'city ' || i, $2::int, i / 10.0 "
            "FROM unnest($1::bigint[]) i ON CONFLICT (id) DO UPDATE SET people = excluded.people",
            found,
            people,
        )
        self.daemon.touch("t", shard, found, op)

    def remove(self, shard: int, ids: Iterable[int], *, touch: bool = True) -> None:
        """Delete cities, and touch them unless the touch is to be missing."""
        found = list(ids)
        self.execute(f"DELETE FROM shard_{shard:04d}.cities WHERE id = ANY($1::bigint[])", found)
        if touch:
            self.daemon.touch("t", shard, found, "D")

    def change_at_random(self, chance: random.Random, number: int) -> None:
        """One write such as an application does."""
        shard = chance.choice(SHARDS)
        ids = chance.sample(range(1, 200), chance.randint(1, 8))
        if chance.random() < 0.25:
            self.remove(shard, ids)
        else:
            self.put(shard, ids, number, chance.choice("IUB"))

    def rows(self) -> dict[tuple[int, int], tuple[str, int]]:
        """What is there now, by shard and id."""
        found = {}
        for shard in SHARDS:
            for line in psql(self.url, f"SELECT id, name, people FROM shard_{shard:04d}.cities").splitlines():
                id_, name, people = line.split("|")
                found[shard, int(id_)] = (name, int(people))
        return found

    def config(self, sink: Sink, folder: Path, **more: Any) -> PipelineConfig:
        """A pipeline from the tube to a downstream, with its checkpoint in `folder`, or at `place`."""
        options = {"retryInterval": "20ms", "leaseTtl": "1s", "leaseWait": "20s", **more.pop("options", {})}
        return PipelineConfig(
            tube="t",
            port=self.daemon.port,
            database=self.url,
            table="shard_{shard:04d}.cities",
            sink=sink,
            checkpoint=more.pop("place", folder / "checkpoint"),
            options=options,
            **more,
        )
