"""Build a local SparkSession for a pipeline: no web page, no progress bar, UTC, this interpreter for the workers.

Under `spark-submit` what that was given counts: master, memory, addresses. For anything else make your own session and
pass it to `pipeline.run`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicad.errors import EnvironmentRefused, UsageError
from replicad.spark.java import find_java

_SUBMITTED = "PYSPARK_GATEWAY_PORT"  # in the environment of a program that spark-submit has started
_ALONE = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}  # not for a cluster
_SETTINGS = {
    **_ALONE,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    "spark.sql.streaming.minBatchesToRetain": "20",
    "spark.sql.streaming.stopTimeout": "15s",
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
}
OLDEST_PYSPARK = (4, 2)  # the first in which Python sources support limits and AvailableNow


def check_pyspark() -> None:
    """Raise EnvironmentRefused, with the command that installs PySpark, if it is missing or too old."""
    try:
        import pyspark  # noqa: PLC0415 - it may be missing
    except ImportError as error:
        raise EnvironmentRefused("PySpark is not installed; pip install 'replicad[spark]'") from error
    _check_version("PySpark", pyspark.__version__, "pip install -U pyspark")


def check_session(spark: Any) -> None:
    """Raise EnvironmentRefused if the Spark of a session is too old. On a cluster it may be another than PySpark."""
    _check_version("the Spark of this session", str(spark.version), "use a newer cluster")


def refuse_connect(spark: Any) -> None:
    """Raise UsageError for a session of Spark Connect: it runs a pipeline's batches in a process of the server."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise UsageError(
            "a pipeline cannot run in a session of Spark Connect, whose server would have to run its batches; use "
            "spark-submit, or a classic session. spark.readStream.format('replicad') can be used with Connect, if "
            "replicad is installed on the server too"
        )


def _check_version(what: str, version: str, remedy: str) -> None:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < OLDEST_PYSPARK:
        oldest = ".".join(map(str, OLDEST_PYSPARK))
        raise EnvironmentRefused(f"{what} is {version}, replicad needs {oldest} or newer; {remedy}")


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
    for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"):
        if os.environ.get(name):
            raise EnvironmentRefused(f"{name} is set, for Spark Connect, in which no pipeline can run; unset it")
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - after the check of its version
    from pyspark.sql import SparkSession  # noqa: PLC0415

    running = SparkSession.getActiveSession()
    if running is not None:
        return running
    find_java(os.environ)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers need what this interpreter has
    of_caller = {"spark.app.name": app_name, "spark.master": master, "spark.driver.memory": memory, **(config or {})}
    conf = SparkConf(loadDefaults=True).setAll([*_SETTINGS.items(), *of_caller.items()])
    if SparkContext._gateway is not None:  # a JVM of this process, which an earlier session has started
        return SparkSession(SparkContext.getOrCreate(conf))
    try:
        gateway = _launch(conf, log_file)
        if _SUBMITTED in os.environ:
            conf = _submitted(gateway, config or {})
        return SparkSession(SparkContext(conf=conf, gateway=gateway))
    except OSError as error:
        raise EnvironmentRefused(f"Spark does not start: {error}") from error
    except Exception as error:
        if type(error).__name__ != "PySparkRuntimeError":
            raise
        where = f"; see {log_file}" if log_file else ""
        raise EnvironmentRefused(f"Spark does not start: {error}{where}") from error


def _submitted(gateway: Any, config: Mapping[str, str]) -> Any:
    """The settings that spark-submit was given, ours where it was given none, and those of `config` before all."""
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415

    SparkContext._ensure_initialized(gateway=gateway)
    conf = SparkConf(loadDefaults=True, _jvm=gateway.jvm)
    for name, value in _SETTINGS.items():
        if name not in _ALONE:
            conf.setIfMissing(name, value)
    return conf.setAll(list(config.items()))


def _launch(conf: Any, log_file: Path | None) -> Any:
    """Start the JVM, or reach that of `spark-submit`.

    Ctrl-C, `timeout` and others send signals to the whole process group; a session of its own keeps them from the JVM,
    so that the batch in hand can end. The JVM ends with its stdin, even after SIGKILL of this process.
    """
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415

    if log_file is None:
        return launch_gateway(conf, popen_kwargs={"start_new_session": True})
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as out:
        return launch_gateway(conf, popen_kwargs={"start_new_session": True, "stderr": out})
