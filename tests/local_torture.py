"""Random schedules for local pipelines: the process is killed and paused, a downstream fails, tables get columns.

    python -m tests.local_torture --server postgresql://postgres@127.0.0.1:5432/postgres --seed 1 --runs 5

At the end the source and the downstreams must be equal, and no row may be parked. Each run has a source with four
tables (keys of integers, texts and two columns; foreign keys), a daemon, and one process with two downstreams: a
Postgres with foreign keys and unique keys of its own, and Parquet. A program writes with transactions that insert,
update, delete, change keys and exchange unique values. Each keeps the sum of what accounts and deposits hold; with
`--consistency transaction` the sum downstream is looked at all the time. A seed plays the same schedule each time, as
far as processes can.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from replicad.spark.sinks import parquet
from tests.conftest import _named

COMMAND = [sys.executable, "-c", "from replicad.cli import main; main()"]
TABLES = """
CREATE TABLE account (id integer PRIMARY KEY, owner text NOT NULL UNIQUE, held bigint NOT NULL);
CREATE TABLE deposit (id bigint PRIMARY KEY, account integer NOT NULL {references}, held bigint NOT NULL);
CREATE TABLE tag (name text PRIMARY KEY, weight numeric(8, 2));
CREATE TABLE tagged (account integer, tag text, at timestamptz, PRIMARY KEY (account, tag));
"""
NAMES = ("account", "deposit", "tag", "tagged")
TOTAL = "SELECT (SELECT coalesce(sum(held), 0) FROM account) + (SELECT coalesce(sum(held), 0) FROM deposit)"
PATIENCE = 120.0  # seconds for both sides to become equal


class TortureFailed(AssertionError):
    """Source and downstream are different, or a promise was broken."""


@dataclass(slots=True)
class Schedule:
    """One run. `source` and `target`: URLs of empty databases; the schema of tubes is in the first."""

    source: str
    target: str
    port: int
    folder: Path
    random: random.Random
    seconds: float = 10.0
    consistency: str = "rows"
    process: subprocess.Popen[bytes] | None = None
    events: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Play it. Raises TortureFailed."""
        self._begin()
        try:
            self.await_equal()
            self.play()
            self.await_equal()
        finally:
            if self.process is not None:
                self.process.send_signal(signal.SIGCONT)
                self.process.kill()
                self.process.wait()

    def _begin(self) -> None:
        references = "REFERENCES account"
        for url in (self.source, self.target):
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(TABLES.format(references=references))
                if url == self.target:
                    for name in NAMES:
                        connection.execute(f"ALTER TABLE {name} ADD _seq bigint")
        with psycopg.connect(self.source, autocommit=True) as connection:
            connection.execute("INSERT INTO account SELECT n, 'o' || n, 100 FROM generate_series(1, 50) n")
            connection.execute("INSERT INTO deposit SELECT n, 1 + n % 50, 10 FROM generate_series(1, 200) n")
        lake = (
            ""
            if self.consistency == "transaction"
            else (f'[downstream.lake]\nkind = "parquet"\nfolder = "{self.folder}/lake/{{table}}"\n')
        )
        (self.folder / "p.toml").write_text(
            f'[source]\ntube = "bank"\nport = {self.port}\nleaseTtl = "2s"\n'
            f'[tables]\ndatabase = "{self.source}"\ninclude = ["public.*"]\nnumeric = "text"\n'
            f'[downstream.copy]\nkind = "postgres"\nurl = "{self.target}"\n{lake}'
            f'[run]\nengine = "local"\ncheckpoint = "checkpoint"\ntrigger = 0\nbacklog_after = "1s"\n'
            f'consistency = "{self.consistency}"\n'
        )
        from replicad.spark.local.file import load_local
        from replicad.spark.local.tables import attach_new

        attach_new(load_local(self.folder / "p.toml"), create=True)
        self.start()

    def start(self) -> None:
        """Start the process, in place of one that has ended."""
        log = (self.folder / "pipeline.log").open("ab")
        words = [*COMMAND, "pipeline", "run", str(self.folder / "p.toml")]
        self.process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, "REPLICAD_LOG_LEVEL": "info"})

    # --- the program that writes ---

    def transact(self, connection: psycopg.Connection) -> None:
        """One transaction of the source, which keeps the sum of the accounts and deposits."""
        pick = self.random
        with connection.transaction():
            match pick.randrange(9):
                case 0:
                    one, other = pick.randrange(1, 60), pick.randrange(1, 60)
                    connection.execute(
                        "UPDATE account SET held = held - 1 WHERE id = %s AND EXISTS (SELECT FROM account "
                        "WHERE id = %s) AND %s <> %s",
                        (one, other, one, other),
                    )
                    connection.execute(
                        "UPDATE account SET held = held + 1 WHERE id = %s AND EXISTS (SELECT FROM account "
                        "WHERE id = %s) AND %s <> %s",
                        (other, one, one, other),
                    )
                case 1:
                    one = pick.randrange(1, 60)
                    moved = connection.execute("UPDATE account SET held = held - 7 WHERE id = %s RETURNING 1", (one,))
                    if moved.fetchone():
                        connection.execute("INSERT INTO deposit SELECT max(id) + 1, %s, 7 FROM deposit", (one,))
                case 2:
                    one = pick.randrange(1, 60)
                    connection.execute(
                        "WITH gone AS (DELETE FROM deposit WHERE id IN "
                        "(SELECT id FROM deposit WHERE account = %s LIMIT 2) "
                        "RETURNING held) UPDATE account SET held = held + (SELECT coalesce(sum(held), 0) FROM gone) "
                        "WHERE id = %s",
                        (one, one),
                    )
                case 3:
                    fresh = pick.randrange(60, 10_000)
                    connection.execute(
                        "INSERT INTO account VALUES (%s, %s, 0) ON CONFLICT DO NOTHING", (fresh, f"o{fresh}")
                    )
                    connection.execute("INSERT INTO deposit SELECT max(id) + 1, %s, 0 FROM deposit", (fresh,))
                case 4:  # a parent with all its children; what they held goes to another account
                    one = pick.randrange(30, 60)
                    connection.execute(
                        "WITH d AS (DELETE FROM deposit WHERE account = %s RETURNING held), "
                        "a AS (SELECT held FROM account WHERE id = %s) "
                        "UPDATE account SET held = held + (SELECT coalesce(sum(held), 0) FROM d) "
                        "+ (SELECT coalesce(sum(held), 0) FROM a) WHERE id = 1",
                        (one, one),
                    )
                    connection.execute("DELETE FROM account WHERE id = %s", (one,))
                case 5:  # exchange of unique values
                    one, other = pick.sample(range(1, 20), 2)
                    names = dict(
                        connection.execute(
                            "SELECT id, owner FROM account WHERE id IN (%s, %s)", (one, other)
                        ).fetchall()
                    )
                    if len(names) == 2:
                        connection.execute("UPDATE account SET owner = '-' WHERE id = %s", (one,))
                        connection.execute("UPDATE account SET owner = %s WHERE id = %s", (names[one], other))
                        connection.execute("UPDATE account SET owner = %s WHERE id = %s", (names[other], one))
                case 6:
                    name = f"t{pick.randrange(30)}"
                    connection.execute(
                        "INSERT INTO tag VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET weight = 1", (name, 2)
                    )
                    connection.execute("INSERT INTO tagged VALUES (%s, %s, now()) ON CONFLICT DO NOTHING", (1, name))
                case 7:  # a key changes
                    old, new = f"t{pick.randrange(30)}", f"t{pick.randrange(30)}"
                    connection.execute(
                        "UPDATE tag SET name = %s WHERE name = %s AND NOT EXISTS (SELECT FROM tag WHERE name = %s)",
                        (new, old, new),
                    )
                case _:
                    connection.execute("DELETE FROM tagged WHERE tag = %s", (f"t{pick.randrange(30)}",))

    def check_sum(self) -> None:
        """The sum over both tables is the same in every state of the source, so in every one downstream."""
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.target) as connection:
            row = connection.execute(TOTAL).fetchone()
            assert row is not None
            if row[0] != 50 * 100 + 200 * 10:
                raise TortureFailed(f"accounts and deposits hold {row[0]} downstream; events: {self.events}")

    # --- faults ---

    def play(self) -> None:
        """Write, and let things go wrong, for some seconds."""
        deadline = time.monotonic() + self.seconds
        due = time.monotonic() + 1
        with psycopg.connect(self.source, autocommit=True) as connection:
            while time.monotonic() < deadline:
                self.transact(connection)
                if self.consistency == "transaction":
                    self.check_sum()
                if time.monotonic() >= due:
                    due = time.monotonic() + self.random.uniform(0.5, 2)
                    self.random.choice([self.kill, self.kill, self.pause, self.fail, self.add_column])()
                time.sleep(0.005)

    def kill(self) -> None:
        """Kill the process, and start another one."""
        self.events.append("kill")
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.start()

    def pause(self) -> None:
        """Suspend the process until its lease is over, while another one works; then it goes on."""
        self.events.append("pause")
        paused = self.process
        assert paused is not None
        paused.send_signal(signal.SIGSTOP)
        self.start()

        def wake() -> None:
            paused.send_signal(signal.SIGCONT)
            time.sleep(1)
            paused.kill()
            paused.wait()

        threading.Timer(self.random.uniform(3, 5), wake).start()

    def fail(self) -> None:
        """Let the Postgres downstream accept no connections for a while."""
        self.events.append("fail")
        name = urlsplit(self.target).path.removeprefix("/")

        def allow(flag: bool) -> None:
            with psycopg.connect(self.source, autocommit=True) as connection:
                connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {flag}")
                if not flag:
                    connection.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,)
                    )

        allow(flag=False)
        threading.Timer(self.random.uniform(0.5, 4), partial(allow, flag=True)).start()

    def add_column(self) -> None:
        """Give a table of the source another column, with values."""
        name, column = self.random.choice(NAMES[2:]), f"c{self.random.randrange(3)}"
        self.events.append(f"column {name}.{column}")
        with psycopg.connect(self.source, autocommit=True) as connection:
            connection.execute(f"ALTER TABLE {name} ADD COLUMN IF NOT EXISTS {column} integer")
            connection.execute(f"UPDATE {name} SET {column} = 5")

    # --- the end ---

    def await_equal(self) -> None:
        """Wait until both downstreams equal the source. Raises TortureFailed."""
        checks: list[Callable[[], str | None]] = [self._postgres_differs]
        if self.consistency != "transaction":
            checks.append(self._lake_differs)
        deadline = time.monotonic() + PATIENCE
        while True:
            found = next((why for check in checks if (why := check()) is not None), None)
            if found is None:
                break
            assert self.process is not None
            if self.process.poll() is not None:
                self.start()
            if time.monotonic() >= deadline:
                log = (self.folder / "pipeline.log").read_text()[-3000:]
                raise TortureFailed(f"{found}; events: {self.events}; log: {log}")
            time.sleep(0.3)
        with psycopg.connect(self.source) as connection:
            row = connection.execute("SELECT count(*), min(error) FROM tube.tube_parked").fetchone()
        if row and row[0]:
            raise TortureFailed(f"{row[0]} rows were parked: {row[1]}; events: {self.events}")

    def rows(self, url: str, name: str) -> list[tuple[object, ...]]:
        """The rows of a table, with the columns that the source has."""
        with psycopg.connect(self.source) as connection:
            listed = connection.execute(
                "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 ORDER BY attname",
                (name,),
            ).fetchall()
        columns = ", ".join(column for (column,) in listed)
        with psycopg.connect(url) as connection:
            return sorted(connection.execute(f"SELECT {columns} FROM {name}").fetchall(), key=repr)

    def _postgres_differs(self) -> str | None:
        for name in NAMES:
            try:
                theirs = self.rows(self.target, name)
            except psycopg.errors.Error as error:
                return f"{name}: {error}"
            ours = self.rows(self.source, name)
            if ours != theirs:
                return f"{name} differs in Postgres: {_difference(ours, theirs)}"
        return None

    def _lake_differs(self) -> str | None:
        for name, key in (("account", "id"), ("deposit", "id"), ("tag", "name")):
            try:
                theirs = {row[key] for row in parquet.table(self.folder / "lake" / name).to_pylist()}
            except Exception as error:  # noqa: BLE001 - not made yet
                return f"{name}: {error}"
            with psycopg.connect(self.source) as connection:
                ours = {one for (one,) in connection.execute(f"SELECT {key} FROM {name}")}
            if ours != theirs:
                return f"{name} differs in Parquet: {sorted(ours ^ theirs)[:5]}"
        return None


