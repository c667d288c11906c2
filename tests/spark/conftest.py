"""One Spark for all tests of this folder, with settings that make a query cost about a second;
and daemons without Postgres.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `helpers` and `fake_daemon`, in started processes too

from fake_daemon import FakeDaemon

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FAST = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.python.authenticate.socketTimeout": "120s",  # default: 15 s, too short on a busy machine
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local Spark of two cores; its logs are in a file of the run's temporary folder."""
    from replicad.spark import build_session, register

    folder = tmp_path_factory.mktemp("spark")
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    os.environ["PYTHONPATH"] = paths  # workers unpickle what tests define
    config = {**FAST, "spark.local.dir": str(folder), "spark.sql.warehouse.dir": str(folder / "warehouse")}
    session = build_session("replicad tests", master="local[2]", log_file=folder / "spark.log", config=config)
    register(session)
    yield session
    session.stop()


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    """A daemon in memory."""
    with FakeDaemon() as made:
        yield made
