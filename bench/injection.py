"""A million ids into a tube: by query, by the three steps of a backfill, and by the daemon's backfiller.

Beside each the least that Postgres can do: one INSERT of the same arrays, made the same way, into a table like the
tube's. The goal is that of pg-tube: its injection of a million ids took 1.1 s on this class of machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bench.report import Figure, Spread
from bench.system import Options, System, system, wait_until

ROWS = 1_000_000
REFERENCE = 1.1  # seconds that pg-tube took for a million ids
_POLLED = 0.02  # seconds between two looks whether the backfiller is through


def run(options: Options) -> list[Figure]:
    """One figure for each way."""
    rows = options.sized(ROWS)
    with system() as ours, ours.daemon():
        ours.sql(
            "SELECT tube.tube_ensure_exists('bench')",
            "CREATE SCHEMA shard_0001",
            "CREATE TABLE shard_0001.facts (id bigserial PRIMARY KEY, body text NOT NULL)",
            f"INSERT INTO shard_0001.facts (body) SELECT md5(n::text) FROM generate_series(1, {rows}) AS n",
            "SELECT tube.tube_table_ensure_attached('bench', 'shard_0001.facts')",
            "VACUUM ANALYZE shard_0001.facts",
            "CREATE TABLE plain (LIKE tube.bench INCLUDING ALL)",
        )
        ways: dict[str, Callable[[System], None]] = {
            "tube_pods_insert": _by_query,
            "the three steps": _by_steps,
            "the daemon's backfiller": _by_backfiller,
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        plain: list[float] = []
        for _ in range(options.runs):
            plain.append(_timed(ours, _plainly, "public.plain", rows))
            for name, way in ways.items():
                took[name].append(_timed(ours, way, "tube.bench", rows))
    figures = []
    for name, seconds in took.items():
        middle = Spread.of(seconds).middle
        beside = f"plain INSERT {Spread.of(plain).middle:.2f} s"
        figures += [
            Figure(f"{rows:,} ids by {name}", f"{middle:.2f} s", beside, Spread.of_ratios(seconds, plain)),
            Figure(
                "  to pg-tube's (reference)",
                "",
                f"{REFERENCE * options.scale:.2f} s",
                Spread.of(found / (REFERENCE * options.scale) for found in seconds),
                at_most=None if way_is_paced(name) else 1.0,
            ),
        ]
    return figures


def way_is_paced(name: str) -> bool:
    """The backfiller works in transactions of its own and looks for work once a second: no goal for that."""
    return name.startswith("the daemon")


def _timed(ours: System, way: Callable[[System], None], table: str, rows: int) -> float:
    ours.sql(f"TRUNCATE {table}", "DELETE FROM tube.tube_backfill", "CHECKPOINT")
    began = time.monotonic()
    way(ours)
    took = time.monotonic() - began
    found = int(ours.sql(f"SELECT coalesce(sum(cardinality(ids)), 0) FROM {table}"))
    if found != rows:
        raise RuntimeError(f"{rows} ids should be in {table}, and {found} are")
    return took


def _plainly(ours: System) -> None:
    ours.sql(
        "INSERT INTO plain (op, shard, ids) SELECT 'B', 1, array_agg(id ORDER BY n) "
        "FROM (SELECT id, row_number() OVER (ORDER BY id) - 1 AS n FROM shard_0001.facts) AS numbered "
        "GROUP BY n / 250 ORDER BY n / 250"
    )


def _by_query(ours: System) -> None:
    ours.sql(
        "SELECT tube.tube_pods_insert('bench', "
        "'SELECT id, row_number() OVER (ORDER BY id) AS row_number FROM shard_0001.facts', 1)"
    )


def _by_steps(ours: System) -> None:
    step1 = ours.sql("SELECT tube.tube_backfill_step1()")
    ours.sql(
        "SELECT tube.tube_backfill_step2()",
        f"SELECT tube.tube_backfill_step3('{step1}', 'bench', 'shard_0001.facts', 'id')",
    )


def _by_backfiller(ours: System) -> None:
    ours.sql("SELECT tube.tube_backfill_schedule('bench', 'id', 1, 1)")
    ended = "SELECT 1 FROM tube.bench WHERE payload ->> 'type' = 'backfill_end'"
    wait_until(lambda: ours.sql(ended), "the backfiller to end")
