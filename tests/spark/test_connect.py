"""The source over Spark Connect: a server of its own, and a client that has no JVM. Needs `pip install
'pyspark[connect]'`, without which it is skipped, and a minute, so that only `make stress` runs it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from conftest import FAST
from fake_daemon import FakeDaemon

pytest.importorskip("grpc", reason="needs pip install 'pyspark[connect]'")
pytest.importorskip("grpc_status", reason="needs pip install 'pyspark[connect]'")

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]

HOME = Path(pyspark.__file__).parent
START = 240.0  # seconds for a server to listen
CLIENT = """
import json, sys
from pathlib import Path
from pyspark.sql import SparkSession
from replicad.errors import UsageError
from replicad.spark import PipelineConfig, pipeline
from replicad.spark.sinks import ParquetSink

url, port, folder = sys.argv[1:]
spark = SparkSession.builder.remote(url).getOrCreate()
found = {"client": type(spark).__module__}
tube = {"port": port, "tube": "t", "retryInterval": "20ms", "leaseTtl": "2s", "leaseWait": "30s"}
found["batch"] = spark.read.format("replicad").options(**tube).load().count()
spark.sql(f"CREATE TEMPORARY VIEW pods USING replicad OPTIONS (tube 't', port '{port}', leaseWait '30s')")
found["sql"] = spark.sql("SELECT sum(size(ids)) FROM pods").first()[0]

def ended(query):
    query.awaitTermination(200)
    assert query.exception() is None, query.exception()

def start(name, writer):
    return writer.option("checkpointLocation", f"{folder}/{name}").trigger(availableNow=True).start()

frame = spark.readStream.format("replicad").options(**tube, maxPodsPerTrigger="8").load()
ended(start("tube", frame.writeStream.format("memory").queryName("memory")))
found["stream"] = sorted(row[0] for row in spark.sql("SELECT explode(ids) FROM memory").collect())
events = spark.readStream.format("replicad").option("port", port).option("stream", "events")
events = events.option("startingOffsets", "earliest").load()
ended(start("events", events.writeStream.format("parquet").option("path", f"{folder}/rows")))
found["rows"] = spark.read.parquet(f"{folder}/rows").count()
print(json.dumps(found), flush=True)
sys.stdin.readline()  # there is more in the tube now

def write(frame, number):
    ids = sorted(row[0] for row in frame.selectExpr("explode(ids)").collect())
    with open(f"{folder}/batches", "a") as file:
        file.write(json.dumps(ids) + chr(10))

ended(start("each", spark.readStream.format("replicad").options(**tube).load().writeStream.foreachBatch(write)))
found = {"each": [json.loads(line) for line in Path(f"{folder}/batches").read_text().splitlines()]}
place = Path(folder)
config = PipelineConfig("t", "postgresql:///x", "public.t", ParquetSink(place / "lake"), place / "checkpoint")
try:
    pipeline.run(config, spark)
except UsageError as error:
    found["pipeline"] = str(error)
print(json.dumps(found), flush=True)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of a server of Spark Connect."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {
        **FAST, "spark.connect.grpc.binding.port": str(port), "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.ui.enabled": "false", "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }  # fmt: skip
    settings = [word for one in given.items() for word in ("--conf", "=".join(one))]
    command = [str(HOME / "bin" / "spark-submit"), "--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    ours = {"SPARK_HOME": str(HOME), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    with (tmp_path / "server.log").open("wb") as log:
        started = subprocess.Popen(
            [*command, "--master", "local[2]", *settings],
            env={**os.environ, **ours}, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert started.poll() is None, (tmp_path / "server.log").read_text()[-3000:]
                assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()[-3000:]
                time.sleep(0.2)
        yield f"sc://127.0.0.1:{port}"
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def test_a_client_of_connect_reads_tubes_and_streams_and_is_refused_a_pipeline(
    server: str, daemon: FakeDaemon, tmp_path: Path
) -> None:
    tube = daemon.make_tube("t", 2)
    for number in range(20):
        daemon.touch("t", number, [number, number + 100])
        daemon.append("events", "main", {"n": number})
    command = [sys.executable, "-c", CLIENT, server, str(daemon.port), str(tmp_path)]
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}

    def said(line: str) -> Any:
        assert line, (tmp_path / "client.log").read_text()[-3000:]
        return json.loads(line)

    with (
        (tmp_path / "client.log").open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as client,
    ):
        assert client.stdin is not None
        assert client.stdout is not None
        expected = sorted([*range(20), *range(100, 120)])
        assert said(client.stdout.readline()) == {
            "client": "pyspark.sql.connect.session", "batch": 20, "sql": 40, "stream": expected, "rows": 20
        }  # fmt: skip
        assert tube.pods == {}, "the server acks, for the commit log of its query"
        daemon.touch("t", 1, [1000])
        client.stdin.write("\n")
        client.stdin.flush()
        found = said(client.stdout.readline())
        assert found["each"] == [[1000]]
        assert found["pipeline"].startswith("a pipeline cannot run in a session of Spark Connect")
        assert tube.pods == {}
