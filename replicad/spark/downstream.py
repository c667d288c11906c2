"""Notices that a checkpoint goes on with another downstream than the one that it has written to.

The checkpoint says which pods were acked, so their rows are downstream and nowhere else. If the downstream was dropped,
made again, restored or replaced, they are missing there, and nobody would know: only rows that are touched later come.
The checkpoint keeps what the downstream says of itself (`Sink.identity`), and each start compares it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from replicad.errors import EnvironmentRefused, UsageError
from replicad.eventlog import get_logger
from replicad.spark.database import forget, patiently, quote
from replicad.spark.pipeline_config import PipelineConfig
from replicad.tubes.shards import ALL_SHARDS

FILE = "replicad-downstream"  # in the folder of the checkpoint; Spark has other names

log = get_logger("replicad.spark")


def check_downstream(config: PipelineConfig) -> None:
    """Compare the downstream with that of the checkpoint, whose folder exists. `prepare` was called before.

    With `rebuild` a backfill of all rows is scheduled, and the checkpoint goes on with the new one. A checkpoint that
    does not know its downstream yet takes the present one for it.

    Raises:
        UsageError: it is another one. DatabaseError: the backfill cannot be scheduled.
    """
    file = config.checkpoint / FILE
    found, known = config.sink.identity(), _read(file)
    if known is not None and known != found:
        if not config.rebuild:
            raise UsageError(
                f"the downstream is not the one that checkpoint {config.checkpoint} has written to: it was dropped, "
                "restored or replaced, and rows that were acked before are missing in it. Start with --rebuild, which "
                "schedules a backfill of all rows; or bring the old one back"
            )
        _schedule_backfill(config)
        file.unlink()  # if there is none yet (an index without documents), a later start takes the new one
    if found is not None and found != known:
        _write(file, found)


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


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EnvironmentRefused(f"{file} cannot be read: {error.strerror}") from error


def _write(file: Path, text: str) -> None:
    new = file.with_name(f".{file.name}.new")
    try:
        new.write_text(f"{text}\n", encoding="utf-8")
        os.replace(new, file)
    except OSError as error:
        raise EnvironmentRefused(f"{file} cannot be written: {error.strerror}") from error
