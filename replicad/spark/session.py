"""Build a local SparkSession for a pipeline: no web page, no progress bar, UTC, this interpreter for the workers.

Under `spark-submit` its options count: master, memory, addresses. For anything else make your own session and
pass it to `pipeline.run`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replicad.errors import EnvironmentRefused, UsageError
from replicad.spark.checkpoint import local_path

OLDEST_JAVA = 17  # required by Spark 4
_TIMEOUT = 20  # seconds for `java -version`, which is slow from a cold disk
_REMEDY = (
    "install one (Debian and Ubuntu: `apt install openjdk-17-jre-headless`; macOS: `brew install openjdk@17`) "
    "or set JAVA_HOME to one"
)


def find_java(environ: Mapping[str, str]) -> Path:
    """The `java` that Spark will start: JAVA_HOME's, else the first on PATH.

    Raises:
        EnvironmentRefused: there is none, it does not run, or it is older than 17.
    """
    home = environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        if not java.exists():
            raise EnvironmentRefused(f"JAVA_HOME is {home}, but there is no bin/java in it; {_REMEDY}")
    else:
        found = shutil.which("java", path=environ.get("PATH"))
        if found is None:
            raise EnvironmentRefused(f"Spark needs Java {OLDEST_JAVA} or newer and there is no java on PATH; {_REMEDY}")
        java = Path(found)
    version = _version_of(java)
    if version < OLDEST_JAVA:
        raise EnvironmentRefused(f"{java} is Java {version}, Spark needs {OLDEST_JAVA} or newer; {_REMEDY}")
    return java


def _version_of(java: Path) -> int:
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentRefused(f"{java} cannot be run ({error}); {_REMEDY}") from error
    version = parse_version(done.stderr + done.stdout)
    if done.returncode or version is None:
        output = (done.stderr or done.stdout).strip().partition("\n")[0][:200]
        raise EnvironmentRefused(f"`{java} -version` failed: {output or f'exit status {done.returncode}'}; {_REMEDY}")
    return version


def parse_version(text: str) -> int | None:
    """The major version in the output of `java -version` (17 of `"17.0.15"`, 8 of `"1.8.0_402"`), or None."""
    found = re.search(r'version "(?:1\.)?([0-9]+)', text)
    return int(found[1]) if found else None


_SUBMITTED = "PYSPARK_GATEWAY_PORT"  # in the environment of a program that spark-submit has started
_ALONE = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}  # not for a cluster
_SETTINGS = {
    **_ALONE,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(64 << 20),  # whichever is less
    "spark.sql.streaming.minBatchesToRetain": "20",
    "spark.sql.streaming.stopTimeout": "15s",
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
}
_LOCAL_CHECKPOINT = {
    # Spark's default runs `chmod` and `readlink` for each file that it makes there, several times as long as this
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing."
    "FileSystemBasedCheckpointFileManager",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",  # Hadoop keeps a checksum of each file there too
}
# A run that ends by itself mostly ends before the optimising compiler of the JVM has paid for itself: a session and its
# first job took 27 seconds of processor time without it and 39 with it.
_SHORT_RUN = {"spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1"}
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
    """Keep py4j from printing the whole stack of a batch that fails: the error is passed on, and reported in a
    sentence.
    """
    logger = logging.getLogger("py4j.clientserver")
    if _is_news not in logger.filters:
        logger.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return "while executing the Python Proxy" not in record.getMessage()


def settings_of(checkpoint: Path | str, *, short: bool = False) -> Mapping[str, str]:
    """Settings of a session for the checkpoint of its pipelines: files of this machine are made in a quicker way.

    Not for a URI: on HDFS Spark's default refuses a file that another driver has made, in one step. `short`: the
    pipelines end by themselves, so the JVM compiles quickly and not well.
    """
    found = _LOCAL_CHECKPOINT if local_path(str(checkpoint)) is not None else {}
    return {**found, **_SHORT_RUN} if short else found


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
        with _own_interrupts():
            return SparkSession(SparkContext.getOrCreate(conf))
    try:
        gateway = _launch(conf, log_file)
        if _SUBMITTED in os.environ:
            conf = _submitted(gateway, config or {})
        with _own_interrupts():
            return SparkSession(SparkContext(conf=conf, gateway=gateway))
    except OSError as error:
        raise EnvironmentRefused(f"Spark does not start: {error}") from error
    except Exception as error:
        if type(error).__name__ != "PySparkRuntimeError":
            raise
        where = f"; see {log_file}" if log_file else ""
        raise EnvironmentRefused(f"Spark does not start: {error}{where}") from error


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Keep the program's own handler of Ctrl-C, if it has one: PySpark puts one in its place that ends the batch in
    hand and the program.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        own = handler not in (signal.default_int_handler, None)
        if own and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


def _submitted(gateway: Any, config: Mapping[str, str]) -> Any:
    """The settings of spark-submit, ours where it has none, and the settings of `config` before all."""
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
