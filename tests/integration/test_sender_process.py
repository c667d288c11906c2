"""`replicad sender` as a process: killed again and again, stopped, and started with mistakes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from replicad.postgres.bridge import Database
from replicad.sender.signing import derive
from replicad.streams.registry import Registry
from tests.conftest import PATIENCE
from tests.daemons import Daemon

from ..federation_receiver import Receiver, Reply, Request

KILLS = 4
MASTER = "sesame-" * 5

Arguments = Callable[..., list[str]]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver().listening() as listening:
        yield listening


@pytest.fixture
async def facts(database: Database, daemon: Daemon) -> Database:
    await database.execute("CREATE TABLE facts (id bigserial PRIMARY KEY, body json)")
    await Registry(database).add("facts", "public.facts", "id", row="body")
    await daemon.publisher.find("facts")
    return database


@pytest.fixture
def arguments(daemon: Daemon, receiver: Receiver, database_url: str) -> Arguments:
    def made(*more: str, **changes: str) -> list[str]:
        options = {
            "facts": "facts",
            "form": "webhook",
            "url": f"http://127.0.0.1:{receiver.port}/{{destination}}/{{transaction}}",
            "server": str(daemon.addresses[0]),
            "database": database_url,
            "allow-private": "127.0.0.1",
            "allow-http": "127.0.0.1",
            "start": "earliest",
            "retry-first": "50ms",
            "retry-max": "200ms",
            "log-format": "json",
        } | {name.replace("_", "-"): value for name, value in changes.items()}
        named = [part for name, value in options.items() for part in (f"--{name}", value)]
        return [sys.executable, "-m", "replicad", "sender", *named, *more]

    return made


@asynccontextmanager
async def process(arguments: list[str], **named: Any) -> AsyncIterator[trio.Process]:
    """A process that does not outlive the block."""
    async with trio.open_nursery() as nursery:
        started = await nursery.start(partial(trio.run_process, arguments, check=False, **named))
        try:
            yield started
        finally:
            if started.returncode is None:
                started.kill()


async def write(database: Database, number: int, destinations: list[str], room: str) -> None:
    row = {"destinations": destinations, "room": room, "pdu": {"n": number, "room": room}}
    await database.execute("INSERT INTO facts (body) VALUES ($1::text::json)", json.dumps(row))


async def test_killed_at_any_moment_it_delivers_every_fact_in_order_and_repeats_only_under_the_same_id(
    facts: Database, receiver: Receiver, arguments: Arguments, tmp_path: Path
) -> None:
    chance = Random(11)
    names = [f"d{number}" for number in range(12)]
    expected: dict[str, list[int]] = {name: [] for name in names}

    def behave(request: Request) -> Reply:
        draw = chance.random()
        if draw < 0.05:
            return Reply(503)
        if draw < 0.1:
            return Reply(reset=True)  # taken, and nobody hears of it
        return Reply(delay=0.1 * chance.random())

    receiver.behave = behave
    writing = True
    kills = 0

    async def write_facts() -> None:
        number = 0
        while writing:
            chosen = chance.sample(names, 4)
            for name in chosen:
                expected[name].append(number)
            await write(facts, number, chosen, f"r{chance.randrange(3)}")
            number += 1
            await receiver.expect(lambda number=number: sum(receiver.counts.values()) > 4 * number - 1500)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write_facts)
        with (tmp_path / "log").open("ab") as log:
            for _ in range(KILLS):
                before = sum(receiver.counts.values())
                async with process(arguments(), stderr=log) as sender:
                    more = before + chance.randrange(1, 400)
                    await receiver.expect(lambda more=more: sum(receiver.counts.values()) >= more)
                    sender.send_signal(signal.SIGKILL)
                    await sender.wait()
                    kills += 1
            writing = False
            async with process(arguments(), stderr=log):
                await receiver.expect(lambda: all(receiver.counts[n] == len(expected[n]) for n in names), 60)
    assert kills == KILLS
    assert {name: [found["n"] for found in receiver.facts(name)] for name in names} == expected
    assert receiver.repeats > 0, "nothing was cut off while it was on its way"
    assert receiver.most_in_flight == 1
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.long
async def test_senders_of_two_streams_that_are_killed_lose_nothing_though_receivers_refuse_facts(
    facts: Database, daemon: Daemon, receiver: Receiver, arguments: Arguments, tmp_path: Path
) -> None:
    """Each fact is taken once or parked, and what is taken comes in order, for each stream by itself."""
    await facts.execute("CREATE TABLE more (id bigserial PRIMARY KEY, body json)")
    await Registry(facts).add("more", "public.more", "id", row="body")
    await daemon.publisher.find("more")
    chance = Random(17)
    names = ["a", "b", "c"]
    bad = {number for number in range(240) if chance.random() < 0.04}

    def behave(request: Request) -> Reply:
        if any(found["n"] in bad for found in request.facts):
            return Reply(chance.choice([400, 413, 422]))
        return Reply(503) if chance.random() < 0.03 else Reply(reset=chance.random() < 0.03)

    receiver.behave = behave
    streams = ["facts", "more"]

    async def write_to(stream: str, numbers: range) -> None:
        for number in numbers:
            row = json.dumps({"destinations": names, "pdu": {"n": number, "of": stream}})
            await facts.execute(f"INSERT INTO {stream} (body) VALUES ($1::text::json)", row)

    with (tmp_path / "log").open("ab") as log:
        for part in range(2):
            async with process(arguments(), stderr=log) as one, process(arguments(facts="more"), stderr=log) as two:
                for stream in streams:
                    await write_to(stream, range(120 * part, 120 * part + 120))
                before = len(receiver.requests)
                await receiver.expect(lambda before=before: len(receiver.requests) > before + 4)
                for sender in (one, two):
                    sender.send_signal(signal.SIGKILL)
                    await sender.wait()
        async with process(arguments(), stderr=log), process(arguments(facts="more"), stderr=log):
            for stream in streams:
                await write_to(stream, range(240, 243))  # what is refused last is parked when these are accepted

            def last() -> bool:
                return all({"n": 242, "of": stream} in receiver.facts(name) for name in names for stream in streams)

            await receiver.expect(last, 90)
    rows = await facts.fetch("SELECT destination, body::text FROM replicad.federation_parked ORDER BY id")
    for name in names:
        for stream in streams:
            taken = [found["n"] for found in receiver.facts(name) if found["of"] == stream]
            found = [json.loads(row["body"]) for row in rows if row["destination"] == name]
            parked = [one["n"] for one in found if one["of"] == stream]
            assert taken == sorted(taken), "out of order"
            assert sorted([*taken, *parked]) == list(range(243)), "lost, or twice"
            assert bad <= {*parked}
    assert "Traceback" not in (tmp_path / "log").read_text()


async def test_sigterm_lets_what_is_under_way_end_and_the_secret_of_the_file_is_in_no_log(
    facts: Database, receiver: Receiver, arguments: Arguments, tmp_path: Path
) -> None:
    file, log = tmp_path / "sender.toml", tmp_path / "log"
    file.write_text(f'sign = "bearer"\nfederation_secret = "{MASTER}"\nconcurrency = 3\n')
    receiver.behave = lambda _: Reply(delay=0.5)
    with log.open("wb") as out:
        async with process(arguments("--config", str(file), "--log-level", "debug"), stderr=out) as sender:
            await write(facts, 1, ["a"], "r")
            await receiver.expect(lambda: receiver.counts["a"] == 1)
            sender.send_signal(signal.SIGTERM)
            with trio.fail_after(PATIENCE):
                assert await sender.wait() == 0
    done = "SELECT last_successful_stream_ordering, txn_id FROM replicad.federation_destination"
    assert tuple(await facts.fetch_row(done)) == (1, None)
    assert receiver.requests[0].headers["authorization"] == f"Bearer {derive(MASTER, 'a')}"
    assert "sesame" not in log.read_text()
    assert derive(MASTER, "a") not in log.read_text()


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"facts": "nonsense"}, 6, "nonsense"),
        pytest.param({"server": "127.0.0.1:1"}, 4, "no connection to 127.0.0.1:1", marks=pytest.mark.long),
        ({"database": "postgresql://127.0.0.1:1/x"}, 4, "127.0.0.1:1"),
    ],
    ids=["facts", "server", "database"],
)
async def test_what_cannot_be_reached_is_said_in_one_sentence(
    facts: Database, arguments: Arguments, tmp_path: Path, changes: dict[str, str], status: int, said: str
) -> None:
    with trio.fail_after(PATIENCE):
        done = await trio.run_process(
            arguments("--log-level", "error", **changes), check=False, capture_stderr=True, cwd=tmp_path
        )
    stderr = done.stderr.decode()
    assert said in stderr
    assert (done.returncode, len(stderr.strip().splitlines())) == (status, 1), stderr
