"""The job of the cluster: makes the tube where it is missing, asks for a backfill, and keeps a copy of the cities.

With REPLICAD_HOST, REPLICAD_PORT, DATABASE and OUT it runs anywhere else, too.
"""

from __future__ import annotations

import os
from pathlib import Path

from adbc_driver_postgresql import dbapi
from pyspark.sql import SparkSession

from replicad.spark import pipeline
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.sinks.parquet import ParquetSink

DATABASE = os.environ.get("DATABASE", "postgresql://app:app@postgres/app")
OUT = Path(os.environ.get("OUT", "/out"))
SETUP = (
    "SELECT tube.tube_ensure_exists('cities', 4)",
    "SELECT tube.tube_table_ensure_attached('cities', 'shard_0001.cities')",
    "SELECT tube.tube_table_ensure_attached('cities', 'shard_0002.cities')",
    "SELECT tube.tube_backfill_schedule('cities', 'id', 1, 2)",
)


def main() -> None:
    with dbapi.connect(DATABASE, autocommit=True) as connection, connection.cursor() as cursor:
        for statement in SETUP:
            cursor.execute(statement)
    config = PipelineConfig(
        tube="cities",
        host=os.environ.get("REPLICAD_HOST", "daemon"),
        port=int(os.environ.get("REPLICAD_PORT", "9009")),
        token=os.environ.get("REPLICAD_TOKEN", "sesame-sesame-sesame"),
        database=DATABASE,
        table="shard_{shard:04d}.cities",
        sink=ParquetSink(OUT / "cities"),
        checkpoint=OUT / "checkpoint",
        trigger=os.environ.get("TRIGGER", "1s"),
    )
    pipeline.run(config, SparkSession.builder.appName("cities").getOrCreate())


if __name__ == "__main__":
    main()
