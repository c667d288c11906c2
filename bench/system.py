"""What is measured: the real daemon, a process of its own, on an embedded Postgres in a folder that goes afterwards.

Also the programs around it: psql and pgbench from the same package, and processes that end with the benchmark.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from replicad.postgres.embedded import embedded_postgres
from replicad.postgres.programs import find_programs

START = 60.0  # seconds for a process to listen; the machine may be busy
STREAM = "bench"
MARK = b"~"  # stands in every row that readers count, once, and in nothing else on any of the wires
BODY = """format('["$%s~:example.com","!room:example.com","m.room.msg"]', lpad(n::text, 14, '0'))::json"""


@dataclass(frozen=True, slots=True)
class Options:
    """How much to do: `scale` multiplies the sizes, `runs` is how often what is compared is repeated. `only`: texts in
    the names of what is measured, where a benchmark has several attackers; none: everything.
    """

    scale: float = 1.0
    runs: int = 3
    only: tuple[str, ...] = ()

    def picks(self, name: str) -> bool:
        """Whether something of that name is measured."""
        return not self.only or any(text in name for text in self.only)

    def sized(self, full: int) -> int:
        """A number of rows or the like, at this scale."""
        return max(1, int(full * self.scale))


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running `replicad serve`. `http`: its port for HTTP, 0 for none."""

    host: str
    port: int
    process: psutil.Process
    log: Path
    http: int = 0

    def memory(self) -> int:
        """Resident bytes."""
        return int(self.process.memory_info().rss)

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        return cpu(self.process)


@dataclass(frozen=True, slots=True)
class System:
    """A Postgres, and what can be started on it."""

    url: str
    folder: Path

    def psql(self, *arguments: str) -> list[str]:
        """The command that runs psql on this Postgres."""
        return [
            str(find_programs() / "psql"),
            "--no-psqlrc",
            "-qtAX",
            "-v",
            "ON_ERROR_STOP=1",
            "-d",
            self.url,
            *arguments,
        ]

    def sql(self, *statements: str) -> str:
        """Run statements, each in a transaction of its own; what they print."""
        commands = [word for statement in statements for word in ("-c", statement)]
        done = subprocess.run(self.psql(*commands), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"psql failed: {done.stderr.strip()}")
        return done.stdout.strip()

    def pgbench(self, script: str, *arguments: str, clients: int) -> list[str]:
        """The command that runs a script for pgbench from so many clients."""
        file = self.folder / f"{abs(hash(script)):x}.sql"
        file.write_text(script, encoding="utf-8")
        threads = str(min(clients, 2))
        return [
            str(find_programs() / "pgbench"), "-n", "-f", str(file), "-c", str(clients), "-j", threads, *arguments,
            self.url,
        ]  # fmt: skip

    def transactions_per_second(self, script: str, seconds: float, *arguments: str, clients: int) -> float:
        """What pgbench reaches."""
        command = self.pgbench(script, "-T", str(max(1, round(seconds))), *arguments, clients=clients)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(done.stdout.rpartition("tps = ")[2].split()[0])

    def replicad(self, *arguments: str) -> None:
        """Run a command of replicad's on this Postgres."""
        command = [sys.executable, "-m", "replicad", *arguments, "--database", self.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
        if done.returncode:
            raise RuntimeError(f"replicad {' '.join(arguments)}: {done.stderr.strip()}")

    def install(self) -> None:
        """Install our schema, for what is measured without a daemon, or before one is started."""
        command = [sys.executable, "-m", "replicad", "sql", "up", "stream", "tube"]
        script = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment()).stdout
        subprocess.run(self.psql("-f", "-"), input=script, text=True, check=True)

    def cpu(self) -> dict[int, float]:
        """Seconds of processor time that each of Postgres' present processes has taken so far."""
        return {backend.pid: cpu(backend) for backend in self._postmaster().children()}

    def serving(self) -> list[psutil.Process]:
        """Postgres' processes that serve daemons."""
        pids = self.sql("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'replicad%'")
        return [psutil.Process(int(pid)) for pid in pids.split()]

    def _postmaster(self) -> psutil.Process:
        return psutil.Process(
            int((self.folder / "postgres" / "data" / "postmaster.pid").read_text(encoding="ascii").split()[0])
        )

    def cpu_of_ended(self) -> float:
        """Seconds of processor time that Postgres' processes took which have ended: each connection has one.

        Waits until no connection but those of daemons is left: a process counts when the postmaster has seen its end,
        some time after its client has gone. A daemon may connect anew meanwhile, so its connections are asked for
        whenever others seem to be left.
        """
        postmaster = self._postmaster()
        kept: set[int] = set()
        left: list[str] = []

        def ended() -> bool:
            nonlocal kept
            left.clear()
            clients = [one for one in postmaster.children() if _serves_client(one)]
            if any(one.pid not in kept for one in clients):
                kept = {one.pid for one in self.serving()}
                left.extend(_title(one) for one in clients if one.pid not in kept and _serves_client(one))
            return not left

        try:
            wait_until(ended, "Postgres' connections to end")
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {'; '.join(left)}") from None
        times = postmaster.cpu_times()
        return float(times.children_user + times.children_system)

    def cpu_since(self, before: dict[int, float]) -> float:
        """What those that were there before, and still are, have taken since."""
        now = self.cpu()
        return sum(now[pid] - before[pid] for pid in now.keys() & before.keys())

    @contextmanager
    def daemon(self, *options: str) -> Iterator[Daemon]:
        """Run `replicad serve` with these options on a free port. Its log is empty but for warnings, unless asked."""
        place = Path(tempfile.mkdtemp(prefix="daemon-", dir=self.folder))
        ready, log = place / "ready", place / "daemon.log"
        command = [
            sys.executable, "-m", "replicad", "serve", "--listen", "127.0.0.1:0", "--ready-file", str(ready),
            "--database", self.url, "--log-level", "warning", *options,
        ]  # fmt: skip
        # PYTHONMALLOC as in deploy/
        with log.open("ab") as output, process(command, output=output, PYTHONMALLOC="malloc") as started:
            wait_until(ready.exists, "the daemon to listen", started)
            host, _, port = ready.read_text(encoding="utf-8").strip().rpartition(":")
            yield Daemon(host, int(port), psutil.Process(started.pid), log)

    def make_stream(self) -> None:
        """A table `bench` with rows that make lines of about 88 bytes, which is the stream `bench`."""
        self.install()
        self.sql(
            f"CREATE TABLE {STREAM} (id bigserial PRIMARY KEY, body json NOT NULL) WITH (autovacuum_enabled = false)"
        )
        self.replicad("streams", "add", STREAM, "--table", f"public.{STREAM}", "--id", "id", "--row", "t.body")

    def commit_rows(self, rows: int) -> None:
        """Add so many rows to the stream in one transaction."""
        self.sql(f"INSERT INTO {STREAM} (body) SELECT {BODY} FROM generate_series(1, {rows}) AS n")


