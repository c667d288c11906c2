"""A daemon of version 1, from the repository's history, goes on beside one of this version that upgrades the schema."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import trio

from replicad.config.settings import Address, parse_address
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from tests.conftest import install, psql
from tests.daemons import Daemon
from tests.roles import DAEMON, as_daemon
from tests.schema import older

from .conftest import Netcat

pytestmark = [pytest.mark.bare_database, pytest.mark.postgres, pytest.mark.timeout(240)]

PATIENCE = 60.0  # seconds; only a hang takes so long
THEN = [part for part in schema.PARTS if part != "redis"]  # the parts that the older program has

TABLES = """
CREATE TABLE events (id bigserial PRIMARY KEY, data text);
CREATE TABLE reserved (id bigserial PRIMARY KEY, data text);
CREATE TABLE cities (id bigint PRIMARY KEY, name text);
SELECT replicad.stream_add('events', 'events', 'id');
SELECT replicad.stream_add('reserved', 'reserved', 'id', method => 'reservation');
SELECT replicad.writer_enable('events', 8), replicad.cache_enable('{}');
SELECT replicad.presence_enable('0 s', '0 s', NULL, NULL);
SELECT tube.tube_ensure_exists('cities', 1);
SELECT tube.tube_table_ensure_attached('cities', 'cities', 0);
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 of replicad, unpacked."""
    return older.unpack(older.V1, tmp_path_factory.mktemp("older"))


@asynccontextmanager
async def older_daemon(tree: Path, url: str, folder: Path) -> AsyncIterator[Address]:
    """A daemon of that tree as a process; at the end it stops as SIGTERM stops it, and has logged nothing bad."""
    ready, log = folder / "older.address", folder / "older.log"
    command = [sys.executable, "-m", "replicad", "serve", "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
    with log.open("wb") as output:
        process = await trio.lowlevel.open_process(
            [*command, "--log-format", "json"], cwd=tree, env=older.environment(tree, REPLICAD_DATABASE=as_daemon(url)),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        with trio.fail_after(PATIENCE):
            while not ready.exists():
                assert process.poll() is None, log.read_text()
                await trio.sleep(0.05)
        yield parse_address(ready.read_text().strip())
        process.terminate()
        with trio.fail_after(PATIENCE):
            assert await process.wait() == 0, log.read_text()
    finally:
        process.kill()
        await process.wait()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    bad = [event for event in events if event["level"] in ("warning", "error", "critical")]
    assert [event for event in bad if event["event"] != "parked"] == []


@asynccontextmanager
async def netcat(address: Address, name: str) -> AsyncIterator[Netcat]:
    async with await trio.open_tcp_stream(address.host, address.port) as stream:
        nc = Netcat(stream)
        await nc.until("SERVER .*")
        await nc.send(f"NAME {name}")
        yield nc


async def next_data(nc: Netcat, stream: str) -> str:
    """The JSON of the next row of the stream."""
    lines = await nc.until(f"RDATA {stream} .*")
    return lines[-1].split(" ", 4)[4]


async def pods(nc: Netcat, term: int, ids: list[int]) -> list[int]:
    """Read pods until one has these ids; the numbers of all that were read."""
    with trio.fail_after(PATIENCE):
        while True:
            await nc.send(f"PODS cities 0/1 {term} wait=5")
            lines = await nc.until("CURSOR .*")
            found = [json.loads(line.split(" ", 4)[4]) for line in lines if line.startswith("RDATA tube:")]
            if any(pod["ids"] == ids for pod in found):
                return [pod["seq"] for pod in found]


async def test_an_older_daemon_goes_on_beside_one_that_upgrades_the_schema(
    tree: Path,
    database: Database,
    database_url: str,
    tmp_path: Path,
    start_daemon: Callable[..., AbstractAsyncContextManager[Daemon]],
) -> None:
    await database.execute(f"GRANT CREATE ON SCHEMA public TO {DAEMON}")
    async with (
        open_database(as_daemon(database_url), size=1, application_name="test") as of_daemon,
        of_daemon.connection() as connection,
    ):
        await connection.execute(Path(older.__file__).with_name("v1.sql").read_text(encoding="utf-8"))
    psql(as_daemon(database_url), TABLES)
    assert await versions(database) == dict.fromkeys(THEN, 1)
    async with older_daemon(tree, database_url, tmp_path) as address:
        assert await versions(database) == dict.fromkeys(THEN, 1)
        async with netcat(address, "follower") as follower, netcat(address, "worker") as worker:
            await follower.send("REPLICATE events EARLIEST", "REPLICATE caches EARLIEST", "REPLICATE presence EARLIEST")
            await follower.until("POSITION presence .*")
            term = await before(database, follower, worker)
            async with start_daemon() as daemon:
                assert await versions(database) == {part: schema.PARTS[part].version for part in THEN}
                install(database_url, *THEN)  # also what is unchanged
                async with netcat(daemon.addresses[0], "newer") as newer:
                    await newer.send("REPLICATE events EARLIEST", "REPLICATE caches EARLIEST")
                    await newer.send("REPLICATE presence EARLIEST")
                    await beside(database, follower, worker, newer, term)
                async with netcat(address, "late") as late, netcat(daemon.addresses[0], "late") as late_newer:
                    await catch_up(database, late, late_newer)
            await writing(database, follower, "the newer one has gone")
        # The older program's commands look at the version first.
        refused = await trio.to_thread.run_sync(
            lambda: older.command(tree, "streams", "list", REPLICAD_DATABASE=database_url)
        )
        assert refused.returncode == 1
        assert "use the newer replicad" in refused.stderr


async def versions(database: Database) -> dict[str, int]:
    """What is installed, by part."""
    found = {part: await schema.read_installed(database, part) for part in schema.PARTS}
    return {part: installed.version for part, installed in found.items() if installed is not None}


async def before(database: Database, follower: Netcat, worker: Netcat) -> int:
    """What the older daemon does alone. Returns the term of a lease that is kept."""
    await writing(database, follower, "alone")
    await database.execute("INSERT INTO cities VALUES (1, 'a'), (2, 'a')")
    await worker.send("CLAIM cities 0/1 ttl=120")
    [lease] = await worker.expect(r"LEASE cities 0/1 \d+ 120")
    return int(lease.split()[3])


async def beside(database: Database, follower: Netcat, worker: Netcat, newer: Netcat, term: int) -> None:
    """All that the older daemon is asked for, on the upgraded schema, and the same of the newer one."""
    assert "alone" in await next_data(newer, "events")
    await writing(database, follower, "beside", newer)
    await database.execute("SELECT replicad.invalidate_cache('get_user', '[\"a\"]')")
    for nc in (follower, newer):
        assert "get_user" in await next_data(nc, "caches")
    for number, (nc, user) in enumerate(((worker, "@old:a"), (newer, "@new:a"))):
        await nc.send(f"USER_SYNC w{number} {user} PHONE start 1490197670513")
        for reader in (follower, newer):
            assert user in await next_data(reader, "presence")
    await worker.send(
        'USER_IP @old:a ["token","127.0.0.1","agent","PHONE",1490197670513]', "FEDERATION_ACK s1 1 events"
    )

    # The lease of before is still the older daemon's client's; the newer daemon knows it, and gives the next one.
    await newer.send("CLAIM cities 0/1")
    await newer.until("ERROR lease_held: .*")
    seqs = await pods(worker, term, [1, 2])
    await worker.send(f"ACK cities 0/1 {term} {seqs[0]}")
    await worker.until("ACKED cities 0/1 1")
    await database.execute("UPDATE cities SET name = 'b' WHERE id = 2")
    seqs = await pods(worker, term, [2])
    await worker.send(f"PARK cities 0/1 {term} {seqs[0]} 2 5 column gone", 'REPORT cities copy {"batch":1}')
    await worker.until("REPORT cities copy")
    await worker.send(f"RENEW cities 0/1 {term}", f"RELEASE cities 0/1 {term}")
    await worker.until(f"RELEASE cities 0/1 {term}")
    await newer.send("CLAIM cities 0/1")
    [*_, lease] = await newer.until(r"LEASE cities 0/1 \d+ .*")
    later = int(lease.split()[3])
    assert later > term
    await database.execute("DELETE FROM cities WHERE id = 1")
    seqs = await pods(newer, later, [1])
    await newer.send(f"ACK cities 0/1 {later} {seqs[-1]}", f"RELEASE cities 0/1 {later}")
    await newer.until(f"RELEASE cities 0/1 {later}")
    assert await database.fetch_value("SELECT count(*) FROM tube.cities") == 0
    assert await database.fetch_value("SELECT array_agg(ids) FROM tube.tube_parked") == [[2]]
    await worker.send("CLAIM cities 0/1")
    [*_, lease] = await worker.until(r"LEASE cities 0/1 \d+ .*")
    assert int(lease.split()[3]) > later
    await until_acked(database)


async def until_acked(database: Database) -> None:
    with trio.fail_after(PATIENCE):
        while not await database.fetch_value("SELECT count(*) FROM replicad.stream_acks('events')"):
            await trio.sleep(0.05)


async def catch_up(database: Database, *late: Netcat) -> None:
    """Both daemons give the same rows to readers that come after the upgrade, under the same tokens."""
    found = []
    for nc in late:
        await nc.send("REPLICATE events EARLIEST")
        lines = await nc.until(r"RDATA events .*beside.*")
        found.append([line for line in lines if line.startswith("RDATA")])
    assert found[0] == found[1]
    assert await database.fetch_value("SELECT count(*) FROM events") == len(found[0])


async def writing(database: Database, follower: Netcat, text: str, *others: Netcat) -> None:
    """A row that all of them receive under the same token."""
    await database.execute("INSERT INTO events (data) VALUES ($1)", text)
    lines = [(await nc.until(f"RDATA events .*{re.escape(text)}.*"))[-1] for nc in (follower, *others)]
    assert len(set(lines)) == 1


async def test_an_older_daemon_refuses_to_start_on_the_upgraded_schema(
    tree: Path, database: Database, database_url: str
) -> None:
    assert schema.PARTS["stream"].version > 1
    await schema.install(database, "stream")
    await schema.install(database, "tube")
    before = await database.fetch("SELECT oid, xmin::text FROM pg_proc ORDER BY oid")
    result = await trio.to_thread.run_sync(
        lambda: older.command(tree, "serve", "--listen", "127.0.0.1:0", REPLICAD_DATABASE=database_url)
    )
    assert result.returncode == 1
    assert f"holds version {schema.PARTS['stream'].version} of the stream part, this replicad knows 1" in result.stderr
    assert await database.fetch("SELECT oid, xmin::text FROM pg_proc ORDER BY oid") == before
