"""Notices that a checkpoint goes on with another downstream than the one that it has written to.

The checkpoint says which pods were acked, so their rows are downstream and nowhere else. If the downstream was dropped,
made again, restored or replaced, they are missing there, and nobody would know: only rows that are touched later come.
The checkpoint keeps what the downstream says of itself (`Sink.identity`), and each start compares it.
"""

from __future__ import annotations

from typing import Any

from replicad.errors import UsageError
from replicad.eventlog import get_logger
from replicad.spark.checkpoint import DOWNSTREAM, Checkpoint
from replicad.spark.database import forget, patiently, quote
from replicad.spark.pipeline_config import PipelineConfig
from replicad.tubes.shards import ALL_SHARDS

log = get_logger("replicad.spark")


def check_downstream(config: PipelineConfig, checkpoint: Checkpoint) -> None:
    """Compare the downstream with that of the checkpoint, whose folder exists. `prepare` was called before.

    With `rebuild` a backfill of all rows is scheduled, and the checkpoint goes on with the new one. A checkpoint that
    does not know its downstream yet takes the present one for it.

    Raises:
        UsageError: it is another one. DatabaseError: the backfill cannot be scheduled.
    """
    found, known = config.sink.identity(), (checkpoint.read(DOWNSTREAM) or "").strip() or None
    if known is not None and known != found:
        if not config.rebuild:
            raise UsageError(
                f"the downstream is not the one that checkpoint {config.checkpoint} has written to: it was dropped, "
                "restored or replaced, and rows that were acked before are missing in it. Start with --rebuild, which "
                "schedules a backfill of all rows; or bring the old one back"
            )
        _schedule_backfill(config)
        checkpoint.remove(
            DOWNSTREAM
        )  # if there is none yet (an index without documents), a later start takes the new one
    if found is not None and found != known:
        checkpoint.write(DOWNSTREAM, f"{found}\n")


def _schedule_backfill(config: PipelineConfig) -> None:
    call = f"SELECT {quote(config.tube_schema)}.tube_backfill_schedule($1, $2, $3::integer, $4::integer)"
    [(first, last)] = ALL_SHARDS.ranges
    shards = 0
    for url in dict.fromkeys([config.database, *(rule.database for rule in config.rules if rule.database)]):

        def work(driver: Any) -> int:
            with driver.cursor() as cursor:
                cursor.execute(call, (config.tube, config.id_column, first, last))
                return int(cursor.fetchone()[0])

        shards += patiently(url, work, patience=10)
        forget(url)
    log.warning("downstream_rebuilt", tube=config.tube, shards=shards, checkpoint=str(config.checkpoint))
