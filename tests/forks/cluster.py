"""One address of a Postgres, and what may stand behind it one day: another server, an older copy, a promoted standby.

The address is a folder with a socket in it that is a symbolic link. Whoever connects follows it to the server that is
current; to switch it is one rename. Everything blocks, so tests call it in a thread.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from urllib.parse import quote

from replicad.errors import EnvironmentRefused
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.postgres.programs import find_programs
from tests.conftest import PATIENCE, psql
from tests.roles import ROLES

SMALL = {
    "fsync": "off",  # what ends here is Postgres, not the machine
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "80",
    "max_prepared_transactions": "32",
    "autovacuum": "off",
    "wal_keep_size": "64MB",
    "hot_standby_feedback": "off",
}
# The folder of the programs of another version, such as /usr/lib/postgresql/15/bin. Default: the embedded ones.
NAMED = os.environ.get("REPLICAD_FORKS_POSTGRES")
_NEWER = ("--locale-provider=", "--builtin-locale=")  # options of initdb that PostgreSQL 15 does not have
_SOCKET = ".s.PGSQL.5432"
_PROCESSES = (
    "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
    "AND (application_name LIKE '{0}%' OR backend_type = '{0}') ORDER BY random() LIMIT 1"
)
_LOOK = 0.01  # seconds between two looks at something that has no event to wait for


class NamedPostgres(EmbeddedPostgres):
    """An embedded Postgres of another version: with the `programs` of a folder, or those that the variable names."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None, programs: Path | None = None) -> None:
        self._named = programs or (Path(NAMED) if NAMED else None)
        super().__init__(folder, settings)

    @property
    def _programs(self) -> Path:
        return self._named or self._found

    @_programs.setter
    def _programs(self, found: Path) -> None:
        self._found = found

    def run_program(self, name: str, *args: str, timeout: float = 60) -> None:
        """`EmbeddedPostgres.run_program`."""
        super().run_program(
            name, *(word for word in args if not (self._named and word.startswith(_NEWER))), timeout=timeout
        )


