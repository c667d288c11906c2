"""Nothing that happens to one stream ends the daemon or another stream, and what is wrong is reported with a reason."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import trio

from replicad.errors import DatabaseError, DatabaseRefused, SchemaMissing, StreamRefused, UnknownStream
from replicad.postgres import schema
from replicad.postgres.bridge import Database
from replicad.streams import status
from replicad.streams.registry import Registry
from replicad.streams.serving.served_stream import ServedStream
from tests.conftest import psql
from tests.daemons import Daemon
from tests.lengths import first

from .conftest import Connect, Netcat, netcat_to

HANG = 60.0


async def add(database: Database, name: str, **options: Any) -> None:
    await database.execute(f"CREATE TABLE {name} (id bigserial PRIMARY KEY, body jsonb)")
    await Registry(database).add(name, f"public.{name}", "id", row="body", **options)


async def subscribe(nc: Netcat, name: str, token: str = "NOW") -> list[str]:
    await nc.send(f"REPLICATE {name} {token}")
    lines = await nc.until(f"POSITION {name} master .*|ERROR .*")
    assert not lines[-1].startswith("ERROR"), lines[-1]
    return lines


async def wait_for(condition: Callable[[], Any]) -> Any:
    with trio.fail_after(HANG):
        while not (found := condition()):
            await trio.sleep(0.02)
    return found


@pytest.fixture
async def bystander(events: Database) -> Database:
    await add(events, "bystander")
    return events


@asynccontextmanager
async def watching_bystander(daemon: Daemon, database: Database) -> AsyncIterator[Callable[[], Any]]:
    """Subscribe to `bystander`; what is given inserts a row and waits for it."""
    async with netcat_to(daemon) as nc:
        await nc.expect("SERVER .*")
        await subscribe(nc, "bystander")

        async def check() -> None:
            token = await database.fetch_value("INSERT INTO bystander (body) VALUES ('1') RETURNING id")
            lines = await nc.until(f"RDATA bystander master {token} 1|ERROR .*")
            assert not lines[-1].startswith("ERROR"), lines

        await check()
        yield check
        await check()


async def connected(nc: Netcat, name: str, token: str = "NOW") -> None:
    await nc.expect("SERVER .*")
    await subscribe(nc, name, token)


async def test_a_stream_is_removed_while_it_is_written_and_the_others_go_on(
    bystander: Database, daemon: Daemon, netcat: Connect
) -> None:
    async with watching_bystander(daemon, bystander) as check, netcat() as nc, trio.open_nursery() as nursery:
        await connected(nc, "events")

        async def write() -> None:
            while True:
                await bystander.execute("INSERT INTO events (body) VALUES ('2')")

        nursery.start_soon(write)
        for again in range(3):
            await Registry(bystander).remove("events")
            if again == 0:
                await nc.until("ERROR stream_refused: stream events .*")
            await check()
            await bystander.execute("TRUNCATE events RESTART IDENTITY")
            await Registry(bystander).add("events", "public.events", "id", row="body")
            await check()
        feed = await daemon.publisher.find("events")
        assert feed.stream.number == (await Registry(bystander).load_stream("events")).number
        nursery.cancel_scope.cancel()
    async with netcat() as nc:
        await connected(nc, "events")
        token = await bystander.fetch_value("INSERT INTO events (body) VALUES ('3') RETURNING id")
        await nc.until(f"RDATA events master {token} 3")


async def test_caches_are_disabled_while_invalidations_are_written_and_the_others_go_on(
    bystander: Database, daemon: Daemon, netcat: Connect
) -> None:
    await schema.install(bystander, "cache", "replicad")
    await bystander.fetch_value("SELECT replicad.cache_enable($1)", [])
    async with watching_bystander(daemon, bystander) as check, netcat() as nc, trio.open_nursery() as nursery:
        await connected(nc, "caches")

        async def write() -> None:
            while True:
                await bystander.fetch_value("SELECT replicad.invalidate_cache('a', '[1]')")

        nursery.start_soon(write)
        await nc.until("RDATA caches .*")
        await bystander.fetch_value("SELECT replicad.cache_disable()")
        await nc.until("ERROR stream_refused: stream caches .*")
        await check()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "error",
    [
*first(5, [
        OSError("disk"), DatabaseError("z"), BaseExceptionGroup("g", [ValueError("in a group")]),
        UnknownStream("gone"), StreamRefused("s"), MemoryError(), ValueError("x"), AssertionError("y"),
        DatabaseRefused("r"), SchemaMissing("m"),
    ])],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
async def test_a_feed_that_fails_is_reported_and_made_anew_and_the_others_go_on(
    bystander: Database, daemon: Daemon, netcat: Connect, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    follow = ServedStream._follow
    fails = 1

    async def failing(self: ServedStream) -> None:
        nonlocal fails
        if self.name == "events" and fails:
            fails -= 1
            raise error
        await follow(self)

    async with watching_bystander(daemon, bystander) as check:
        monkeypatch.setattr(ServedStream, "_follow", failing)
        await bystander.execute("INSERT INTO events (body) VALUES ('1')")
        await wait_for(lambda: not fails)
        await check()
        assert any(kind == "stream" for kind, _, _ in daemon.troubles.counts)
        async with netcat() as nc:
            await nc.expect("SERVER .*")
            await nc.send("REPLICATE events EARLIEST")
            await nc.until("RDATA events master 1 1")


async def test_the_default_of_the_id_moves_to_another_sequence_and_it_is_reported_with_the_remedy(
    bystander: Database, daemon: Daemon, netcat: Connect
) -> None:
    async with watching_bystander(daemon, bystander), netcat() as nc:
        await connected(nc, "events")
        await bystander.execute(
            "ALTER TABLE events ALTER id DROP DEFAULT; ALTER TABLE events ALTER id ADD GENERATED ALWAYS AS IDENTITY"
        )
        [told] = (await nc.until("ERROR .*"))[-1:]
        assert "takes its ids from sequence" in told
        assert "replicad streams alter events --table public.events" in told
    async with netcat() as nc:
        await nc.expect("SERVER .*")
        await nc.send("REPLICATE events")
        await nc.expect("ERROR stream_refused: .*takes its ids from sequence.*")
    assert "takes its ids" in (daemon.troubles.why("stream", "events") or "")
    assert (await status.show(bystander, "events")).state == "stream_refused"
    await bystander.execute(
        "ALTER TABLE events ALTER id DROP IDENTITY; ALTER TABLE events ALTER id SET DEFAULT nextval('events_id_seq')"
    )
    await wait_for(lambda: daemon.troubles.why("stream", "events") is None)
    await daemon.publisher.find("events")


async def test_a_sequence_that_was_named_on_purpose_raises_no_alarm(database: Database, daemon: Daemon) -> None:
    await database.execute(
        "CREATE SEQUENCE mine; CREATE SEQUENCE plain; CREATE TABLE a (id bigserial PRIMARY KEY);"
        "CREATE TABLE b (id bigint PRIMARY KEY DEFAULT nextval('plain'));"
        "CREATE TABLE c (id bigint PRIMARY KEY)"
    )
    for table in "abc":
        stream = (await Registry(database).add(table, table, "id", sequence="mine")).stream
        assert stream.fault is None
    await database.execute("ALTER TABLE b ALTER id DROP DEFAULT")
    assert (await Registry(database).load_stream("b")).fault is None
    stream = (await Registry(database).add("d", "a", "id")).stream
    assert stream.fault is None
    await database.execute("ALTER TABLE a ALTER id SET DEFAULT nextval('plain')")
    faults = {name: stream.fault for name, stream in (await Registry(database).load_streams()).items()}
    assert [name for name, fault in faults.items() if fault] == ["d"]


async def test_a_schema_that_is_dropped_while_serving_is_a_reason_in_one_sentence(
    bystander: Database, daemon: Daemon, netcat: Connect
) -> None:
    async with netcat() as nc:
        await connected(nc, "events")
        await bystander.execute("DROP SCHEMA replicad CASCADE")
        [told] = (await nc.until("ERROR .*"))[-1:]
        assert re.fullmatch("ERROR stream_waits: .*streams are not installed in schema replicad.*", told)
    async with netcat() as nc:
        await nc.expect("SERVER .*")
        for name in ("events", "nothing"):
            await nc.send(f"REPLICATE {name}")
            await nc.expect(f"ERROR stream_refused: .*{name}.*not installed in schema replicad.*")
    assert "not installed" in (daemon.troubles.why("service", "registry") or "")


async def test_a_server_that_became_a_standby_is_the_reason_that_new_subscribers_get(
    events: Database, daemon: Daemon, netcat: Connect
) -> None:
    daemon.troubles.begin("database", "database", "poll", "Postgres is a standby now", code="standby")
    async with netcat() as nc:
        await nc.expect("SERVER .*")
        await nc.send("REPLICATE events")
        await nc.expect("ERROR stream_refused: stream events cannot be served: Postgres is a standby now")
        daemon.troubles.end("database", "database", "poll")
        await nc.send("REPLICATE events")
        await nc.until("POSITION events .*")


async def test_who_follows_all_streams_is_told_which_do_not_move(
    bystander: Database, daemon: Daemon, netcat: Connect
) -> None:
    await bystander.execute("ALTER SEQUENCE events_id_seq CACHE 5")
    await wait_for(lambda: set(daemon.publisher.served) == {"bystander"})
    async with netcat() as nc:
        await nc.expect("SERVER .*")
        await nc.send("REPLICATE")
        await nc.expect("POSITION bystander master 0 0", "ERROR stream_waits: stream events .*CACHE 1.*")
        await bystander.execute("INSERT INTO bystander (body) VALUES ('1')")
        await nc.until("RDATA bystander master 1 1")
        await bystander.execute("ALTER SEQUENCE events_id_seq CACHE 1")
        await nc.until("POSITION events master 0 0")


@pytest.mark.long
async def test_looks_and_finds_at_once_leave_no_stream_watched_twice_or_not_at_all(
    events: Database, daemon: Daemon
) -> None:
    publisher = daemon.publisher
    await events.execute("CREATE TABLE extra (id bigserial PRIMARY KEY)")

    async def find(delay: float) -> None:
        await trio.sleep(delay)
        with suppress(UnknownStream, StreamRefused):
            await publisher.find("extra")

    for turn in range(10):
        async with trio.open_nursery() as nursery:
            for n in range(20):
                nursery.start_soon(find, n * 0.002)
            nursery.start_soon(Registry(events).add, "extra", "extra", "id")
        with trio.fail_after(HANG):
            assert (await publisher.find("extra")).name == "extra"
        if turn % 2:
            async with trio.open_nursery() as nursery:
                for n in range(20):
                    nursery.start_soon(find, n * 0.002)
                nursery.start_soon(Registry(events).remove, "extra")
        else:
            await Registry(events).remove("extra")
        await wait_for(lambda: "extra" not in publisher.served)
        with pytest.raises(UnknownStream):
            await publisher.find("extra")
        assert set(publisher.served) == {"events"}


async def test_the_publisher_begins_again_after_a_failure_and_streams_are_served(
    events: Database, daemon: Daemon, netcat: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = daemon.publisher
    note = publisher._note_published
    fails = 1

    async def failing() -> None:
        nonlocal fails
        if fails:
            fails -= 1
            raise OSError("disk")
        await note()

    monkeypatch.setattr(publisher, "_note_published", failing)
    await wait_for(lambda: daemon.troubles.why("service", "publisher"))
    await wait_for(lambda: "events" in publisher.served)
    async with netcat() as nc:
        await connected(nc, "events")
        await events.execute("INSERT INTO events (body) VALUES ('1')")
        await nc.until("RDATA events master 1 1")


async def test_a_reset_that_is_found_before_a_feed_is_made_gives_a_new_epoch(
    events: Database, start_daemon: Callable[..., Any]
) -> None:
    stream = await Registry(events).load_stream("events")
    await Registry(events).publish(stream, 100, {"master": 100})
    async with start_daemon() as second:
        feed = await second.publisher.find("events")
        await wait_for(lambda: feed.stream.epoch != stream.epoch)


# --- rights ---


@pytest.fixture
def plain_role(database_url: str, postgres_url: str) -> Iterator[str]:
    """A role that is no superuser and owns nothing but what the daemon installs; may log in."""
    role = f"daemon_{abs(hash(database_url)) % 10**9}"
    psql(database_url, f"CREATE ROLE {role} LOGIN")
    psql(database_url, f"GRANT CREATE ON DATABASE {urlsplit(database_url).path[1:]} TO {role}")
    psql(database_url, "CREATE TABLE denied (id bigserial PRIMARY KEY, n int)")
    psql(database_url, "CREATE TABLE granted (id bigserial PRIMARY KEY, n int)")
    psql(database_url, f"GRANT ALL ON granted, granted_id_seq TO {role}")
    yield role
    psql(database_url, f"DROP OWNED BY {role} CASCADE")
    psql(postgres_url, f"DROP ROLE {role}")


def url_of(role: str, url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{role}@{parts.netloc.rpartition('@')[2]}"))


@pytest.mark.bare_database
async def test_a_stream_that_the_role_may_not_read_is_reported_from_the_first_look_on(
    database: Database, database_url: str, plain_role: str, settings: Any
) -> None:
    from tests.daemons import open_daemon

    async with open_daemon(settings, url_of(plain_role, database_url)) as daemon:
        await Registry(database).add("denied", "denied", "id")
        await Registry(database).add("granted", "granted", "id")
        await daemon.publisher.find("granted")
        async with netcat_to(daemon) as nc, netcat_to(daemon) as follower:
            await nc.expect("SERVER .*")
            await nc.send("REPLICATE denied")
            await nc.expect(f"ERROR stream_refused: .*{plain_role} may not read.*GRANT SELECT ON.*")
            assert "GRANT SELECT ON" in (daemon.troubles.why("stream", "denied") or "")
            await connected(follower, "granted")

            # a served stream: frozen with the reason, and it goes on on the same connection
            await database.execute(f"REVOKE ALL ON granted_id_seq FROM {plain_role}")
            await follower.until("ERROR stream_waits: .*GRANT SELECT ON SEQUENCE.*")
            await nc.send("REPLICATE granted")
            await nc.expect("ERROR stream_refused: .*GRANT SELECT ON SEQUENCE.*")
            assert not daemon.troubles.of("database", "database"), "the others are not held up by it"
            await database.execute("INSERT INTO granted (n) VALUES (1)")
            seen = await status.show(database, "granted")
            assert (seen.lag_rows, seen.state) in ((1, "stream_waits"), (1, "ok"))
            with trio.fail_after(HANG):
                while (await status.show(database, "granted")).state != "stream_waits":
                    await trio.sleep(0.1)
            await database.execute(f"GRANT ALL ON denied, denied_id_seq, granted_id_seq TO {plain_role}")
            await follower.until('RDATA granted master 1 {"id":1,"n":1}')
            await wait_for(lambda: not daemon.troubles.of("stream", "granted"))
            await wait_for(lambda: "denied" in daemon.publisher.served and not daemon.troubles.of("stream", "denied"))
            await nc.send("REPLICATE denied")
            await nc.until("POSITION denied .*")


@pytest.mark.bare_database
async def test_a_role_that_may_only_read_is_told_so_in_one_sentence(
    database: Database, database_url: str, plain_role: str, settings: Any
) -> None:
    from tests.daemons import open_daemon

    psql(database_url, f"ALTER ROLE {plain_role} SET default_transaction_read_only = on")
    with pytest.raises(DatabaseRefused, match="default_transaction_read_only") as refused:
        async with open_daemon(settings, url_of(plain_role, database_url)):
            pass
    assert "\n" not in str(refused.value)
