"""A full disk at Postgres, as a query sees it: no ack, a wait, and on it goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import QUERIES, Query
from helpers import psql

from replicad.config.settings import parse_address
from replicad.postgres.embedded import EmbeddedPostgres
from tests.conftest import PATIENCE

from ..integration.test_faults_daemon import ServeProcess, serving
from ..integration.test_faults_tubes import FULL, limit_files

MIDDLE = "SELECT (pg_walfile_name_offset(pg_current_wal_lsn())).file_offset BETWEEN 2e6 AND 14e6"


@pytest.fixture(autouse=True)
def _no_query_outlives_its_test() -> Iterator[None]:
    yield
    while QUERIES:
        QUERIES.pop().die()


def port_of(daemon: ServeProcess) -> int:
    deadline = time.monotonic() + PATIENCE
    while not daemon.ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return parse_address(daemon.ready.read_text().strip()).port


def test_nothing_is_acked_while_the_disk_is_full_and_the_query_goes_on_by_itself(
    tmp_path: Path, postgres_folder: Path
) -> None:
    """See the worker's test: Postgres crashes because its log cannot be written, and cannot start before it can."""
    with (
        serving(tmp_path, "--data-folder", str(postgres_folder)) as daemon,
        EmbeddedPostgres(postgres_folder) as server,
    ):
        port = port_of(daemon)
        psql(server.url, "SELECT tube.tube_ensure_exists('t')")
        psql(server.url, "SELECT tube.t_touch(0, ARRAY[1, 2, 3], 'T')")
        while psql(server.url, MIDDLE) != "t":
            psql(server.url, "SELECT pg_logical_emit_message(false, '', repeat('x', 1000000))")
        options = {"port": str(port), "tube": "t", "pollTimeout": "500ms", "numRetries": "60", "retryInterval": "100ms"}
        query = Query(options)
        assert query.trigger()
        assert query.ids == [1, 2, 3]
        limit_files(daemon.process.pid, FULL)  # and whatever it starts from now on
        limit_files(server.pid(), FULL)
        acking = threading.Thread(target=query.trigger)  # acks the batch, which is committed
        acking.start()
        acking.join(4)
        assert acking.is_alive(), "it waits for Postgres"
        deadline = time.monotonic() + PATIENCE
        while acking.is_alive() and time.monotonic() < deadline:
            for pid in (daemon.process.pid, server.pid()):  # again and again: a server may just be starting
                limit_files(pid, -1)
            acking.join(0.2)
        assert not acking.is_alive()
        deadline = time.monotonic() + PATIENCE
        while psql(server.url, "SELECT count(*) FROM tube.t") != "0":  # a server that ended began a generation, so
            assert time.monotonic() < deadline  # the batch comes again, and is acked after that
            query.trigger()
        assert set(query.ids) == {1, 2, 3}
        psql(server.url, "SELECT tube.t_touch(0, ARRAY[4], 'T')")
        while 4 not in query.ids:
            assert time.monotonic() < deadline
            query.trigger()
        assert set(query.ids) == {1, 2, 3, 4}
