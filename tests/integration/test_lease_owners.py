"""To whom a lease belongs: to a connection or a key under one name, and to a client of the access file."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import trio

from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.daemons import Daemon

from .conftest import Netcat, netcat_to
from .test_tubes_wire import claim, insert, make_cities

HELD = "ERROR lease_held: partition 0/2 of tube 'cities' is held by me\\. .*"
SECRET = "a-secret-of-enough-characters"


@asynccontextmanager
async def connected(daemon: Daemon, *lines: str) -> AsyncIterator[Netcat]:
    async with netcat_to(daemon) as nc:
        await nc.expect("SERVER .*")
        await nc.send(*lines)
        yield nc


async def refused(nc: Netcat, line: str, pattern: str) -> None:
    await nc.send(line)
    await nc.expect(pattern)


@pytest.fixture
async def cities(database: Database) -> Database:
    await make_cities(database)
    await insert(database, 0, 1, 2, 3)
    return database


@pytest.mark.parametrize("daemons", [1, 2])
async def test_two_replicas_with_one_name_never_have_a_lease_together(
    cities: Database, start_daemon: Callable[..., Any], daemons: int
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(start_daemon())
        second = first if daemons == 1 else await stack.enter_async_context(start_daemon())
        side = await stack.enter_async_context(connected(first))
        replica = await stack.enter_async_context(connected(second))
        async with connected(first) as nc:
            term = await claim(nc, "0/2", "holder=me")
            assert await claim(nc, "0/2", "holder=me") == term, "on its own connection it keeps its term"
            await refused(replica, "CLAIM cities 0/2 holder=me", HELD)
            await side.send(f"PODS cities 0/2 {term} limit=1")
            await side.expect("RDATA .*", "CURSOR .*")
            await replica.send("CLAIM cities 0/2 holder=me wait=60")
        [lease] = await replica.expect("LEASE cities 0/2 .*")
        assert int(lease.split()[3]) != term
        for request in (f"PODS cities 0/2 {term}", f"ACK cities 0/2 {term} 1", f"RENEW cities 0/2 {term}"):
            await refused(side, request, "ERROR lease_lost: .*held by me\\. .*")


async def test_a_key_shares_a_lease_and_resumes_it_with_its_term(
    cities: Database, start_daemon: Callable[..., Any]
) -> None:
    async with start_daemon() as daemon, connected(daemon) as other:
        async with connected(daemon) as nc:
            term = await claim(nc, "0/2", "holder=me!one")
            assert await claim(other, "0/2", "holder=me!one") == term
            for holder in ("me", "me!two", "me!"):
                await refused(other, f"CLAIM cities 0/2 holder={holder}", HELD)
        await refused(other, "CLAIM cities 0/2 holder=me", HELD)
        assert await claim(other, "0/2", "holder=me!one") == term
        stored = await cities.fetch_value("SELECT holder FROM tube.tube_lease")
        assert stored.startswith("me k")
        assert "one" not in stored, "the key itself is not stored"


async def test_a_daemon_that_stops_lets_go_of_what_its_connections_have_claimed(
    cities: Database, start_daemon: Callable[..., Any]
) -> None:
    async with start_daemon() as stays:
        async with start_daemon() as stops, connected(stops) as nc:
            await claim(nc, "0/2", "holder=me ttl=3600")
        async with connected(stays) as nc:
            with trio.fail_after(PATIENCE):
                await claim(nc, "0/2", "holder=me ttl=3600")


async def test_one_client_cannot_use_take_over_or_learn_the_leases_of_another(
    cities: Database, start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "access.toml"
    digests = {name: sha256(f"{SECRET}{name}".encode()).hexdigest() for name in "ab"}
    file.write_text(
        "".join(
            f'[client.{name}]\ntoken_sha256 = "{digest}"\nallow = ["work cities", "park cities"]\n'
            for name, digest in digests.items()
        )
    )
    auth = {name: f"AUTH {name}.{SECRET}{name}" for name in "ab"}
    async with start_daemon(access_file=file) as daemon, connected(daemon, auth["b"]) as b:
        async with connected(daemon, auth["a"]) as a, connected(daemon, auth["a"]) as side:
            term = await claim(a, "0/2", "holder=me!key")
            await refused(b, "CLAIM cities 0/2 holder=me!key", "ERROR lease_held: .* is held by a/me\\. .*")
            await refused(b, "CLAIM cities 0/2 holder=a/me!key", "ERROR lease_held: .* is held by a/me\\. .*")
            for request in ("PODS", "ACK {} 1", "RENEW", "PARK {} 1 * 1 x", "RELEASE"):
                name, _, rest = request.partition(" {}")
                line = f"{name} cities 0/2 {term}{rest}"
                await refused(b, line, f"ERROR lease_lost: term {term} of tube 'cities' is not a lease of client b")
            await side.send(f"PODS cities 0/2 {term} limit=1")
            await side.expect("RDATA .*", "CURSOR .*")
            [seq] = [row["seq"] for row in await cities.fetch("SELECT seq FROM tube.cities ORDER BY seq LIMIT 1")]
            await side.send(f"ACK cities 0/2 {term} {seq}")
            await side.expect("ACKED cities 0/2 1")
            other = await claim(b, "1/2", "holder=me")
            await refused(a, f"RENEW cities 1/2 {other}", "ERROR lease_lost: .*")
        await refused(b, "CLAIM cities 0/2 holder=me!key", "ERROR lease_held: .*")


async def test_the_terms_of_one_lease_do_not_tell_those_of_another(
    cities: Database, start_daemon: Callable[..., Any]
) -> None:
    """Without an access file a term is all that stands between a worker and a stranger who counts."""
    async with start_daemon() as daemon, connected(daemon) as nc, connected(daemon) as stranger:
        terms = []
        for _ in range(8):
            terms.append(await claim(nc, "0/2", "holder=me"))
            await nc.send(f"RELEASE cities 0/2 {terms[-1]}")
            await nc.expect("RELEASE .*")
        held = await claim(nc, "0/2", "holder=me")
        steps = {b - a for a, b in itertools.pairwise([*terms, held])}
        assert len(steps) == len(terms), steps
        assert min(steps) > 0, "a downstream can refuse what comes under an older one"
        guesses = [*range(1, 20), *(terms[-1] + step for step in steps if terms[-1] + step != held), held - 1, held + 1]
        await stranger.send(*(f"RELEASE cities 0/2 {guess}" for guess in guesses))
        await stranger.expect(*["RELEASE .*"] * len(guesses))
        await stranger.send(f"ACK cities 0/2 {held + 1} 1")
        await stranger.expect("ERROR lease_lost: .*")
        await nc.send(f"RENEW cities 0/2 {held}")
        await nc.expect("LEASE .*")
