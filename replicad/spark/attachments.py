"""Warns of tables that a pipeline would read and whose changes are not in its tube, or not clearly.

The pipeline needs none of it to run: what cannot be looked up is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from replicad.errors import DatabaseError
from replicad.eventlog import get_logger
from replicad.spark.database import forget, literal, patiently, quote
from replicad.spark.layouts import list_tables
from replicad.spark.pipeline_config import PipelineConfig

LOOK_EVERY = 600.0  # seconds between two looks for the tables of new shards
_MOST = 10  # shards in a warning

_ATTACHED = """
SELECT shard, pg_catalog.array_to_string(pg_catalog.array_agg(DISTINCT root::text), ', '), count(DISTINCT root),
  pg_catalog.bool_or(routing IS NOT NULL)
FROM {schema}.tube_attachment WHERE tube = {tube} GROUP BY shard ORDER BY shard"""

log = get_logger("replicad.spark")


@dataclass(slots=True)
class Attachments:
    """Looks at the tables that are attached to the tube, at the start of a run and from time to time."""

    config: PipelineConfig
    now: Callable[[], float] = time.monotonic
    _due: float = 0.0
    _warned: set[int] = field(default_factory=set)

    def look(self) -> None:
        """Warn of what is new since the last look. Does nothing if that was a short while ago."""
        if self.now() < self._due:
            return
        self._due = self.now() + LOOK_EVERY
        for attached, there in self._looked():
            self._warn_of_shared(attached)
            self._warn_of_missing(attached, there)

    def _looked(self) -> Iterator[tuple[list[tuple[Any, ...]], set[int]]]:
        """For each database: the shards that are attached, and those that have a table."""
        sql = _ATTACHED.format(schema=quote(self.config.tube_schema), tube=literal(self.config.tube))

        def work(driver: Any) -> tuple[list[tuple[Any, ...]], list[tuple[str, str, bool]]]:
            with driver.cursor() as cursor:
                cursor.execute(sql)
                return list(cursor.fetchall()), list_tables(driver)

        rules = self.config.rules
        for url in dict.fromkeys([self.config.database, *(rule.database for rule in rules if rule.database)]):
            try:
                attached, listed = patiently(url, work, patience=0)
            except DatabaseError as error:  # for example, this user may not read it
                log.debug("attachments_unknown", error=str(error))
                continue
            finally:
                forget(url)
            mine = [rule for rule in rules if (rule.database or self.config.database) == url]
            names = {full for full, _, _ in listed} | {short for _, short, visible in listed if visible}
            yield attached, {shard for rule in mine for name in names if (shard := rule.shard_of(name)) is not None}

    def _warn_of_shared(self, attached: list[tuple[Any, ...]]) -> None:
        """The tube does not say of which of several tables an id is."""
        for shard, tables, count, routed in attached:
            if count > 1 and not routed and shard not in self._warned:
                self._warned.add(shard)
                log.warning(
                    "tables_share_shard",
                    shard=shard,
                    tables=tables,
                    hint=f"an id in tube {self.config.tube} may be of each; attach each table with a shard of its own, "
                    "or let all of them have the id of one row",
                )

    def _warn_of_missing(self, attached: list[tuple[Any, ...]], there: set[int]) -> None:
        """The table of a new shard: its rows are read if they are touched, and nothing touches them."""
        if not attached or any(routed for *_, routed in attached):  # it is filled by hand, or the rows say their shards
            return
        new = sorted(there - {shard for shard, *_ in attached} - self._warned)
        self._warned.update(new)
        if new:
            log.warning(
                "shards_not_attached",
                shards=new[:_MOST],
                count=len(new),
                hint=f"changes of these tables do not come: replicad tubes attach {self.config.tube} TABLE --shards "
                "N-M, then a backfill of them",
            )
