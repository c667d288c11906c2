"""Drills for the alerts: cause each fault, wait until Prometheus raises its alert, mend it, wait until it is over.

`make drills`, or `python -m tests.drills [NAME ...]`. Uses deploy/prometheus as it is, so a scrape comes every 15 s.
Needs the program prometheus (apt install prometheus); the full disk needs root, for a small disk in memory.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

from replicad.postgres.embedded import EmbeddedPostgres
from replicad.postgres.programs import find_programs
from tests.conftest import psql, server_folder

DEPLOY = Path(__file__).parents[1] / "deploy/prometheus"
RAISED_WITHIN = 90.0  # seconds from the cause to the alert
CLEARED_WITHIN = 240.0  # to the end: an alert on what happened lately looks back two minutes
STARTS = 60.0
DISK = 400 << 20
STREAMS = ("held", "busy", "foreign_table")
TUBES = ("dead", "idle", "poison")


class NotRaised(Exception):
    """An alert did not come, or did not go, in its time."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])


@dataclass
class Daemon:
    """`replicad serve` as a process, on ports that stay the same when it is started again."""

    folder: Path
    options: list[str]
    port: int = field(default_factory=free_port)
    http: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ready = self.folder / f"ready-{self.port}"
        ready.unlink(missing_ok=True)
        listen = [f"--listen=127.0.0.1:{self.port}", f"--http=127.0.0.1:{self.http}", f"--ready-file={ready}"]
        command = [sys.executable, "-m", "replicad", "serve", *listen, *self.options]
        with (self.folder / f"serve-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_until(ready.exists, STARTS, "the daemon to be ready")

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(STARTS)
            self.process = None


@dataclass
class World:
    """What a drill works with. `url`: a superuser's; `role_url`: of `daemon`. `small` has a Postgres on `disk`."""

    url: str
    role_url: str
    server: EmbeddedPostgres
    daemon: Daemon
    small: Daemon | None
    disk: Path | None
    prometheus: int

    def sql(self, *statements: str) -> str:
        return psql(self.url, "; ".join(statements))

    def replicad(self, *words: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "replicad", *words, "--database", self.role_url],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def firing(self, alert: str, **labels: str) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.prometheus}/api/v1/alerts", timeout=10) as answer:
            alerts = json.load(answer)["data"]["alerts"]
        wanted = {"alertname": alert, **labels}.items()
        return any(one["state"] == "firing" and wanted <= one["labels"].items() for one in alerts)


Mend = Callable[[], object]


@dataclass(frozen=True)
class Drill:
    """`cause` makes a fault and returns what mends it. Those that are `alone` disturb the others."""

    name: str
    alert: str
    cause: Callable[[World], Mend]
    labels: dict[str, str] = field(default_factory=dict)
    alone: bool = False


# --- the faults ---


def open_transaction(world: World) -> Mend:
    session = subprocess.Popen(psql_command(world.url), stdin=subprocess.PIPE, text=True)
    assert session.stdin is not None
    session.stdin.write("BEGIN; INSERT INTO held (body) VALUES ('1');\n")
    session.stdin.flush()
    wait_until(lambda: world.sql("SELECT last_value FROM held_id_seq WHERE is_called") == "1", STARTS, "the insert")
    world.sql("INSERT INTO held (body) VALUES ('2')")
    return lambda: session.communicate("COMMIT;\n")


def dead_worker(world: World) -> Mend:
    worker = start_worker(world, "dead")
    world.sql("INSERT INTO dead SELECT 1")
    wait_until(lambda: worker.stdout is not None and b"took" in worker.stdout.readline(), STARTS, "the worker")
    worker.kill()
    worker.wait()
    world.sql("INSERT INTO dead SELECT 2")
    return lambda: start_worker(world, "dead")


def backfill_without_reader(world: World) -> Mend:
    world.replicad("tubes", "backfill", "idle")
    return lambda: start_worker(world, "idle")


def poison_ids(world: World) -> Mend:
    start_worker(world, "poison", "fail")
    world.sql("INSERT INTO poison SELECT 1")
    return lambda: world.replicad("tubes", "parked", "drop", "poison", "--all")


