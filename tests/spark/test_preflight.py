"""What is wrong is said before Spark starts: no daemon, no such tube, TLS on one side only, no such database."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import FakeDaemon
from helpers import psql

from replicad.errors import ConnectionLost, DatabaseRefused, UnknownTube, UsageError
from replicad.spark import pipeline, preflight
from replicad.spark.database import forget
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.preflight import LOOK_EVERY, Attachments, Watch, wait_until_ready
from replicad.spark.reports import PipelineResult
from replicad.spark.sinks.parquet import ParquetSink
from tests.conftest import PATIENCE


class Clock:
    """A clock that jumps when somebody sleeps. `then` is called at a time."""

    def __init__(self, at: float = 0.0, then: Callable[[], object] = lambda: None) -> None:
        self.time, self.at, self.then = 0.0, at, then

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        before, self.time = self.time, self.time + seconds
        if before < self.at <= self.time:
            self.then()


@pytest.fixture
def away() -> Iterator[FakeDaemon]:
    """A daemon that does not run yet."""
    made = FakeDaemon()
    made.make_tube("t", 1)
    made.stop()
    yield made
    made.stop()


def config(url: str, folder: Path, port: int, **more: Any) -> PipelineConfig:
    sink = ParquetSink(folder / "out")
    fields = {"tube": "t", "port": port, "database": url, "table": "public.x", "sink": sink, "trigger": "1s"}
    return PipelineConfig(**{**fields, "checkpoint": folder / "c", **more})


def test_a_daemon_that_is_down_is_said_once_and_waited_for(
    database_url: str, tmp_path: Path, away: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(90.0, away.start)
    with caplog.at_level("INFO"):
        ready = wait_until_ready(
            config(database_url, tmp_path, away.port), lambda: False, now=clock.now, sleep=clock.sleep
        )
    assert ready
    assert 90 <= clock.time < 100
    said = [text for text in map(str, caplog.messages) if "waiting" in text or "reached" in text]
    assert len(said) == 2
    assert f"no connection to 127.0.0.1:{away.port}: Connection refused" in said[0]


def test_a_run_that_ends_by_itself_gives_up_and_one_that_must_end_ends(
    database_url: str, tmp_path: Path, away: FakeDaemon
) -> None:
    clock = Clock()
    once = config(database_url, tmp_path, away.port, trigger="available_now")
    with pytest.raises(ConnectionLost, match="Connection refused"):
        wait_until_ready(once, lambda: False, now=clock.now, sleep=clock.sleep)
    assert preflight.PATIENCE <= clock.time < preflight.PATIENCE + 10
    follower = config(database_url, tmp_path, away.port)
    assert not wait_until_ready(follower, lambda: True, now=clock.now, sleep=clock.sleep)

    def no_session() -> Any:
        raise AssertionError("Spark was started")

    assert pipeline.run(follower, no_session, until=lambda _: True) == PipelineResult()


def test_a_wrong_tube_and_a_wrong_database_are_said_at_once(
    database_url: str, tmp_path: Path, daemon: FakeDaemon
) -> None:
    with pytest.raises(UnknownTube):
        pipeline.run(config(database_url, tmp_path, daemon.port))
    daemon.make_tube("t", 1)
    with pytest.raises(DatabaseRefused, match="does not exist"):
        pipeline.run(config(database_url.replace("/test_", "/no_such_"), tmp_path, daemon.port))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that no authority knows, and its key, in one file."""
    made = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
                "-days",
                "2",
            ),
            *("-subj", "/CN=daemon", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", made, "-out", f"{made}.crt"),
        ],
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    made.write_text(made.read_text() + Path(f"{made}.crt").read_text())
    return made


@pytest.fixture
def tls_port(certificate: Path) -> Iterator[int]:
    """A server that makes TLS handshakes and, like a daemon, waits for one before it says anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = server.accept()
                threading.Thread(target=handshake, args=(plain,), daemon=True).start()
            except OSError:
                return

    def handshake(plain: socket.socket) -> None:
        plain.settimeout(PATIENCE)
        with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as connection:
            connection.recv(1)

    threading.Thread(target=serve, daemon=True).start()
    yield int(server.getsockname()[1])
    server.close()


def test_tls_on_one_side_only_is_said_at_once(
    database_url: str, tmp_path: Path, daemon: FakeDaemon, tls_port: int, certificate: Path
) -> None:
    with pytest.raises(UsageError, match=rf"the daemon at 127.0.0.1:{tls_port} speaks TLS; give the option tlsCa"):
        pipeline.run(config(database_url, tmp_path, tls_port))
    trusting = {"tlsCa": f"{certificate}.crt"}
    with pytest.raises(UsageError, match="does not speak TLS; leave the option tlsCa out"):
        pipeline.run(config(database_url, tmp_path, daemon.port, options=trusting))
    with pytest.raises(UsageError, match=r"has a certificate that is not trusted: self.signed"):
        pipeline.run(config(database_url, tmp_path, tls_port, options={"tlsCa": "system"}))


def test_what_the_batch_in_hand_waits_for_is_noticed_while_a_pipeline_ends(
    database_url: str, tmp_path: Path, daemon: FakeDaemon
) -> None:
    daemon.make_tube("t", 1)
    with contextlib.closing(Watch(config(database_url, tmp_path, daemon.port))) as watch:
        wait_for(lambda: sum(one.startswith("TUBE") for one in daemon.requests) > 1)
        assert watch.trouble is None
        daemon.stop()
        wait_for(lambda: watch.trouble is not None)
        assert str(daemon.port) in (watch.trouble or "")


def test_tables_that_share_a_shard_or_are_not_attached_are_warned_of_once_each(
    database_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    made = Attachments(config(database_url, tmp_path, 1, table="c_{shard}"), now=lambda: clock[0])

    def warned(sql: str) -> str:
        psql(database_url, sql)
        caplog.clear()
        made.look()
        assert caplog.text == "", "it has looked a moment ago"
        clock[0] += LOOK_EVERY
        made.look()
        return caplog.text

    made.look()  # as in a database of rows only
    tables = "CREATE TABLE a (id bigint PRIMARY KEY); CREATE TABLE c_1 (id bigint PRIMARY KEY);"
    assert warned(f"{tables} SELECT tube.tube_ensure_exists('t')") == "", "such a tube is filled by hand"
    attach = "SELECT tube.tube_table_ensure_attached('t', '{}', 1)"
    assert warned(attach.format("a")) == ""
    text = warned(f"{attach.format('c_1')}; CREATE TABLE c_7 (id bigint)")
    assert "tables_share_shard shard=1 tables=a, c_1" in text
    assert "shards_not_attached shards=[7]" in text
    text = warned("CREATE TABLE c_8 (id bigint)")
    assert "shards_not_attached shards=[8]" in text
    assert "share" not in text
    assert warned("") == ""
    forget(database_url)


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)
