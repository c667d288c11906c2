"""How far behind a downstream is while a backfill runs beside live writes: measured, and plotted into lag.png.

    pip install 'replicad[embedded,spark]' matplotlib
    python lag.py --rows 500000 --seconds 30

Starts a Postgres, a daemon and a pipeline into Parquet, writes all the time, asks for a backfill of everything after a
third of the time, and draws the age of the oldest regular pod and the backfill pods that wait.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import matplotlib as mpl
from adbc_driver_postgresql import dbapi
from matplotlib import pyplot

from replicad import embedded_postgres
from replicad.spark import BatchReport, PipelineConfig, PipelineResult, pipeline
from replicad.spark.sinks import ParquetSink

WRITES = 20  # statements per second, of ten rows each
SAMPLES = 5  # per second
STATS = """
SELECT coalesce(extract(epoch FROM clock_timestamp() - min(inc_min_ts)), 0)::float8, sum(backfill_count)::bigint
FROM tube.tube_stats()"""

Sample = tuple[float, float, int]  # seconds since the start, lag in seconds, backfill pods that wait


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rows", type=int, default=200_000)
    options.add_argument("--seconds", type=float, default=20.0, help="of writing; the backfill begins after a third")
    options.add_argument("--output", type=Path, default=Path("lag.png"))
    chosen = options.parse_args()
    samples = measure(chosen.rows, chosen.seconds)
    plot(samples, chosen.output)
    worst = max(lag for _, lag, _ in samples)
    print(f"{len(samples)} samples, the lag was {worst:.2f} s at most; see {chosen.output}")


def measure(rows: int, seconds: float) -> list[Sample]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(embedded_postgres(None))
        port = serve(stack, folder, url)
        sql(url, "CREATE SCHEMA shard_1", "CREATE TABLE shard_1.items (id bigint PRIMARY KEY, value int)")
        sql(url, f"INSERT INTO shard_1.items SELECT n, 0 FROM generate_series(1, {rows}) AS n")
        sql(url, "SELECT tube.tube_ensure_exists('items', 2)")
        sql(url, "SELECT tube.tube_table_ensure_attached('items', 'shard_1.items')")
        sql(url, "UPDATE shard_1.items SET value = 1 WHERE id = 1")
        config = PipelineConfig(
            tube="items",
            port=port,
            database=url,
            table="shard_{shard}.items",
            sink=ParquetSink(folder / "downstream"),
            checkpoint=folder / "checkpoint",
            trigger=0.5,
            options={"maxBackfillPodsPerTrigger": "100"},
        )
        work = Work(url, rows, seconds)
        threads = [threading.Thread(target=job, daemon=True) for job in (work.write, work.sample)]

        def on_batch(report: BatchReport, _: PipelineResult) -> None:
            if report.number == 0:  # Spark has started; that time is nobody's lag
                for thread in threads:
                    thread.start()

        try:
            pipeline.run(config, until=lambda _: work.is_over(), on_batch=on_batch)
        finally:
            work.stopped = True
            for thread in threads:
                if thread.is_alive():
                    thread.join()
        return work.samples


class Work:
    """What goes on beside the pipeline: an application that writes, and somebody who looks at the tube."""

    def __init__(self, url: str, rows: int, seconds: float) -> None:
        self.samples: list[Sample] = []
        self.stopped = False
        self._url = url
        self._rows = rows
        self._seconds = seconds
        self._began = 0.0
        self._written = False

    def write(self) -> None:
        asked = False
        self._began = time.monotonic()
        with dbapi.connect(self._url, autocommit=True) as connection, connection.cursor() as cursor:
            while not self.stopped and self._elapsed() < self._seconds:
                ids = ",".join(str(random.randint(1, self._rows)) for _ in range(10))
                cursor.execute(f"UPDATE shard_1.items SET value = value + 1 WHERE id IN ({ids})")
                if not asked and self._elapsed() > self._seconds / 3:
                    cursor.execute("SELECT tube.tube_backfill_schedule('items', 'id', 1, 1)")
                    asked = True
                time.sleep(1 / WRITES)
        self._written = True

    def sample(self) -> None:
        while not self._began:
            time.sleep(0.01)
        with dbapi.connect(self._url, autocommit=True) as connection, connection.cursor() as cursor:
            while not self.stopped:
                cursor.execute(STATS)
                lag, backfill = cursor.fetchone()
                if lag <= self._elapsed():  # nothing is left from before the pipeline ran
                    self.samples.append((self._elapsed(), lag, backfill))
                time.sleep(1 / SAMPLES)

    def is_over(self) -> bool:
        """The writing is done, and for a while the tube has been empty."""
        latest = self.samples[-5:]
        return self._written and len(latest) == 5 and all(not lag and not backfill for _, lag, backfill in latest)

    def _elapsed(self) -> float:
        return time.monotonic() - self._began


def plot(samples: list[Sample], output: Path) -> None:
    mpl.use("Agg")  # a file, no window
    figure, above = pyplot.subplots(figsize=(9, 4))
    times = [at for at, _, _ in samples]
    above.plot(times, [lag for _, lag, _ in samples], color="tab:blue")
    above.set_xlabel("seconds")
    above.set_ylabel("lag of regular pods, seconds", color="tab:blue")
    beside = above.twinx()
    beside.fill_between(times, [backfill for _, _, backfill in samples], color="tab:orange", alpha=0.3)
    beside.set_ylabel("backfill pods that wait", color="tab:orange")
    figure.tight_layout()
    figure.savefig(output)


def sql(url: str, *statements: str) -> None:
    with dbapi.connect(url, autocommit=True) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def serve(stack: ExitStack, folder: Path, url: str) -> int:
    """The port of a daemon that ends with the example."""
    ready = folder / "ready"
    command = ["serve", "--database", url, "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
    process = subprocess.Popen([sys.executable, "-m", "replicad", *command, "--log-level", "warning"])
    stack.callback(process.wait)
    stack.callback(process.terminate)
    while not ready.exists():
        time.sleep(0.05)
    return int(ready.read_text().strip().rpartition(":")[2])


if __name__ == "__main__":
    main()