def missing_right(world: World) -> Mend:
    world.sql("REVOKE SELECT ON foreign_table FROM replicad")
    return lambda: world.sql("GRANT SELECT ON foreign_table TO replicad")


def slow_reader(world: World) -> Mend:
    link = socket.create_connection(("127.0.0.1", world.daemon.port))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.sendall(b"REPLICATE busy EARLIEST\n")
    world.sql("INSERT INTO busy (body) SELECT to_jsonb(repeat('x', 1000)) FROM generate_series(1, 100000)")
    return link.close


def full_disk(world: World) -> Mend:
    assert world.disk is not None
    filler = world.disk / "filler"
    free = os.statvfs(world.disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, int(free.f_bavail * free.f_frsize * 0.95))
    return filler.unlink


def postgres_away(world: World) -> Mend:
    pid = world.server.pid()
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    wait_until(lambda: world.server.pid() is None, STARTS, "Postgres to end")
    return world.server.ensure_running


def daemon_gone(world: World) -> Mend:
    world.daemon.end(signal.SIGKILL)
    return world.daemon.start


DRILLS = (
    Drill("open transaction", "ReplicadStreamHeldBack", open_transaction, {"stream": "held"}),
    Drill("dead worker", "ReplicadTubeWithoutWorker", dead_worker, {"tube": "dead"}),
    Drill("backfill without reader", "ReplicadBackfillWithoutReader", backfill_without_reader, {"tube": "idle"}),
    Drill("poison ids", "ReplicadTubeParked", poison_ids, {"tube": "poison"}),
    Drill("missing right", "ReplicadStreamNotServed", missing_right, {"stream": "foreign_table"}),
    Drill("slow reader cut", "ReplicadReadersCut", slow_reader, {"reason": "slow_reader"}),
    Drill("disk full", "ReplicadDiskNearlyFull", full_disk),
    Drill("Postgres away", "ReplicadDatabaseDown", postgres_away, alone=True),
    Drill("daemon gone", "ReplicadDown", daemon_gone, alone=True),
)


# --- the world ---


@contextmanager
def open_world() -> Iterator[World]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replicad-drills-")))
        server = stack.enter_context(EmbeddedPostgres(stack.enter_context(server_folder())))
        statements = (
            "CREATE ROLE replicad LOGIN",
            "GRANT CREATE ON DATABASE postgres TO replicad",
            "GRANT CREATE ON SCHEMA public TO replicad",  # where the triggers' functions of its tables are
            *(
                f"CREATE TABLE {name} (id bigserial PRIMARY KEY, body jsonb)"
                for name in ("held", "busy", "foreign_table")
            ),
            *(f"CREATE TABLE {name} (id bigint PRIMARY KEY)" for name in TUBES),
            "INSERT INTO idle SELECT generate_series(1, 1000)",
            *(f"ALTER TABLE {name} OWNER TO replicad" for name in ("held", "busy", *TUBES)),
            "GRANT SELECT ON foreign_table, foreign_table_id_seq TO replicad",
        )
        psql(server.url, "; ".join(statements))
        as_role = server.url.replace("//postgres@", "//replicad@")
        daemon = Daemon(folder, ["--database", as_role, "--stall-timeout", "5", "--journal-bytes", "4194304"])
        daemon.start()
        stack.callback(daemon.end)
        disk = stack.enter_context(small_disk()) if os.geteuid() == 0 else None
        small = None if disk is None else Daemon(folder, ["--data-folder", str(disk / "data")])
        if small is not None:
            small.start()
            stack.callback(small.end)
        scraped = [daemon.http, *([] if small is None else [small.http])]
        prometheus = stack.enter_context(open_prometheus(folder, scraped))
        world = World(server.url, as_role, server, daemon, small, disk, prometheus)
        for stream in STREAMS:
            world.replicad("streams", "add", stream, "--table", f"public.{stream}", "--id", "id", "--row", "t.body")
        for tube in TUBES:
            world.replicad("tubes", "create", tube)
            world.replicad("tubes", "attach", tube, tube, "--shard", "0")
        yield world
        for worker in WORKERS:
            worker.kill()
            worker.wait()