class Cluster:
    """A Postgres at `url` whose server may be exchanged. Everything lies below `folder`.

    `template`: the folder of a stopped EmbeddedPostgres to begin with; without it the cluster is made by initdb.
    """

    def __init__(self, folder: Path, template: Path | None = None) -> None:
        self.folder = folder
        folder.chmod(0o755)
        self._numbers = count(1)
        self._address = folder / "at"
        self._address.mkdir()
        self._address.chmod(0o755)
        self._opened: list[NamedPostgres] = []
        first = folder / "s0"
        if template is not None:
            first.mkdir()
            _copy(template / "data", first / "data")
        self.server = self._open(first)
        self._point_to(self.server)

    @property
    def url(self) -> str:
        """The address, for daemons and writers."""
        return f"postgresql://postgres@/postgres?host={quote(str(self._address))}&port=5432"

    def close(self) -> None:
        """Stop every server."""
        for server in self._opened:
            _stop(server, signal.SIGQUIT)
            server.__exit__()
        self._opened.clear()

    # --- the current server ---

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """SIGQUIT is an immediate end, SIGINT a fast one with a checkpoint, SIGKILL leaves its children behind."""
        _stop(self.server, how)

    def start(self) -> None:
        """Start it. What a killed server has left behind still holds its memory for a moment, and Postgres refuses."""
        _wait(self._started, "Postgres to start")

    def _started(self) -> bool:
        try:
            self.server.ensure_running()
        except EnvironmentRefused:
            return False
        return True

    def restart(self, how: signal.Signals = signal.SIGQUIT) -> None:
        self.stop(how)
        self.start()

    def kill_a_backend(self) -> None:
        """Kill one, as the kernel does when memory runs out: Postgres ends all others, recovers and goes on."""
        victim = "SELECT pid FROM pg_stat_activity WHERE application_name = 'victim'"
        sleeps = ["-c", "SET application_name = victim", "-c", "SELECT pg_sleep(99)"]
        with subprocess.Popen(
            [find_programs() / "psql", "-Xd", self.url, *sleeps],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as session:
            _wait(lambda: psql(self.url, victim) != "", "a backend to kill")
            os.kill(int(psql(self.url, victim)), signal.SIGKILL)
            session.wait(PATIENCE)
        _wait(self.answers, "Postgres to recover")

    def answers(self) -> bool:
        """Whether the server at the address answers."""
        try:
            return psql(self.url, "SELECT 1") == "1"
        except AssertionError:
            return False

    # --- cold copies ---

    def copy(self) -> Path:
        """A copy of the data folder; the server must be stopped."""
        copy = self.folder / f"copy{next(self._numbers)}"
        _copy(self.server.data, copy)
        return copy

    def put_back(self, copy: Path) -> None:
        """Replace the data folder by a copy; the server must be stopped."""
        shutil.rmtree(self.server.data)
        _copy(copy, self.server.data)

    # --- standbys ---

    def make_standby(self) -> NamedPostgres:
        """A streaming standby of the current server that has caught up."""
        folder = self.folder / f"s{next(self._numbers)}"
        folder.mkdir()
        data = folder / "data"
        _run("pg_basebackup", "-D", str(data), "-d", self.server.url, "-R", "-c", "fast", "-X", "stream")
        for socket in data.glob(".s.PGSQL*"):
            socket.unlink()
        _give(data, like=self.server.data)
        standby = self._open(folder)
        _wait(lambda: psql(self.server.url, "SELECT count(*) FROM pg_stat_replication") != "0", "streaming")
        return standby

    def cut(self, standby: NamedPostgres) -> None:
        """End its connection to the primary: from now on it lags."""
        psql(standby.url, "ALTER SYSTEM SET primary_conninfo = ''")
        psql(standby.url, "SELECT pg_reload_conf()")
        _wait(lambda: psql(standby.url, "SELECT count(*) FROM pg_stat_wal_receiver") == "0", "receiver to end")

    def promote(self, standby: NamedPostgres, *, primary_lives_on: bool = False) -> NamedPostgres:
        """Make the standby the server at the address; returns the old primary.

        It is stopped at once, unless it lives on: then whoever is connected to it stays so.
        """
        old = self.server
        if not primary_lives_on:
            _stop(old, signal.SIGQUIT)
        psql(standby.url, f"SELECT pg_promote(true, {round(PATIENCE)})")
        self.server = standby
        self._point_to(standby)
        return old

    def switch_over(self, standby: NamedPostgres) -> NamedPostgres:
        """Stop the server in an orderly way and promote the standby, which has everything; returns the old server."""
        psql(self.server.url, "CHECKPOINT")
        old = self.server
        _stop(old, signal.SIGINT)  # its WAL is sent to the end
        return self.promote(standby) and old

    def follow(self, server: NamedPostgres) -> None:
        """Make a stopped server a standby of the current one, which has all that it has; wait until it streams."""
        with (server.data / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"primary_conninfo = '{self.server.url}'\n")
        (server.data / "standby.signal").touch()
        _give(server.data, like=self.server.data)
        server.ensure_running()
        caught_up = "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn = pg_current_wal_lsn()"
        _wait(lambda: psql(self.server.url, caught_up) == "1", "the standby to catch up")

    def move_some(self, server: NamedPostgres, *, but_readers: bool = False) -> int:
        """End about half of the daemons' sessions at a server that lives on: they come again at the address.

        `but_readers`: all of the pool that looks for positions, and none of those that read rows. Returns how many are
        left.
        """
        some = "application_name = 'replicad'" if but_readers else "random() < 0.5"
        left = (
            f"WITH all_of_them AS (SELECT {some} AND pg_terminate_backend(pid) AS ended FROM pg_stat_activity "
            "WHERE application_name LIKE 'replicad%') SELECT count(*) FROM all_of_them WHERE NOT ended"
        )
        return int(psql(server.url, left))

    def crash(self, victim: str) -> None:
        """Kill one of the server's processes, as the kernel does when memory is short: the server recovers from it.

        `victim`: the beginning of an application's name, or the type of a process of the server.
        """
        pids = psql(self.server.url, _PROCESSES.format(victim)).split()
        if not pids:
            return
        pid = self.server.pid()
        os.kill(int(pids[0]), signal.SIGKILL)
        _wait(lambda: not Path("/proc", pids[0]).exists(), "the process to end")
        assert self.server.pid() == pid, "the postmaster has ended too"
        _wait(self.answers, "Postgres to recover")

    def end(self, server: NamedPostgres) -> None:
        """Stop a server that is not current any more and remove its data."""
        _stop(server, signal.SIGQUIT)
        server.__exit__()
        self._opened.remove(server)
        shutil.rmtree(server.folder, ignore_errors=True)

    # --- dumps ---

    def dump(self, *, custom: bool = False) -> Path:
        """`pg_dump --clean` of the database."""
        file = self.folder / f"dump{next(self._numbers)}{'.custom' if custom else '.sql'}"
        form = "custom" if custom else "plain"
        _run("pg_dump", "--clean", "--if-exists", f"--format={form}", "-f", str(file), "-d", self.url)
        return file

    def restore(self, dump: Path, *, one_transaction: bool) -> None:
        """Restore a dump over the database."""
        restore_dump(self.url, dump, one_transaction=one_transaction)

    def move(self, dump: Path) -> NamedPostgres:
        """Restore a dump into a new server, which is the one at the address from then on; returns the old one."""
        fresh = self._open(self.folder / f"s{next(self._numbers)}")
        psql(fresh.url, ROLES)
        restore_dump(fresh.url, dump, one_transaction=False)
        old, self.server = self.server, fresh
        _stop(old, signal.SIGINT)
        self._point_to(fresh)
        return old

    # --- within ---

    def _open(self, folder: Path) -> NamedPostgres:
        server = NamedPostgres(folder, SMALL)
        server.__enter__()
        self._opened.append(server)
        return server

    def _point_to(self, server: NamedPostgres) -> None:
        fresh = self._address / "next"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(server.data / _SOCKET)
        fresh.rename(self._address / _SOCKET)


_PARTITIONED = "SELECT oid::regclass FROM pg_class WHERE relkind = 'p' AND NOT relispartition"
_RESTORES = 5  # in one transaction, at most, until one meets no deadlock


def restore_dump(url: str, dump: Path, *, one_transaction: bool) -> None:
    """Restore a dump over the database that it was made of; an error ends it.

    One transaction needs the locks of all tables at once, so it may meet a reader of two of them in a deadlock. It has
    changed nothing then, and is done again, as docs/restoring.md says. A dump cannot remove the indexes of
    partitions, so partitioned tables are removed before, as an operator has to.
    """
    for table in psql(url, _PARTITIONED).splitlines():
        psql(url, f"DROP TABLE {table} CASCADE")
    if dump.suffix == ".custom":
        command = ["pg_restore", "--clean", "--if-exists", "--exit-on-error", "-d", url, str(dump)]
    else:
        command = ["psql", "--no-psqlrc", "-qX", "-v", "ON_ERROR_STOP=1", "-d", url, "-f", str(dump)]
    if not one_transaction:
        _run(*command)
        return
    for attempt in range(_RESTORES):
        try:
            _run(*command, "--single-transaction")
        except AssertionError as error:
            if "deadlock detected" not in str(error) or attempt == _RESTORES - 1:
                raise
        else:
            return


def _run(name: str, *args: str) -> None:
    done = subprocess.run(
        [(Path(NAMED) if NAMED else find_programs()) / name, *args],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", "--reflink=auto", str(source), str(target)], check=True)
    (target / "postmaster.pid").unlink(missing_ok=True)
    for socket in target.glob(".s.PGSQL*"):
        socket.unlink()


def _give(folder: Path, *, like: Path) -> None:
    if os.geteuid() == 0:
        owner = like.stat()
        for path in (folder.parent, folder, *folder.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _stop(server: NamedPostgres, how: signal.Signals) -> None:
    pid = server.pid()
    if pid is None:
        return
    os.kill(pid, how)
    _wait(lambda: server.pid() is None, f"the end of Postgres after {how.name}")


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(_LOOK)
