"""The Spark side: the data source `replicad`, and the pipeline that stands on it.

    spark.readStream.format("replicad").option("tube", "cities").load()

The source registers itself where replicad is installed; `register(spark)` does it by hand. `pipeline.run` takes a
`PipelineConfig` from the tube to a downstream of `replicad.spark.sinks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported
from replicad.spark.session import build_session, check_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from replicad.spark.pipeline_config import PipelineConfig, load_config
    from replicad.spark.reports import BatchReport, PipelineResult

__all__ = ["BatchReport", "PipelineConfig", "PipelineResult", "build_session", "load_config", "register"]

__getattr__ = exported(
    __name__,
    {
        **dict.fromkeys(("PipelineConfig", "load_config"), "pipeline_config"),
        **dict.fromkeys(("BatchReport", "PipelineResult"), "reports"),
    },
)


def register(spark: SparkSession) -> None:
    """Make `format("replicad")` known to a session. Safe to repeat.

    Raises:
        EnvironmentRefused: PySpark is too old for it.
    """
    check_pyspark()
    from replicad.spark.source import ReplicadDataSource  # noqa: PLC0415 - needs PySpark

    spark.dataSource.register(ReplicadDataSource)
