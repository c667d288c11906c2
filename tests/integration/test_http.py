"""`serve --http`: health checks, status and metrics, of a real daemon, asked with a plain client."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from replicad.config.settings import Address, ServerSettings
from replicad.errors import UsageError
from replicad.groups import sole_leaf
from replicad.operations.http import history, server, wire
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.sender.store import open_store
from replicad.streams.registry import Registry
from replicad.tubes.serving.service import TubeFigures
from tests.conftest import PATIENCE, install, psql
from tests.daemons import Daemon, Paces, open_daemon
from tests.figures_page import PARTS
from tests.roles import ROLES, as_daemon

from .test_access_reload import Authority

ANY_PORT = Address("127.0.0.1", 0)
SECRET = "a-secret-of-enough-characters"
Start = Callable[..., AbstractAsyncContextManager[Daemon]]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    def value(self, series: str) -> float:
        """The value of one series, such as `replicad_ready` or `replicad_tube_pods{partition="0",tube="t"}`."""
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.text, re.MULTILINE)
        assert found is not None, f"no {series} in:\n{self.text}"
        return float(found[1])

    def __contains__(self, text: str) -> bool:
        return text in self.text


async def ask(address: Address | None, path: str, *, tls: ssl.SSLContext | None = None, **headers: str) -> Answer:
    """One GET on a connection of its own."""

    def get() -> Answer:
        assert address is not None
        kind = http.client.HTTPConnection if tls is None else partial(http.client.HTTPSConnection, context=tls)
        connection = kind(address.host, address.port, timeout=PATIENCE)
        try:
            connection.request("GET", path, headers=headers)
            found = connection.getresponse()
            return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read().decode())
        finally:
            connection.close()

    return await trio.to_thread.run_sync(get)


async def ask_until(address: Address | None, path: str, meets: Callable[[Answer], bool]) -> Answer:
    """Ask again until the answer is as it has to be."""
    with trio.move_on_after(PATIENCE):
        while True:
            found = await ask(address, path)
            if meets(found):
                return found
            await trio.sleep(0.2)
    raise AssertionError(f"{path} still answers {found.status}:\n{found.text}")


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=ANY_PORT, http=ANY_PORT, server_name="example.com")


async def test_a_name_that_was_made_to_lead_here_gets_nothing_where_nobody_proves_who_he_is(
    events: Database, daemon: Daemon
) -> None:
    """The owner of a name can point it at the loopback address of whoever reads his page (DNS rebinding)."""
    assert daemon.http is not None
    for path in ("/status", "/clients", "/metrics", "/events", "/parked?tube=t", "/streams/events/rows"):
        found = await ask(daemon.http, path, Host=f"evil.example:{daemon.http.port}")
        assert found.status == 403, path
        assert "use an address or localhost in place of a host's name" in found.text
        assert (await ask(daemon.http, path, Host=f"localhost:{daemon.http.port}")).status in (200, 404), path
    assert (await ask(daemon.http, "/livez", Host="evil.example")).text == "ok\n"


async def test_a_daemon_is_alive_ready_and_tells_its_figures(events: Database, daemon: Daemon) -> None:
    await events.execute("SELECT tube.tube_ensure_exists('orders', partitions => 2)")
    assert (await ask(daemon.http, "/livez")).text == "ok\n"
    await ask_until(daemon.http, "/metrics", lambda found: "replicad_tube_partitions{" in found)
    ready = await ask(daemon.http, "/readyz")
    assert (ready.status, ready.text) == (200, "ready\n")
    found = await ask(daemon.http, "/metrics")
    assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert found.value("replicad_database_up") == 1
    assert found.value("replicad_ready") == 1
    assert found.value('replicad_stream_state{state="ok",stream="events"}') == 1
    assert found.value('replicad_stream_lag_rows{stream="events"}') == 0
    assert found.value('replicad_tube_lease_alive{partition="1",tube="orders"}') == 0
    body = json.loads((await ask(daemon.http, "/status")).text)
    assert body["ready"] is True
    assert body["obstacles"] == []
    assert [one["name"] for one in body["streams"]] == ["events"]
    assert [one["partition"] for one in body["tubes"][0]["partitions"]] == [0, 1]


async def test_every_declared_figure_is_exported_with_its_kind_and_no_other_is(daemon: Daemon) -> None:
    found = await ask(daemon.http, "/metrics")
    exported = dict(re.findall(r"^# TYPE (replicad_\w+) (\w+)$", found.text, re.MULTILINE))
    assert exported == {one.name: one.kind for families in PARTS.values() for one in families}


async def test_openmetrics_is_given_to_who_asks_for_it(daemon: Daemon) -> None:
    found = await ask(daemon.http, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert found.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert found.text.endswith("# EOF\n")


async def test_rows_and_bytes_that_clients_are_sent_are_counted(events: Database, daemon: Daemon) -> None:
    address = daemon.addresses[0]
    async with await trio.open_tcp_stream(address.host, address.port) as stream:
        await stream.send_all(b"REPLICATE events NOW\n")
        received = b""
        with trio.fail_after(PATIENCE):
            while b"POSITION" not in received:
                received += await stream.receive_some(65536)
            await events.execute("INSERT INTO events (body) SELECT '{}' FROM generate_series(1, 100)")
            while received.count(b"RDATA") < 100 or not received.endswith(b"\n"):
                received += await stream.receive_some(65536)
        found = await ask_until(
            daemon.http, "/metrics", lambda one: 'replicad_stream_sent_rows_total{stream="events"} 100.0' in one
        )
        assert found.value('replicad_stream_readers{order="per_writer",stream="events"}') == 1
        assert found.value('replicad_connections{state="known"}') == 1
        size = sum(len(line) for line in received.splitlines(keepends=True) if line.startswith(b"RDATA"))
        assert found.value('replicad_stream_sent_bytes_last_minute{stream="events"}') == size
        shown = json.loads((await ask(daemon.http, "/status")).text)["streams"][0]["sent_bytes_last_minute"]
        assert shown == size
    found = await ask_until(
        daemon.http, "/metrics", lambda one: 'replicad_connections_closed_total{reason="peer_closed"} 1.0' in one
    )
    assert found.value("replicad_sent_bytes_total") >= len(received)
    # old rows count as well
    async with await trio.open_tcp_stream(address.host, address.port) as stream:
        await stream.send_all(b"REPLICATE events EARLIEST\n")
        received = b""
        with trio.fail_after(PATIENCE):
            while received.count(b"RDATA") < 100:
                received += await stream.receive_some(65536)
    assert (await ask_until(
        daemon.http, "/metrics", lambda one: 'replicad_stream_sent_rows_total{stream="events"} 200.0' in one
    ))  # fmt: skip


async def test_a_transaction_that_holds_a_stream_back_is_shown_with_rows_and_seconds(
    events: Database, daemon: Daemon
) -> None:
    async with events.connection() as writer, writer.transaction():
        await writer.execute("INSERT INTO events (body) VALUES ('{}')")
        await events.execute("INSERT INTO events (body) SELECT '{}' FROM generate_series(1, 20)")
        held = 'replicad_stream_held_back_seconds{kind="transaction",stream="events"}'
        found = await ask_until(
            daemon.http,
            "/metrics",
            lambda one: held in one and one.value(held) > 1 and 'replicad_stream_lag_rows{stream="events"} 20.0' in one,
        )
        assert found.value('replicad_stream_lag_seconds{stream="events"}') > 1
        assert found.value('replicad_stream_state{state="ok",stream="events"}') == 1
        body = json.loads((await ask(daemon.http, "/status")).text)
        assert body["streams"][0]["held_back"]["pid"] is not None
        assert (await ask(daemon.http, "/readyz")).status == 200, "it is slow, and it is served"
    await ask_until(daemon.http, "/metrics", lambda one: held not in one)
    found = await ask_until(
        daemon.http, "/metrics", lambda one: one.value('replicad_stream_lag_seconds{stream="events"}') == 0
    )
    assert found.value('replicad_stream_lag_rows{stream="events"}') == 0


async def test_a_locked_table_hides_the_waiting_rows_of_its_stream_alone(events: Database, daemon: Daemon) -> None:
    await events.execute("CREATE TABLE others (id bigserial PRIMARY KEY, body text)")
    await Registry(events).add("others", "public.others", "id")
    await daemon.publisher.find("others")
    async with events.connection() as writer, writer.transaction(), events.connection() as locker:
        for name in ("events", "others"):
            await writer.execute(f"INSERT INTO {name} (body) VALUES (NULL)")
        await events.execute("INSERT INTO events (body) VALUES ('{}')")
        await events.execute("INSERT INTO others (body) VALUES ('x')")
        await ask_until(daemon.http, "/metrics", lambda one: 'lag_rows{stream="others"} 1.0' in one)
        async with locker.transaction():
            await locker.execute("LOCK TABLE others IN ROW EXCLUSIVE MODE")
        found = await ask_until(daemon.http, "/metrics", lambda one: 'lag_rows{stream="events"} 1.0' in one)
        assert found.value('replicad_look_failures_total{look="streams"}') == 0


async def test_a_stream_and_a_tube_that_cannot_be_served_make_the_daemon_unready(
    events: Database, daemon: Daemon
) -> None:
    await events.execute("SELECT tube.tube_ensure_exists('orders', partitions => 1)")
    await ask_until(daemon.http, "/metrics", lambda one: 'replicad_tube_state{state="ok",tube="orders"} 1.0' in one)
    await events.execute("ALTER TABLE events RENAME COLUMN id TO other")
    found = await ask_until(daemon.http, "/readyz", lambda one: one.status == 503)
    assert "not ready: stream events" in found
    await events.execute("DROP TABLE tube.orders")
    await ask_until(daemon.http, "/readyz", lambda one: "tube orders cannot be served: its table tube.orders" in one)
    states = await ask(daemon.http, "/metrics")
    assert states.value('replicad_tube_state{state="refused",tube="orders"}') == 1
    assert states.value('replicad_stream_state{state="refused",stream="events"}') == 1
    assert states.value("replicad_ready") == 0
    assert (await ask(daemon.http, "/livez")).status == 200
    await events.execute("ALTER TABLE events RENAME COLUMN other TO id")
    await events.execute("SELECT tube.tube_ensure_absent('orders')")
    await ask_until(daemon.http, "/readyz", lambda one: one.status == 200)


@pytest.fixture
def own_postgres(postgres_folder: Path) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(postgres_folder, {"fsync": "off"}) as running:
        psql(running.url, ROLES)
        install(as_daemon(running.url), "stream", "tube", "federation")
        yield running


@asynccontextmanager
async def serving(url: str, settings: ServerSettings) -> AsyncIterator[Daemon]:
    async with open_database(url, size=1, application_name="test") as db:
        await db.execute("CREATE TABLE events (id bigserial PRIMARY KEY, body text)")
        await Registry(db).add("events", "public.events", "id")
        await db.execute("SELECT tube.tube_ensure_exists('orders', partitions => 1)")
    async with open_daemon(settings, url, paces=Paces()) as running:
        await ask_until(running.http, "/readyz", lambda one: one.status == 200)
        yield running


@contextmanager
def frozen(postgres: EmbeddedPostgres) -> Iterator[None]:
    """All processes of the server stand still: connections stay open, and nothing answers."""
    pid = postgres.pid()
    assert pid is not None
    everyone = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in everyone:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in everyone:
            if process.is_running():
                process.send_signal(signal.SIGCONT)


async def test_a_stopped_postgres_makes_the_daemon_unready_and_its_return_ready(
    own_postgres: EmbeddedPostgres, settings: ServerSettings
) -> None:
    async with serving(own_postgres.url, settings) as daemon:
        own_postgres.__exit__()
        found = await ask_until(daemon.http, "/readyz", lambda one: one.status == 503)
        assert "not ready: " in found
        assert "Postgres" in found
        found = await ask_until(daemon.http, "/metrics", lambda one: one.value("replicad_database_up") == 0)
        assert found.value("replicad_database_outage_seconds") > 0
        assert found.value('replicad_troubles{kind="database"}') == 1
        own_postgres.__enter__()
        found = await ask_until(daemon.http, "/readyz", lambda one: one.status == 200)
        await ask_until(daemon.http, "/metrics", lambda one: one.value("replicad_database_outage_seconds") == 0)


@pytest.mark.long
async def test_a_scrape_is_answered_in_time_while_postgres_hangs(
    own_postgres: EmbeddedPostgres, settings: ServerSettings
) -> None:
    async with serving(own_postgres.url, settings) as daemon:
        await ask(daemon.http, "/metrics")
        await trio.sleep(server.LookIntervals().fresh)  # so that the next scrape wants to look again
        with frozen(own_postgres):
            found = await ask(daemon.http, "/metrics")  # Postgres is frozen until it is answered
            assert found.status == 200
            assert found.value('replicad_tube_pods{partition="0",tube="orders"}') == 0, "as seen some seconds ago"
            assert found.value('replicad_look_age_seconds{look="tubes"}') > server.LookIntervals().fresh - 1
            silent = await ask_until(daemon.http, "/readyz", lambda one: one.status == 503)
            assert "Postgres has not answered for" in silent
            assert (await ask(daemon.http, "/metrics")).value("replicad_database_up") == 0
            assert (await ask(daemon.http, "/livez")).status == 200
        await ask_until(daemon.http, "/readyz", lambda one: one.status == 200)
        await ask_until(
            daemon.http,
            "/metrics",
            lambda one: one.value('replicad_look_age_seconds{look="tubes"}') < server.LookIntervals().fresh,
        )


async def test_backlogs_small_and_large_are_counted_by_partition_with_ages(events: Database, daemon: Daemon) -> None:
    pods = (
        "INSERT INTO tube.{} (op, shard, ids, payload, ts)"
        " SELECT '{}', g % 2, '{{1}}', '{{}}', now() - {} * interval '1 s'"
    )
    for tube, partitions in (("few", 2), ("many", 2), ("gone", 1)):
        await events.execute(f"SELECT tube.tube_ensure_exists('{tube}', partitions => {partitions})")
    await events.execute(pods.format("few", "U", 100) + " FROM generate_series(1, 3) AS g")
    await events.execute(pods.format("few", "B", 200) + " FROM generate_series(1, 2) AS g")
    await events.execute(pods.format("many", "U", 300) + " FROM generate_series(1, 6000) AS g")
    await events.execute(
        "INSERT INTO tube.tube_parked (tube, seq, op, shard, ids, ts, tries, error)"
        " SELECT 'few', g, 'U', 1, '{1}', now(), 3, 'no' FROM generate_series(1, 4) AS g"
    )
    async with events.connection() as locker, locker.transaction():
        await locker.execute("LOCK TABLE tube.gone IN ACCESS EXCLUSIVE MODE")
        few = 'replicad_tube_pods{partition="1",tube="few"}'
        many = 'replicad_tube_pods{partition="0",tube="many"}'  # a locked table may delay it for longer than `few`
        found = await ask_until(daemon.http, "/metrics", lambda one: few in one and many in one)
        assert 'replicad_tube_pods{partition="0",tube="gone"}' not in found, "its table is locked"
        assert found.value(few) == 2
        assert found.value('replicad_tube_pods{partition="0",tube="few"}') == 1
        assert found.value('replicad_tube_backfill_pods{partition="0",tube="few"}') == 1
        assert found.value('replicad_tube_parked_pods{partition="1",tube="few"}') == 4
        assert found.value('replicad_tube_parked_pods{partition="0",tube="few"}') == 0
        assert 100 <= found.value('replicad_tube_oldest_pod_age_seconds{partition="0",tube="few"}') < 200
        assert found.value('replicad_tube_backfill_oldest_pod_age_seconds{partition="1",tube="few"}') >= 200
        assert found.value(many) > 1000, "an estimate"
        assert found.value('replicad_tube_oldest_pod_age_seconds{partition="1",tube="many"}') >= 300


async def test_what_senders_have_in_postgres_is_told(events: Database, daemon: Daemon) -> None:
    await events.execute(
        "INSERT INTO replicad.federation_parked (source, destination, stream_ordering, part, body, reason)"
        " VALUES ('events', 'a', 1, 0, '{}', 'status 422'), ('events', 'a', NULL, NULL, '{}', 'status 422'),"
        " ('events', 'b', 1, 0, '{}', 'status 422')"
    )
    await events.execute(
        "INSERT INTO replicad.federation_destination (source, name, txn_id, failures, failing_since)"
        " VALUES ('events', 'a', 'x', 2, now() - interval '1 hour'), ('events', 'b', NULL, 2, now())"
    )
    async with open_store(events, "replicad", "refused", ["refused"], ["nothing"]):
        pass  # its stream was refused when it started for the first time: nobody waits for it
    async with open_store(events, "replicad", "s1", ["s1", "s2"], ["events"]):
        found = await ask_until(daemon.http, "/metrics", lambda found: "replicad_sender_running{" in found)
    assert found.value('replicad_sender_running{sender="s1",stream="events"}') == 1
    assert found.value('replicad_sender_running{sender="s2",stream="events"}') == 0
    assert 'sender="refused"' not in found
    assert found.value('replicad_sender_parked_items{kind="fact",stream="events"}') == 2
    assert found.value('replicad_sender_parked_items{kind="update",stream="events"}') == 1
    assert found.value('replicad_sender_destinations{stream="events"}') == 2
    assert found.value('replicad_sender_failing_destinations{stream="events"}') == 1
    assert found.value('replicad_sender_failing_seconds{stream="events"}') >= 3600


async def test_postgres_is_looked_at_only_for_scrapes_and_once_for_many(
    start_daemon: Start, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    look = TubeFigures._look

    async def counted(self: TubeFigures) -> None:
        looks.append(trio.current_time())
        await look(self)

    monkeypatch.setattr(TubeFigures, "_look", counted)
    monkeypatch.setattr(history, "STEP", 3600.0)  # the charts look, too
    await database.execute("SELECT tube.tube_ensure_exists('orders', partitions => 1)")
    async with start_daemon() as daemon:
        for _ in range(20):  # health checks are no scrapes
            assert (await ask(daemon.http, "/readyz")).status == 200
        assert looks == []
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(ask, daemon.http, "/metrics")
        found = await ask(daemon.http, "/metrics")
        assert found.value('replicad_tube_pods{partition="0",tube="orders"}') == 0
        assert len(looks) == 1


# --- who may see what ---


def tokens(folder: Path, allow: str) -> Path:
    file = folder / "access.toml"
    digest = sha256(SECRET.encode()).hexdigest()
    file.write_text(f'[client.ops]\ntoken_sha256 = ["{digest}"]\nallow = {allow}\n')
    file.chmod(0o600)
    return file


def bearer(word: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {word}"}


async def test_with_a_token_probes_are_open_and_the_rest_is_not(start_daemon: Start, database: Database) -> None:
    async with start_daemon(token=SECRET) as daemon:
        for path in ("/livez", "/readyz", "/"):
            assert (await ask(daemon.http, path)).status == 200
        for path in ("/metrics", "/status"):
            refused = await ask(daemon.http, path)
            assert refused.status == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert (await ask(daemon.http, path, **bearer(SECRET))).status == 200
            wrong = await ask(daemon.http, path, **bearer("not-the-secret"))
            assert wrong.status == 401
            assert "the token is wrong" in wrong


async def test_probes_answer_whatever_word_is_sent_and_are_not_among_the_connections_of_a_client(
    start_daemon: Start, database: Database, tmp_path: Path
) -> None:
    """A liveness probe with an old secret would have the daemon restarted; one that has to wait as well."""
    file = tmp_path / "access.toml"
    digest = sha256(SECRET.encode()).hexdigest()
    file.write_text(f'[client.probe]\ntoken_sha256 = "{digest}"\nallow = ["status"]\nconnections = 1\n')
    async with start_daemon(access_file=file) as daemon:
        address = daemon.addresses[0]
        async with await trio.open_tcp_stream(address.host, address.port) as stream:
            await stream.send_all(f"AUTH probe.{SECRET}\nSTREAMS\n".encode())
            found = b""
            while b"STREAMS" not in found:
                found += await stream.receive_some(4096)
            assert (await ask(daemon.http, "/status", **bearer(f"probe.{SECRET}"))).status == 429
            for word in (f"probe.{SECRET}", *["probe.wrong"] * 8):
                for path in ("/livez", "/readyz", "/", "/console"):
                    assert (await ask(daemon.http, path, **bearer(word))).status == 200, path
        await database.execute("CREATE TABLE secret (id bigserial PRIMARY KEY)")
        await Registry(database).add("secret", "public.secret", "id")
        await database.execute("ALTER TABLE secret RENAME COLUMN id TO other")
        await ask_until(daemon.http, "/readyz", lambda one: one.status == 503)
        refused = await ask(daemon.http, "/readyz", **bearer("probe.wrong"))
        assert (refused.status, "stream secret" in refused) == (503, False)


async def test_readiness_names_streams_only_to_who_has_proved_who_it_is(
    start_daemon: Start, database: Database
) -> None:
    await database.execute("CREATE TABLE secret (id bigserial PRIMARY KEY)")
    await Registry(database).add("secret", "public.secret", "id")
    async with start_daemon(token=SECRET) as daemon:
        await database.execute("ALTER TABLE secret RENAME COLUMN id TO other")
        found = await ask_until(daemon.http, "/readyz", lambda one: one.status == 503)
        assert "secret" not in found.text.replace("secret to see why", "")
        assert "stream secret" in await ask(daemon.http, "/readyz", **bearer(SECRET))


async def test_a_client_of_the_access_file_needs_the_right_and_sees_the_names_that_it_may_list(
    start_daemon: Start, events: Database, tmp_path: Path
) -> None:
    await events.execute("CREATE TABLE secret (id bigserial PRIMARY KEY)")
    await Registry(events).add("secret", "public.secret", "id")
    word = bearer(f"ops.{SECRET}")
    async with start_daemon(access_file=tokens(tmp_path, '["status", "list events"]')) as daemon:
        await daemon.publisher.find("secret")
        found = await ask(daemon.http, "/metrics", **word)
        assert found.value('replicad_stream_state{state="ok",stream="events"}') == 1
        assert "secret" not in found
        body = await ask(daemon.http, "/status", **word)
        assert [one["name"] for one in json.loads(body.text)["streams"]] == ["events"]
    async with start_daemon(access_file=tokens(tmp_path, '["read events"]')) as daemon:
        refused = await ask(daemon.http, "/metrics", **word)
        assert refused.status == 403
        assert 'the operator can add "status" to [client.ops]' in refused
    async with start_daemon(access_file=tokens(tmp_path, '["*"]')) as daemon:
        await daemon.publisher.find("secret")
        assert 'stream="secret"' in await ask(daemon.http, "/metrics", **word)


async def test_with_a_certificate_http_is_https_and_a_clients_certificate_counts(
    start_daemon: Start, events: Database, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.certify("server", "IP:127.0.0.1")
    ours = authority.certify("ops", "URI:spiffe://corp/ops")
    access = tmp_path / "access.toml"
    access.write_text('[client.ops]\ncertificate = "spiffe://corp/ops"\nallow = ["*"]\n')
    access.chmod(0o600)
    files = {"tls_cert": certificate, "tls_key": key, "tls_client_ca": authority.certificate, "access_file": access}
    async with start_daemon(**files) as daemon:
        trusting = ssl.create_default_context(cafile=authority.certificate)
        assert (await ask(daemon.http, "/livez", tls=trusting)).status == 200
        assert (await ask(daemon.http, "/metrics", tls=trusting)).status == 401
        trusting.load_cert_chain(*ours)
        assert (await ask(daemon.http, "/metrics", tls=trusting)).status == 200
        with pytest.raises(OSError, match=r"."):
            await ask(daemon.http, "/livez")


async def test_a_certificate_counts_by_its_alternative_names_and_not_by_its_subject(
    start_daemon: Start, events: Database, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.certify("server", "IP:127.0.0.1")
    access = tmp_path / "access.toml"
    access.write_text('[client.ops]\ncertificate = "ops.example"\nallow = ["*"]\n')
    access.chmod(0o600)
    files = {"tls_cert": certificate, "tls_key": key, "tls_client_ca": authority.certificate, "access_file": access}
    async with start_daemon(**files) as daemon:
        for subject, alternative, status in (
            ("ops.example", "DNS:other.example", 401),
            ("ops.example", "email:ops.example@corp.example", 401),
            ("other.example", "DNS:OPS.example", 200),
        ):
            trusting = ssl.create_default_context(cafile=authority.certificate)
            trusting.load_cert_chain(*authority.certify(subject, alternative))
            assert (await ask(daemon.http, "/status", tls=trusting)).status == status, (subject, alternative)


# --- bounds ---


def plain(daemon: Daemon) -> socket.socket:
    assert daemon.http is not None
    return socket.create_connection((daemon.http.host, daemon.http.port), timeout=PATIENCE)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


async def test_a_header_that_is_too_long_and_one_that_never_ends_are_cut(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "READING", 1.0)
    with plain(daemon) as long, plain(daemon) as slow:
        slow.sendall(b"GET /livez HTTP/1.1\r\nx: ")
        long.sendall(b"GET /livez HTTP/1.1\r\nx: " + b"y" * 2 * wire.HEAD_BYTES + b"\r\n\r\n")
        found = await trio.to_thread.run_sync(read_all, long)
        assert not found.startswith(b"HTTP/1.1 200")
        assert not (await trio.to_thread.run_sync(read_all, slow)).startswith(b"HTTP/1.1 200")
    assert (await ask(daemon.http, "/livez")).status == 200


async def test_who_asks_and_never_reads_does_not_keep_the_daemon_from_stopping(
    start_daemon: Start, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SENDING", 3600.0)
    async with start_daemon() as daemon:
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert daemon.http is not None
        lazy.connect((daemon.http.host, daemon.http.port))
        lazy.setblocking(False)
        try:
            while True:  # until neither side takes anything
                lazy.send(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
                await trio.sleep(0.05)
        except BlockingIOError:
            pass
        began = trio.current_time()
    assert trio.current_time() - began < PATIENCE
    lazy.close()


async def test_a_request_that_fails_is_an_answer_and_no_end_of_anything(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(daemon.hub, "statistics", fail)
    found = await ask(daemon.http, "/metrics")
    assert found.status == 500
    monkeypatch.undo()
    found = await ask(daemon.http, "/metrics")
    assert found.value('replicad_failures_total{cause="/metrics",code="RuntimeError",kind="service"}') == 1
    assert found.value('replicad_service_failures_total{service="http"}') == 1


@pytest.mark.parametrize("path", ["/nothing", "/metrics/", "/status/", "/../etc/passwd", "//", "/%00"])
async def test_there_is_nothing_else(daemon: Daemon, path: str) -> None:
    assert (await ask(daemon.http, path)).status == (400 if "/.." in path or "//" in path else 404)


async def test_without_the_option_nothing_is_imported(settings: ServerSettings, database_url: str) -> None:
    script = (
        "import sys; from replicad.features import served; served();"
        "print([name for name in ('h11', 'prometheus_client') if name in sys.modules])"
    )
    found = await trio.run_process([sys.executable, "-c", script], capture_stdout=True)
    assert found.stdout.strip() == b"[]"
    async with open_daemon(replace(settings, http=None), database_url) as daemon:
        assert daemon.http is None


async def test_a_port_that_is_in_use_and_a_missing_extra_are_sentences_at_the_start(
    settings: ServerSettings, database_url: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - a group around it
            async with open_daemon(replace(settings, http=busy), database_url):
                pass
        assert "choose another with --http" in str(sole_leaf(caught.value))
    monkeypatch.setattr("replicad.operations.serving._PACKAGES", ("no_such_package",))
    with pytest.raises(UsageError, match=r"--http needs no_such_package: pip install 'replicad\[http\]'"):
        async with open_daemon(settings, database_url):
            pass


async def test_http_that_fails_is_started_again_on_its_port_and_clients_notice_nothing(
    start_daemon: Start, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, fail, starts = server.HttpServer.run, trio.Event(), 0

    async def run(self: server.HttpServer, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        nonlocal starts
        starts += 1
        if starts > 1:
            await real(self, task_status)
            return
        async with trio.open_nursery() as nursery:
            await nursery.start(real, self)
            task_status.started()
            await fail.wait()
            raise RuntimeError("a defect")

    monkeypatch.setattr(server.HttpServer, "run", run)
    async with start_daemon() as daemon:
        address = daemon.addresses[0]
        async with await trio.open_tcp_stream(address.host, address.port) as client:
            await client.receive_some(1000)
            assert (await ask(daemon.http, "/livez")).status == 200
            fail.set()
            with trio.fail_after(PATIENCE):
                while starts < 2:
                    await trio.sleep(0.01)
                while True:
                    try:
                        found = await ask(daemon.http, "/metrics")
                        break
                    except OSError:
                        await trio.sleep(0.05)
                await client.send_all(b"STREAMS\n")
                assert b"STREAMS" in await client.receive_some(1000)
        assert found.value('replicad_service_failures_total{service="http"}') == 1