def _difference(ours: list[tuple[object, ...]], theirs: list[tuple[object, ...]]) -> str:
    only_ours = [row for row in ours if row not in theirs][:3]
    only_theirs = [row for row in theirs if row not in ours][:3]
    return f"only in the source {only_ours}, only downstream {only_theirs}"


def play(seed: int, source: str, target: str, port: int, **options: object) -> None:
    """Play one schedule in empty databases, the source with a daemon at this port of 127.0.0.1."""
    with tempfile.TemporaryDirectory() as folder:
        Schedule(source, target, port, Path(folder), random.Random(seed), **options).run()  # type: ignore[arg-type]


def main() -> None:
    """Run schedules in databases of a server that is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True, help="URL of a superuser's database; databases are made beside it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--consistency", default="rows")
    given = parser.parse_args()
    for seed in range(given.seed, given.seed + given.runs):
        print(f"seed {seed}", flush=True)
        in_new_databases(given.server, seed, seconds=given.seconds, consistency=given.consistency)


def in_new_databases(server: str, seed: int, **options: object) -> None:
    source, target = (_named(server, name) for name in ("torture_source", "torture_target"))
    with psycopg.connect(server, autocommit=True) as connection:
        for name in ("torture_source", "torture_target"):
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
            connection.execute(f"CREATE DATABASE {name} TEMPLATE template0")
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        words = [
            "serve",
            "--allow-superuser",
            "--database",
            source,
            "--listen",
            "127.0.0.1:0",
            "--ready-file",
            str(ready),
        ]
        daemon = subprocess.Popen([*COMMAND, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not ready.exists() or not ready.read_text().strip():
                assert daemon.poll() is None
                time.sleep(0.1)
            port = int(ready.read_text().strip().rpartition(":")[2])
            play(seed, source, target, port, **options)
        finally:
            daemon.terminate()
            daemon.wait()


if __name__ == "__main__":
    main()