@contextmanager
def system() -> Iterator[System]:
    """A fresh Postgres with the settings that replicad gives its own; it and its folder are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="replicad-bench-") as name:
        Path(name).chmod(0o711)  # the server of root has an account of its own, which passes through
        with embedded_postgres(Path(name) / "postgres") as url:
            yield System(url, Path(name))


@contextmanager
def process(
    command: Sequence[str], output: object = subprocess.DEVNULL, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended at the end of the block. `variables` are added to its environment."""
    started = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=_environment() | variables,
        start_new_session=True,
    )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(timeout=10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def _serves_client(backend: psutil.Process) -> bool:
    """Whether a child of the postmaster belongs to a connection, or is one that has just ended."""
    try:
        return "[local]" in " ".join(backend.cmdline())
    except psutil.ZombieProcess:
        return True
    except psutil.NoSuchProcess:
        return False


def _title(backend: psutil.Process) -> str:
    """What a child of the postmaster says that it is doing."""
    try:
        return f"{backend.pid} {backend.status()} {' '.join(backend.cmdline())}"
    except psutil.Error:
        return f"{backend.pid} has ended"


def cpu(server: psutil.Process) -> float:
    """Seconds of processor time that a process has taken so far; 0 for one that has ended."""
    try:
        times = server.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def cpu_of_all(first: psutil.Process) -> float:
    """Seconds of processor time of a process and of all below it, so far; also of those that have ended in order."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        for one in (first, *first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


def connect(host: str, port: int, hello: bytes = b"") -> socket.socket:
    """A TCP connection on which something has been said."""
    link = socket.create_connection((host, port), timeout=START)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(hello)
    return link


def wait_until(
    condition: object, what: str, started: subprocess.Popen[bytes] | None = None, seconds: float = START
) -> None:
    """Look again and again until `condition()` holds, for at most so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or (started is not None and started.poll() is not None):
            raise RuntimeError(f"waited in vain for {what}")
        time.sleep(0.02)


def listens(host: str, port: int) -> bool:
    """Whether somebody accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate for localhost."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
        "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


def free_port() -> int:
    """A port of the loopback that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def allow_files(wanted: int) -> int:
    """Raise this process's limit of open files, which its children inherit; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = max(soft, min(wanted, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("REPLICAD_")}
