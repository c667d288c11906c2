"""An upgrade while writers write and readers read: from a release to the present programs, and on to a later version.

Two daemons in processes of their own serve the same database in turns, as an operator replaces one after the other.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

import replicad
from replicad.client import BlockingClient, BlockingWorker, open_client
from replicad.client.worker import Batch, WorkerSettings
from replicad.postgres import schema_text
from tests.conftest import PATIENCE, install, psql
from tests.lengths import first
from tests.roles import as_daemon
from tests.schema import release

PACKAGE = Path(replicad.__file__).parent
RELEASES = sorted(release.FOLDER.glob("v*.sql"))
USED = """
CREATE TABLE events (id bigserial PRIMARY KEY, writer text, body jsonb);
SELECT replicad.stream_add('events', 'events', 'id', 'writer', 't.body');
CREATE TABLE items (id bigint PRIMARY KEY, value int NOT NULL);
SELECT tube.tube_ensure_exists('items', 2);
SELECT tube.tube_table_ensure_attached('items', 'items', 0, routing => '(id % 2)::integer');
GRANT SELECT ON events, items TO PUBLIC;
"""
WRITERS = 3
LATER = """
ALTER TABLE {table} ADD COLUMN made_up integer NOT NULL DEFAULT 7;
"""


def later_version(folder: Path) -> Path:
    """The programs of a further version: a table of each part has a new column, and a function is made anew."""
    tree = folder / "later"
    shutil.copytree(PACKAGE, tree / "replicad", ignore=shutil.ignore_patterns("__pycache__"))
    for part, table, changed in (("stream", "stream", "registry.sql"), ("tube", "tube_registry", "leases.sql")):
        declared = schema_text.declarations(tree / "replicad")[part]
        release._add_names(tree / "replicad", part, declared.version)  # of what a user of today has
        sql = declared.folder
        toml = (sql / "part.toml").read_text(encoding="utf-8")
        toml = re.sub(r"version = \d+", f"version = {declared.version + 1}", toml)
        (sql / "part.toml").write_text(re.sub(r"serves = \d+", f"serves = {declared.version}", toml), encoding="utf-8")
        (sql / "upgrade").mkdir(exist_ok=True)
        (sql / f"upgrade/{declared.version + 1}.sql").write_text(LATER.format(table=table), encoding="utf-8")
        with (sql / changed).open("a", encoding="utf-8") as file:
            file.write(f"\nCOMMENT ON TABLE {table} IS 'replicad: of a later version';\n")
    return tree


class Served:
    """A daemon of some programs, in a process of its own, at an address that it keeps."""

    def __init__(self, tree: Path, url: str, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._words = [sys.executable, "-m", "replicad", "serve", "--database", as_daemon(url)]
        self._words += ["--listen", f"127.0.0.1:{self.port}", "--log-format", "json"]
        self._tree, self.log = tree, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("REPLICAD_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._words, cwd=self._tree, env={**clean, "PYTHONPATH": str(self._tree)}, stdout=log, stderr=log
            )
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            assert self._process.poll() is None, self.log.read_text()
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as link:
                    assert link.makefile("rb").readline().startswith(b"SERVER ")
                    return
            except ConnectionRefusedError:
                time.sleep(0.05)
        raise AssertionError(f"the daemon does not listen: {self.log.read_text()}")

    def end(self) -> None:
        """As systemd ends it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            assert self._process.wait(PATIENCE) == 0, self.log.read_text()
            self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Readers:
    """A follower of the stream and a worker of the tube, at an address of two daemons, and what they were given."""

    def __init__(self, address: str) -> None:
        self.rows: list[str] = []
        self.items: set[int] = set()
        self.failures: list[BaseException] = []
        self._address, self._client = address, BlockingClient(address, name="reader")
        settings = WorkerSettings(poll=0.2, backoff_first=0.05)
        self._worker = BlockingWorker(
            lambda: open_client(address, name="worker"), "items", self._handle, settings=settings
        )
        self._threads = [
            threading.Thread(target=self._kept(one), daemon=True) for one in (self._follow, self._worker.run)
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._client.close()
            self._worker.close()
            for thread in self._threads:
                thread.join(PATIENCE)

    def _kept(self, run: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - the test tells of it
                self.failures.append(error)

        return guarded

    def _follow(self) -> None:
        with self._client.follow({"events": "EARLIEST"}) as follower:
            for event in follower:
                self.rows += getattr(event, "rows", [])

    def _handle(self, batch: Batch) -> None:
        self.items.update(int(touch.id) for touch in batch.touches)


class Writers:
    """Programs that insert events and items, and change items, until they shall end. A refused write is a failure."""

    def __init__(self, url: str) -> None:
        self._url, self._done = url, threading.Event()
        self.written = [0] * WRITERS
        self.failures: list[BaseException] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._write, args=(number,), daemon=True) for number in range(WRITERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._done.set()
            for thread in threads:
                thread.join(PATIENCE)

    def _write(self, number: int) -> None:
        try:
            with psycopg.connect(self._url, autocommit=True) as connection:
                while not self._done.is_set():
                    made = self.written[number] * WRITERS + number
                    connection.execute(
                        "WITH e AS (INSERT INTO events (writer, body) VALUES (%s, to_jsonb(%s::bigint))) "
                        "INSERT INTO items VALUES (%s, 0) ON CONFLICT (id) DO UPDATE SET value = items.value + 1",
                        (f"w{number}", made, made % 500),
                    )
                    self.written[number] += 1
                    time.sleep(0.002)
        except BaseException as error:  # noqa: BLE001 - the test tells of it
            self.failures.append(error)

    def more(self) -> None:
        """Wait until each has written some more."""
        until, before = time.monotonic() + PATIENCE, list(self.written)
        while any(now < old + 20 for now, old in zip(self.written, before, strict=True)):
            assert not self.failures, self.failures
            assert time.monotonic() < until, "the writers are held up"
            time.sleep(0.02)


@pytest.mark.bare_database
@pytest.mark.parametrize(
    "start", first(1, [*RELEASES, "present"]), ids=lambda one: one if isinstance(one, str) else one.stem
)
def test_an_upgrade_loses_nothing_while_daemons_are_replaced_one_after_the_other(
    start: str | Path, database_url: str, tmp_path: Path
) -> None:
    if isinstance(start, Path):
        psql(as_daemon(database_url), f"\\i {start}")
    else:
        install(as_daemon(database_url), "stream", "tube", "federation")
    psql(database_url, "SET search_path = public", USED)
    present = Served(PACKAGE.parent, database_url, tmp_path / "present.log")
    later = Served(later_version(tmp_path), database_url, tmp_path / "later.log")
    readers, writers = Readers(f"127.0.0.1:{present.port},127.0.0.1:{later.port}"), Writers(database_url)
    version = "SELECT version FROM replicad.stream_version"
    try:
        with writers.running():
            writers.more()
            present.start()
            installed = int(psql(database_url, version))
            with readers.running():
                writers.more()
                later.start()
                assert int(psql(database_url, version)) == installed + 1
                writers.more()
                present.end()
                writers.more()
                present.start()  # back to the version before: it leaves the newer installation as it is
                later.end()
                assert "schema_newer" in present.log.read_text()
                writers.more()
                until = time.monotonic() + PATIENCE
                total = sum(writers.written)
                while len(readers.rows) < total and time.monotonic() < until:
                    time.sleep(0.05)
                while len(readers.items) < min(500, total) and time.monotonic() < until:
                    time.sleep(0.05)
        assert (writers.failures, readers.failures) == ([], [])
        ids = [int(row) for row in psql(database_url, "SELECT body FROM events ORDER BY id").split()]
        given = [int(row) for row in readers.rows]
        assert given == ids[: len(given)], "each row once, in the order of ids"
        assert len(given) >= total
        assert readers.items == {int(row) for row in psql(database_url, "SELECT id FROM items").split()}
    finally:
        for daemon in (present, later):
            daemon.kill()
