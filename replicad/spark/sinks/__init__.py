"""Downstreams of a pipeline: they are kept in step with the rows of a tube (docs/spark.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported

if TYPE_CHECKING:
    from replicad.spark.sinks.base import Applied, BatchId, Shape, Sink
    from replicad.spark.sinks.bulk import BulkSink
    from replicad.spark.sinks.custom import CustomSink, Downstream
    from replicad.spark.sinks.delta import DeltaSink
    from replicad.spark.sinks.parquet import ParquetSink
    from replicad.spark.sinks.postgres import PostgresSink

__all__ = [
    "Applied",
    "BatchId",
    "BulkSink",
    "CustomSink",
    "DeltaSink",
    "Downstream",
    "ParquetSink",
    "PostgresSink",
    "Shape",
    "Sink",
]

__getattr__ = exported(
    __name__,
    {
        **dict.fromkeys(("Applied", "BatchId", "Shape", "Sink"), "base"),
        "BulkSink": "bulk",
        **dict.fromkeys(("CustomSink", "Downstream"), "custom"),
        "DeltaSink": "delta",
        "ParquetSink": "parquet",
        "PostgresSink": "postgres",
    },
)
