"""Random faults for a pipeline on a cluster of Spark: `python -m tests.torture --cluster --seed 1 --schedules 5`.

A standalone master and three workers are processes of their own; the pipeline comes by spark-submit, with speculation,
dynamic allocation and small batches. Programs write to three tables. Executors, Python workers, Spark's workers, the
driver, the daemon and Postgres are killed (SIGKILL) and paused (SIGSTOP); a second driver starts while the first one is
paused (a zombie); row security hides a table; checkpoints and downstreams are put back from older copies, which the
driver must notice. Half of the schedules have a transform, whose stages shuffle and are tried again. At the end source
and downstream are equal by `replicad pipeline verify`. No touch was written twice, if nothing was put back and Postgres
did not crash: after a crash the tube's history has forked, and pods that were not acked come again. It needs Java. A
seed plays the same schedule each time, as far as processes can.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import psutil
import pyspark

from tests.conftest import PATIENCE, psql, server_folder
from tests.stress.test_pipeline_kills import AUDITED, SHARDS, TABLES, World, patiently, write

HOME = Path(pyspark.__file__).parent
WORKERS = 3
STEPS = 6  # faults of a schedule
PAUSE = (1.0, 4.0)  # seconds between two faults
PAUSED = (2.0, 7.0)  # seconds for which processes are paused; the lease lasts 3
CALM = 200.0  # seconds without any progress at the end, after which it counts as stuck
MOST_WAITING = 3000  # pods in the tube above which the programs write nothing: a busy machine must end too
MOVES = 400.0  # seconds for a driver to write a batch
LONGEST = 300.0  # seconds for a driver to notice something, or to end
WAITING = "SELECT sum(inc_count + backfill_count + control_count) FROM tube.tube_stats()"
SMALL = (0, 30, 10_000)  # ids of a small batch: none, half of them, all
PUT_BACK = "was put back|restored|later batch"  # what a driver says of a copy
FILE = """
[source]
tube = "cities"
port = {port}
leaseTtl = "3s"
leaseWait = "60s"
maxPodsPerTrigger = 300
maxBackfillPodsPerTrigger = 5
numRetries = 30
[enrich]
database = "{reader}"
table = "shard_{{shard:04d}}.cities"
[downstream]
kind = "postgres"
url = "{url}"
table = "dw.cities"
[run]
checkpoint = "checkpoint"
trigger = 0
tries = 20
"""
JOB = """
import logging
import sys
from dataclasses import replace
from pathlib import Path
from replicad.spark import load_config, pipeline
from replicad.spark.small_batches import SmallBatches
logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
logging.getLogger("replicad").setLevel(logging.INFO)
def same(rows):
    return rows.where("id > 0")
file, small, transform, rebuild = sys.argv[1:]
SmallBatches.most_ids = int(small)
config = load_config(Path(file))
config = replace(config, transform=same if transform == "yes" else None)
if rebuild:  # the URL of a role that may schedule backfills
    config = replace(config, rebuild=True, database=rebuild)
pipeline.run(config)
"""
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # JVMs that live for a minute
SETTINGS = {
    "spark.driver.extraJavaOptions": QUICK, "spark.executor.extraJavaOptions": QUICK,
    "spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false", "spark.python.authenticate.socketTimeout": "60s",
    "spark.executor.cores": "1", "spark.executor.memory": "512m", "spark.driver.memory": "512m",
    "spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "1", "spark.dynamicAllocation.maxExecutors": str(WORKERS),
    "spark.dynamicAllocation.executorIdleTimeout": "4s", "spark.speculation": "true",
    "spark.speculation.interval": "200ms", "spark.speculation.multiplier": "1.2", "spark.speculation.quantile": "0.3",
    "spark.network.timeout": "20s",
    "spark.network.timeoutInterval": "5s", "spark.executor.heartbeatInterval": "2s", "spark.task.maxFailures": "4",
    "spark.ui.enabled": "false", "spark.sql.session.timeZone": "UTC", "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2", "spark.rpc.askTimeout": "60s", "spark.log.level": "WARN",
}  # fmt: skip
READER = "".join(
    f"GRANT USAGE ON SCHEMA shard_{shard:04d} TO reader; GRANT SELECT ON shard_{shard:04d}.cities TO reader;"
    for shard in SHARDS
)
FAULTS = (
    "kill executor", "kill python_worker", "kill worker", "kill driver", "kill daemon", "kill postmaster",
    "pause executor", "pause worker", "pause daemon", "pause postgres", "zombie", "security", "old checkpoint",
    "old downstream",
)  # fmt: skip


TWICE = """
SELECT at, xid, count(*), _shard, min(_seq), max(_seq) FROM dw.audit JOIN (
  SELECT _shard, id, _seq FROM dw.audit GROUP BY _shard, id, _seq HAVING count(*) > 1) x USING (_shard, id, _seq)
