"""A walk through every feature on a database as managed services give it: nobody is a superuser, at any time.

The administrator owns the database and may create roles. What `replicad sql roles` prints is all that he grants.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import trio

from replicad.config.settings import ServerSettings
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.schema_text import Roles, script
from replicad.sender.intake import client_upstream
from replicad.sender.sender import Sender
from replicad.sender.settings import Delivery, SenderBounds, SenderSettings
from replicad.streams.registry import Registry
from tests.conftest import PATIENCE, psql
from tests.daemons import Daemon, open_daemon
from tests.roles import as_role

from ..federation_receiver import Receiver
from .conftest import netcat_to
from .test_presence import NEVER, enable, following, told

pytestmark = pytest.mark.bare_database

TABLES = """
    SET ROLE {owner};
    CREATE TABLE app.watched (id bigserial PRIMARY KEY, body json);
    CREATE TABLE app.reserved (id bigserial PRIMARY KEY, body json);
    CREATE TABLE app.published (id bigserial PRIMARY KEY, writer text, body json);
    CREATE TABLE app.positions (stream_name text, instance_name text, stream_id bigint);
    CREATE TABLE app.facts (id bigserial PRIMARY KEY, body json);
    CREATE TABLE app.cities (id bigint PRIMARY KEY, name text);
    GRANT USAGE ON SCHEMA app TO {writer};
    GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA app TO {writer};
    GRANT USAGE ON SEQUENCE app.watched_id_seq, app.published_id_seq, app.facts_id_seq TO {writer};