@contextmanager
def small_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="replicad-disk-") as folder:
        Path(folder).chmod(0o711)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=711", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@contextmanager
def open_prometheus(folder: Path, ports: list[int]) -> Iterator[int]:
    """Prometheus with the configuration that is shipped, looking at these ports; its own port."""
    settings = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    [job] = settings["scrape_configs"]
    del job["authorization"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    settings["rule_files"] = [str(DEPLOY / "replicad.rules.yml")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    port = free_port()
    options = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "tsdb"}
    options["web.listen-address"] = Path(f"127.0.0.1:{port}")
    with (folder / "prometheus.log").open("ab") as log:
        command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: answers(port), STARTS, "Prometheus to answer")
        yield port
    finally:
        process.terminate()
        process.wait()


WORKERS: list[subprocess.Popen[bytes]] = []
_WORKER = """
import sys, trio
from replicad.client.async_client import open_client
from replicad.client.worker import Worker, WorkerSettings
async def handle(batch):
    if sys.argv[3] == "fail":
        raise ValueError("this id cannot be written")
    print("took", flush=True)
settings = WorkerSettings(tries=1)
connect = lambda: open_client("127.0.0.1", int(sys.argv[1]), name="drill")
trio.run(Worker(connect, sys.argv[2], handle, settings=settings).run)
"""


def start_worker(world: World, tube: str, mode: str = "work") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _WORKER, str(world.daemon.port), tube, mode]
    with (world.daemon.folder / f"worker-{tube}.log").open("ab") as log:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    WORKERS.append(worker)
    return worker


def psql_command(url: str) -> list[str]:
    return [str(find_programs() / "psql"), "--no-psqlrc", "-qtAX", "-d", url]


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5):
            return True
    except OSError:
        return False


def wait_until(meets: Callable[[], object], seconds: float, what: str) -> float:
    """Seconds until it is so; raises NotRaised."""
    began = time.monotonic()
    while not meets():
        if time.monotonic() > began + seconds:
            raise NotRaised(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.2)
    return time.monotonic() - began


# --- the drills ---


def play(world: World, drill: Drill) -> tuple[str, str, str, str]:
    """Name, alert, and the seconds until it was raised and over, or what went wrong."""
    if drill.cause is full_disk and world.disk is None:
        return drill.name, drill.alert, "needs root", ""
    try:
        began = time.monotonic()
        mend = drill.cause(world)
        firing = partial(world.firing, drill.alert, **drill.labels)
        left = RAISED_WITHIN - (time.monotonic() - began)
        wait_until(firing, left, f"{drill.alert} to be raised")
        raised = time.monotonic() - began
        mend()
        cleared = wait_until(lambda: not firing(), CLEARED_WITHIN, f"{drill.alert} to be over")
    except (NotRaised, OSError, subprocess.CalledProcessError, AssertionError) as error:
        return drill.name, drill.alert, f"FAILED: {error}", ""
    return drill.name, drill.alert, f"{raised:.0f} s", f"{cleared:.0f} s"


def main(names: list[str]) -> int:
    wanted = [drill for drill in DRILLS if not names or drill.name in names]
    with open_world() as world, ThreadPoolExecutor(len(DRILLS)) as threads:
        time.sleep(20)  # one scrape of the quiet state: a counter rises only from a value that was seen
        found = list(threads.map(lambda drill: play(world, drill), [one for one in wanted if not one.alone]))
        found += [play(world, drill) for drill in wanted if drill.alone]
        if any("FAILED" in raised for _, _, raised, _ in found):
            for log in sorted(world.daemon.folder.glob("*.log")):
                print(f"== {log.name}", *log.read_text().splitlines()[-15:], sep="\n")
    print(f"{'fault':26}{'alert':32}{'raised after':16}over after")
    for name, alert, raised, cleared in found:
        print(f"{name:26}{alert:32}{raised:16}{cleared}")
    return int(any("FAILED" in raised for _, _, raised, _ in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