GROUP BY at, xid, _shard ORDER BY xid"""


class TortureFailed(AssertionError):
    """Source and downstream are different, or a promise was broken."""


def schedule(seed: int) -> tuple[list[str], int, bool]:
    """The faults of a seed, how many ids a small batch has, and whether there is a transform."""
    chance = random.Random(seed)
    return chance.sample(FAULTS, STEPS), SMALL[seed % 3], seed % 2 == 0


class Cluster(World):
    """The processes of `World`, with a master, workers and drivers that came by spark-submit."""

    def __init__(self, folder: Path, postgres: Path, *, small: int, transform: bool) -> None:
        self.spark: dict[str, subprocess.Popen[bytes]] = {}
        self.small, self.transform, self.rebuild = small, transform, False
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.master = f"spark://127.0.0.1:{free.getsockname()[1]}"
        super().__init__(folder, postgres)
        (folder / "job.py").write_text(JOB)

    def begin(self) -> None:
        """Make the tables, and start the cluster."""
        psql(self.url, AUDITED)
        psql(
            self.url, "ALTER TABLE dw.audit ADD at timestamptz DEFAULT now(), ADD xid xid8 DEFAULT pg_current_xact_id()"
        )
        psql(self.url, f"SELECT tube.tube_ensure_exists('cities', 2); {TABLES}")
        psql(
            self.url,
            f"CREATE ROLE reader; {READER} GRANT USAGE ON SCHEMA tube TO reader; GRANT SELECT ON tube.cities TO reader",
        )
        psql(self.url, "SELECT tube.tube_backfill_schedule('cities', 'id', 0, 9)")
        reader = self.url + ("&" if "?" in self.url else "?") + "options=" + quote("-c role=reader")
        (self.folder / "cities.toml").write_text(FILE.format(port=self.port, url=self.url, reader=reader))
        self.mend_spark()

    def start_spark(self, name: str, kind: str, *words: str) -> None:
        """Start a master or a worker."""
        command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}", "--host", "127.0.0.1", *words]
        environment = {**self.environment(), "SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": QUICK}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.spark[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def environment(self) -> dict[str, str]:
        """Of Spark's programs: no settings of this machine, and our own Python."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
        return {**ours, "SPARK_HOME": str(HOME), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}

    def mend_spark(self) -> None:
        """Start the master and the workers that are not there."""
        port = self.master.rpartition(":")[2]
        if "master" not in self.spark:
            self.start_spark("master", "master.Master", "--port", port, "--webui-port", "0")
        for number in range(WORKERS):
            name = f"worker{number}"
            if name not in self.spark or self.spark[name].poll() is not None:
                work = ["--cores", "1", "--memory", "1g", "--work-dir", str(self.folder / name), "--webui-port", "0"]
                self.start_spark(name, "worker.Worker", *work, self.master)

    def start_driver(self) -> None:
        """As a user starts it."""
        given = [word for one in SETTINGS.items() for word in ("--conf", "=".join(one))]
        words = [str(self.small), "yes" if self.transform else "no", self.url if self.rebuild else ""]
        command = [str(HOME / "bin" / "spark-submit"), "--master", self.master, *given, str(self.folder / "job.py")]
        with (self.folder / "driver.log").open("ab") as log:
            self.driver = subprocess.Popen(
                [*command, str(self.folder / "cities.toml"), *words],
                stdout=log, stderr=log, env=self.environment(), start_new_session=True, cwd=self.folder,
            )  # fmt: skip

    def mend(self) -> None:
        """What a supervisor does: start again what has ended."""
        self.mend_spark()
        super().mend()

    # --- victims; executors are below Spark's workers, and the driver's own Python workers below the driver ---

    def _below(self, word: str) -> list[psutil.Process]:
        found = []
        for name, one in self.spark.items():
            if name == "master" or one.poll() is not None:
                continue
            for process in psutil.Process(one.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if word in " ".join(process.cmdline()):
                        found.append(process)
        return found

    def _worker(self) -> list[psutil.Process]:
        """A worker with all that is below it is one victim; this is its first process."""
        return [psutil.Process(one.pid) for name, one in self.spark.items() if name != "master" and one.poll() is None]

    def _postgres(self) -> list[psutil.Process]:
        found = self._postmaster()
        return [*found, *(child for one in found for child in one.children(recursive=True))]

    def victims(self, what: str, chance: random.Random) -> list[psutil.Process]:
        """The processes of one victim; waits until there is one."""
        deadline = time.monotonic() + LONGEST
        while not (found := getattr(self, f"_{what}")()):
            if time.monotonic() > deadline:
                return []  # with small batches alone an idle executor is given back, and none may be there
            self.mend()
            time.sleep(0.2)
        if what in ("driver", "postgres"):
            return list(found)
        one = chance.choice(found)
        return [one, *one.children(recursive=True)] if what == "worker" else [one]

    # --- what goes wrong ---

    def kill_one(self, what: str, chance: random.Random) -> None:
        """SIGKILL."""
        chosen = self.victims(what, chance)
        if what == "driver":
            self.driver = None
        send(chosen, signal.SIGKILL)
        psutil.wait_procs(chosen, timeout=PATIENCE)

    def pause_one(self, what: str, chance: random.Random) -> None:
        """SIGSTOP, and SIGCONT later."""
        chosen = self.victims(what, chance)
        send(chosen, signal.SIGSTOP)
        time.sleep(chance.uniform(*PAUSED))
        send(chosen, signal.SIGCONT)

    def zombie(self, chance: random.Random) -> None:
        """Pause the driver with its JVM for longer than its lease, let another one work, and let it go on."""
        chosen = self.victims("driver", chance)
        send(chosen, signal.SIGSTOP)
        self.driver = None
        self.start_driver()
        with contextlib.suppress(TortureFailed):  # it may wait for a row that the paused one has locked
            self.await_batch()
        send(chosen, signal.SIGCONT)
        time.sleep(chance.uniform(*PAUSED))
        send(chosen, signal.SIGKILL)

    def hide_rows(self, chance: random.Random) -> None:
        """Let row security hide the rows of a table for a while."""
        table = f"shard_{chance.choice(SHARDS):04d}.cities"
        patiently(lambda: psql(self.url, f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY"))
        time.sleep(chance.uniform(*PAUSED))
        patiently(lambda: psql(self.url, f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY"))

    def put_back(self, take: Callable[[], object], restore: Callable[[], object], chance: random.Random) -> None:
        """Take a copy, let batches be acked, put it back; the next driver must notice, and `rebuild` mends it."""
        self.await_batch()
        self.kill_one("driver", chance)
        take()
        self.mend()
        self.await_batch()
        self.await_batch()
        self.kill_one("driver", chance)
        restore()
        log = self.folder / "driver.log"
        at = log.stat().st_size
        self.start_driver()
        assert self.driver is not None
        try:
            status = self.driver.wait(LONGEST)
        except subprocess.TimeoutExpired:
            status = 0
        said = log.read_bytes()[at:].decode(errors="replace")
        if status == 0 or not any(text in said for text in PUT_BACK.split("|")):
            raise TortureFailed(f"the driver did not notice what was put back (status {status}): {said[-3000:]}")
        self.driver, self.rebuild = None, True
        self.start_driver()
        self.await_batch()
        self.rebuild = False
        self.kill_one("driver", chance)  # the next one has the role from which row security hides rows

    def old_checkpoint(self, chance: random.Random) -> None:
        """An older copy of the checkpoint."""
        here, copy = self.folder / "checkpoint", self.folder / "copy"

        def restore() -> None:
            shutil.rmtree(here)
            copy.rename(here)

        self.put_back(lambda: shutil.copytree(here, copy), restore, chance)

    def old_downstream(self, chance: random.Random) -> None:
        """An older copy of the tables downstream."""
        names = ("cities", "replicad_batches")
        take = "CREATE SCHEMA copy;" + "".join(f"CREATE TABLE copy.{one} AS TABLE dw.{one};" for one in names)
        restore = "BEGIN; SET LOCAL session_replication_role = replica;" + "".join(
            f"DELETE FROM dw.{one}; INSERT INTO dw.{one} SELECT * FROM copy.{one};" for one in names
        )
        self.put_back(
            lambda: patiently(lambda: psql(self.url, take)),
            lambda: patiently(lambda: psql(self.url, restore + "DROP SCHEMA copy CASCADE; COMMIT")),
            chance,
        )

    def await_batch(self) -> None:
        """Wait until the downstream has one more batch as a whole."""
        newest = "SELECT coalesce(max(at)::text, '') FROM dw.replicad_batches WHERE task = -1"
        missing = "SELECT to_regclass('dw.replicad_batches') IS NULL"

        def last() -> str:
            return "" if psql(self.url, missing) == "t" else psql(self.url, newest)

        before, deadline = patiently(last), time.monotonic() + MOVES
        while patiently(last) == before:
            if time.monotonic() > deadline:
                raise TortureFailed(f"no batch was written for {MOVES:g} s")
            self.mend()
            time.sleep(0.3)

    def close(self) -> None:
        for one in self.spark.values():
            if one.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    first = psutil.Process(one.pid)
                    send([first, *first.children(recursive=True)], signal.SIGKILL)
            one.wait()
        super().close()


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to what is still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def play(seed: int) -> None:
    """Play one schedule. Raises TortureFailed."""
    faults, small, transform = schedule(seed)
    with tempfile.TemporaryDirectory(prefix="replicad-cluster-") as name, server_folder() as postgres:
        world = Cluster(Path(name), postgres, small=small, transform=transform)
        try:
            with written(world) as counts:
                world.mend()
                world.await_batch()
                for fault in faults:
                    print(f"  {time.strftime('%H:%M:%S')} {fault}", flush=True)
                    commit(world, fault, random.Random(f"{seed} {fault}"))
                    time.sleep(random.Random(seed).uniform(*PAUSE))
                    world.mend()
            compare(world, put_back=any(fault.startswith("old") for fault in faults))
            print(f"  {dict(counts)}, drivers that ended by themselves: {world.ended}", flush=True)
        except BaseException:
            print(f"  the end of the driver's log:\n{tail(world.folder / 'driver.log')}", flush=True)
            raise
        finally:
            world.close()


def commit(world: Cluster, fault: str, chance: random.Random) -> None:
    """Let one fault happen."""
    what, _, whom = fault.partition(" ")
    if what == "kill":
        world.kill_one(whom, chance)
    elif what == "pause":
        world.pause_one(whom, chance)
    else:
        {
            "zombie": world.zombie,
            "security": world.hide_rows,
            "old checkpoint": world.old_checkpoint,
            "old downstream": world.old_downstream,
        }[fault](chance)


@contextlib.contextmanager
def written(world: Cluster) -> Iterator[Counter[str]]:
    """Programs that write meanwhile; the tables are there."""
    world.begin()
    stop, counts = Pace(world.url), Counter[str]()
    writers = [threading.Thread(target=write, args=(world.url, number, stop, counts)) for number in range(2)]
    for writer in writers:
        writer.start()
    try:
        yield counts
    finally:
        stop.set()
        for writer in writers:
            writer.join()


class Pace(threading.Event):
    """Set when the programs end. `is_set` waits while too many pods are in the tube."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._looked = 0.0
        self._full = False
        self._lock = threading.Lock()

    def is_set(self) -> bool:
        while not super().is_set():
            with self._lock:
                if time.monotonic() > self._looked + 1:
                    try:
                        self._full = int(psql(self._url, WAITING)) > MOST_WAITING
                    except AssertionError:  # Postgres is away, which the program notices itself
                        self._full = False
                    self._looked = time.monotonic()
            if not self._full:
                return False
            self.wait(0.5)
        return True


def compare(world: Cluster, *, put_back: bool) -> None:
    """Wait until everything has arrived, and compare. Ids that were parked while rows were hidden are put back."""
    deadline, fewest = time.monotonic() + CALM, float("inf")
    while True:
        patiently(lambda: psql(world.url, "SELECT tube.tube_parked_replay('cities')"))
        backfills = "SELECT count(*) FROM tube.tube_backfill WHERE NOT finished"
        waiting = int(patiently(lambda: psql(world.url, WAITING)))
        if not waiting and psql(world.url, backfills) == "0":
            break
        if waiting < fewest:
            deadline, fewest = time.monotonic() + CALM, waiting
        world.mend()
        if time.monotonic() > deadline:
            raise TortureFailed(f"it did not catch up: {waiting} pods wait, for {CALM:g} s")
        time.sleep(0.5)
    words = ["--wait", "20s", "--database", world.url]  # `reader` may read no more than the pipeline needs
    command = [sys.executable, "-m", "replicad", "pipeline", "verify", str(world.folder / "cities.toml"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path.cwd())
    if done.returncode:
        raise TortureFailed(f"source and downstream differ (status {done.returncode}): {done.stdout}{done.stderr}")
    twice, forked = psql(world.url, TWICE), psql(world.url, "SELECT count(*) > 1 FROM tube.tube_generation") == "t"
    if twice and not (put_back or forked):
        raise TortureFailed(f"touches were written twice:\n{twice}")
    print(f"  {done.stdout.strip()}", flush=True)


def tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-60:]) if log.exists() else "there is none"


def torture(seeds: range, seconds: float = float("inf")) -> list[int]:
    """Play the schedules of the seeds, and begin none after so many seconds; returns those that failed."""
    began, failed = time.monotonic(), []
    for seed in seeds:
        if time.monotonic() - began > seconds:
            break
        faults, small, transform = schedule(seed)
        print(
            f"seed {seed}: {', '.join(faults)}; small batches of {small} ids{', a transform' * transform}", flush=True
        )
        at = time.monotonic()
        try:
            play(seed)
        except Exception as error:  # noqa: BLE001 - the next seed may tell more
            failed.append(seed)
            print(f"  FAILED: {type(error).__name__}: {error}", flush=True)
        print(f"  {time.monotonic() - at:.0f} s", flush=True)
    return failed
