"""The Spark side: the data source `replicad`, and the pipeline that uses it.

    spark.readStream.format("replicad").option("tube", "cities").load()

PySpark finds the source where replicad is installed; `register(spark)` registers it by hand. `pipeline.run` runs the
pipeline of a `PipelineConfig`: from a tube to a downstream of `replicad.spark.sinks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported
from replicad.spark.session import build_session, check_pyspark, check_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from replicad.spark.lake import Lake
    from replicad.spark.pipeline_config import PipelineConfig
    from replicad.spark.pipeline_file import load_config
    from replicad.spark.reports import BatchReport, PipelineResult

__all__ = ["BatchReport", "Lake", "PipelineConfig", "PipelineResult", "build_session", "load_config", "register"]

__getattr__ = exported(
    __name__,
    {
        "Lake": "lake",
        "PipelineConfig": "pipeline_config",
        "load_config": "pipeline_file",
        **dict.fromkeys(("BatchReport", "PipelineResult"), "reports"),
    },
)


def register(spark: SparkSession) -> None:
    """Register `format("replicad")` in a session. Safe to repeat.

    Raises:
        EnvironmentRefused: PySpark or Spark is too old.
    """
    check_pyspark()
    check_session(spark)
    from replicad.spark.source import ReplicadDataSource  # noqa: PLC0415 - needs PySpark

    spark.dataSource.register(ReplicadDataSource)
