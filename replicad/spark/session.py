"""Build a local SparkSession for a pipeline: no web page, no progress bar, UTC, this interpreter for the workers.

For a cluster make your own session (`spark-submit`) and pass it to `pipeline.run`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicad.errors import EnvironmentRefused
from replicad.spark.java import find_java

OLDEST_PYSPARK = (4, 2)  # the first in which Python sources support limits and AvailableNow


def check_pyspark() -> None:
    """Raise EnvironmentRefused, with the command that installs PySpark, if it is missing or too old."""
    try:
        import pyspark  # noqa: PLC0415 - it may be missing
    except ImportError as error:
        raise EnvironmentRefused("PySpark is not installed; pip install 'replicad[spark]'") from error
    if tuple(map(int, pyspark.__version__.split(".")[:2])) < OLDEST_PYSPARK:
        oldest = ".".join(map(str, OLDEST_PYSPARK))
        raise EnvironmentRefused(
            f"PySpark is {pyspark.__version__}, replicad needs {oldest} or newer; pip install -U pyspark"
        )


def quiet_callbacks() -> None:
    """Keep py4j from printing the whole stack of a batch that fails: the error is passed on, and told in a sentence."""
    logger = logging.getLogger("py4j.clientserver")
    if _is_news not in logger.filters:
        logger.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return "while executing the Python Proxy" not in record.getMessage()


def build_session(
    app_name: str,
    *,
    master: str = "local[*]",
    memory: str = "1g",
    log_file: Path | None = None,
    config: Mapping[str, str] | None = None,
) -> Any:
    """Start a SparkSession in this process, or return the active one.

    `log_file`: where the JVM and the Python workers write their logs, instead of this process' stderr. `config`
    overrides the settings made here.

    Raises:
        EnvironmentRefused: Java or PySpark is missing or too old, or the JVM does not start.
    """
    check_pyspark()
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - after the check of its version
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    running = SparkSession.getActiveSession()
    if running is not None:
        return running
    find_java(os.environ)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers need what this interpreter has
    settings = {
        "spark.app.name": app_name,
        "spark.master": master,
        "spark.driver.memory": memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
        "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
        "spark.sql.streaming.minBatchesToRetain": "20",
        "spark.sql.streaming.stopTimeout": "15s",
        **(config or {}),
    }
    conf = SparkConf(loadDefaults=True).setAll(list(settings.items()))
    if SparkContext._gateway is not None:  # a JVM of this process, which an earlier session has started
        return SparkSession(SparkContext.getOrCreate(conf))
    try:
        # Ctrl-C, `timeout` and others send signals to the whole process group; a session of its own keeps them from
        # the JVM, so that the batch in hand can end. The JVM ends with its stdin, even after SIGKILL of this process.
        if log_file is None:
            gateway = launch_gateway(conf, popen_kwargs={"start_new_session": True})
        else:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            with log_file.open("ab") as out:
                gateway = launch_gateway(conf, popen_kwargs={"start_new_session": True, "stderr": out})
        return SparkSession(SparkContext(conf=conf, gateway=gateway))
    except OSError as error:
        raise EnvironmentRefused(f"Spark does not start: {error}") from error
    except Exception as error:
        if type(error).__name__ != "PySparkRuntimeError":
            raise
        where = f"; see {log_file}" if log_file else ""
        raise EnvironmentRefused(f"Spark does not start: {error}{where}") from error