"""


@asynccontextmanager
async def world(url: str, postgres_url: str) -> AsyncIterator[dict[str, str]]:
    """The URL of each role, by what it does."""
    names = {name: f"{name}_{abs(hash(url)) % 10**9}" for name in ("admin", "daemon", "owner", "writer", "operator")}
    database = urlsplit(url).path[1:]
    psql(url, f"CREATE ROLE {names['admin']} LOGIN CREATEROLE; ALTER DATABASE {database} OWNER TO {names['admin']}")
    admin = as_role(url, names["admin"])
    try:
        psql(admin, script(Roles(names["daemon"], [names["owner"]], [names["writer"]], [names["operator"]])))
        psql(admin, f"GRANT {names['owner']} TO {names['admin']}; CREATE SCHEMA app AUTHORIZATION {names['owner']}")
        psql(admin, TABLES.format(**names))
        yield {role: as_role(url, name) for role, name in names.items()}
        assert psql(url, f"SELECT count(*) FROM pg_roles WHERE rolsuper AND rolname IN {tuple(names.values())}") == "0"
    finally:
        psql(postgres_url, f"ALTER DATABASE {database} OWNER TO postgres")
        psql(url, *(f"DROP OWNED BY {name} CASCADE" for name in names.values()))
        psql(postgres_url, *(f"DROP OWNED BY {name} CASCADE" for name in names.values()))
        psql(postgres_url, *(f"DROP ROLE {name}" for name in reversed(names.values())))


async def test_every_feature_works_where_nobody_is_a_superuser(
    database_url: str, postgres_url: str, settings: ServerSettings, database: Database
) -> None:
    async with world(database_url, postgres_url) as url:
        async with (
            open_daemon(settings, url["daemon"]) as daemon,
            open_database(url["daemon"], size=2, application_name="administers") as ours,
            open_database(url["writer"], size=2, application_name="writes") as writer,
            open_database(url["owner"], size=1, application_name="owns") as owner,
        ):
            await streams(daemon, ours, writer)
            with trio.fail_after(PATIENCE):
                while not (seen := (await Registry(ours).published()).get("watched")) or seen.position < 1:
                    await trio.sleep(0.05)
            assert (await Registry(owner).trim("watched", before=1)).rows == 1
            await tube(daemon, ours, writer)
            await caches_and_sharing(daemon, ours, writer, url)
            await presence(daemon, ours)
            await sender(daemon, ours, writer, url["daemon"])
            assert not daemon.troubles.current()
        async with open_daemon(settings, url["daemon"]) as again:
            assert set(again.publisher.served) == {"watched", "reserved", "published", "facts", "caches", "presence"}


async def streams(daemon: Daemon, ours: Database, writer: Database) -> None:
    """All three methods."""
    await Registry(ours).add("watched", "app.watched", "id", row="t.body")
    await Registry(ours).add("reserved", "app.reserved", "id", row="t.body", method="reservation")
    await Registry(ours).add(
        "published", "app.published", "id", instance_column="writer", row="t.body",
        method="positions_table", positions_table="app.positions",
    )  # fmt: skip
    await writer.execute("INSERT INTO app.positions VALUES ('published', 'w', 0)")
    async with netcat_to(daemon) as nc:
        for name in ("watched", "reserved", "published"):
            await daemon.publisher.find(name)
            await nc.send(f"REPLICATE {name} NOW")
            await nc.until(f"POSITION {name} .*")
        await writer.execute("INSERT INTO app.watched (body) VALUES ('1')")
        await nc.until("RDATA watched master 1 1")
        await writer.execute("INSERT INTO app.published (writer, body) VALUES ('w', '3')")
        await writer.execute("UPDATE app.positions SET stream_id = 1")
        await nc.until("RDATA published w 1 3")
    async with netcat_to(daemon) as nc:
        await nc.send("REPLICATE watched EARLIEST")
        await nc.until("RDATA watched master 1 1")


async def tube(daemon: Daemon, ours: Database, writer: Database) -> None:
    """Touches by triggers with a predicate and a routing, a backfill, touching by hand; worked off."""
    await writer.execute("INSERT INTO app.cities VALUES (1, 'before')")
    await ours.execute("SELECT tube.tube_ensure_exists('a')")
    await ours.execute("SELECT tube.tube_table_ensure_attached('a', 'app.cities', 0, $$name <> 'x'$$, '0')")
    await ours.execute("SELECT tube.tube_backfill_schedule('a', 'id', 0, 0)")
    await writer.execute("INSERT INTO app.cities VALUES (2, 'after'), (3, 'x')")
    await writer.execute("SELECT app.cities_touch('{2}')")
    async with netcat_to(daemon) as nc:
        await nc.expect("SERVER .*")
        await nc.send("CLAIM a 0/1 holder=w")
        [lease] = await nc.expect("LEASE a 0/1 .*")
        term, ids = lease.split()[3], set[tuple[str, int]]()
        with trio.fail_after(PATIENCE):
            while ids != {("I", 2), ("T", 2), ("B", 1), ("B", 2)}:
                await nc.send(f"PODS a 0/1 {term} wait=1")
                for line in (await nc.until("CURSOR .*"))[:-1]:
                    if line.startswith("RDATA"):
                        row = json.loads(line.split(" ", 4)[4])
                        ids |= {(row["op"], number) for number in row["ids"]}
                        await nc.send(f"ACK a 0/1 {term} {row['seq']}")
                        await nc.until("ACKED .*")


async def caches_and_sharing(daemon: Daemon, ours: Database, writer: Database, url: dict[str, str]) -> None:
    """The rights of writers come from the same script, run once more."""
    names = {role: urlsplit(one).username or "" for role, one in url.items()}
    await schema.install(ours, "cache")
    await schema.install(ours, "sharding")
    await ours.execute("SELECT replicad.cache_enable(), replicad.writer_enable('watched')")
    least = script(Roles(names["daemon"], [names["owner"]], [names["writer"]], [names["operator"]]))
    await trio.to_thread.run_sync(psql, url["daemon"], least)  # as the owner of what is granted now
    await trio.to_thread.run_sync(psql, url["operator"], "SELECT count(*) FROM tube.tube_lease")
    await daemon.publisher.find("caches")
    async with netcat_to(daemon) as nc:
        await nc.send("REPLICATE caches NOW")
        await nc.until("POSITION caches .*")
        await writer.execute("SELECT replicad.invalidate_cache('get_user', '[7]')")
        line = (await nc.until("RDATA caches master .*"))[-1]
        assert json.loads(line.split(" ", 4)[4])[:2] == ["get_user", [7]]
    async with netcat_to(daemon) as nc:
        await nc.send("REPLICATE reserved NOW")
        await nc.until("POSITION reserved .*")
        await writer.execute("INSERT INTO app.reserved (id, body) VALUES (replicad.stream_next('reserved'), '2')")
        await nc.until(r"RDATA reserved master \d+ 2")
    term = (await writer.fetch("SELECT * FROM replicad.writer_join('watched', 'w', '10 s')"))[0]["term"]
    assert await writer.fetch_value("SELECT count(*) FROM replicad.writer_slot") > 0
    await writer.execute(f"SELECT replicad.writer_leave('watched', 'w', {term})")


async def presence(daemon: Daemon, ours: Database) -> None:
    await schema.install(ours, "presence")
    await enable(ours, daemon, **NEVER)
    async with netcat_to(daemon) as worker, following(daemon) as reader:
        await worker.send("USER_SYNC w1 @a:b P start 1")
        await told(reader, "@a:b", "online")


async def sender(daemon: Daemon, ours: Database, writer: Database, url: str) -> None:
    await Registry(ours).add("facts", "app.facts", "id", row="t.body")
    await daemon.publisher.find("facts")
    async with Receiver().listening() as receiver, trio.open_nursery() as nursery:
        to = f"http://127.0.0.1:{receiver.port}/{{destination}}/{{transaction}}"
        made = SenderSettings(
            facts="facts", updates=(), delivery=Delivery(form="webhook", url=to, allow_private=("127.0.0.1",)),
            bounds=SenderBounds(retry_first=0.05, retry_max=0.2, sweep_interval=0.2),
        )  # fmt: skip
        address = daemon.addresses[0]
        upstream = client_upstream(address.host, address.port, name=made.sender_name)
        running = Sender(made, url=url, schema="replicad", open_upstream=upstream)
        await nursery.start(running.run)
        body = json.dumps({"destinations": ["a"], "pdu": {"n": 1}})
        await writer.execute("INSERT INTO app.facts (body) VALUES ($1::text::json)", body)
        await receiver.expect(lambda: receiver.counts["a"] == 1)
        running.stop()
