"""One broken tube: it says why, on the wire and in the lists, and the other tube goes on as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from replicad.errors import DatabaseError
from replicad.postgres.bridge import Database
from replicad.streams.daemons import DaemonReports
from replicad.tubes.backfill import BackfillIntervals
from replicad.tubes.serving.waiting import TubeIntervals
from tests.commands import replicad
from tests.daemons import Daemon, Paces
from tests.lengths import first

from .conftest import Connect, Netcat

PATIENCE = 60  # seconds, for a hang


@pytest.fixture(autouse=True)
def _no_tracebacks() -> Iterator[None]:
    """Structlog's default for people draws each traceback with all its variables, which takes seconds."""
    with capture_logs():
        yield


BREAKS = {
    "dropped": "DROP TABLE tube.bad",
    "renamed": "ALTER TABLE tube.bad RENAME TO worse",
    "moved": "CREATE SCHEMA elsewhere; ALTER TABLE tube.bad SET SCHEMA elsewhere",
    "another table": "DROP TABLE tube.bad; CREATE TABLE tube.bad (n integer)",
    "a view": "ALTER TABLE tube.bad RENAME TO worse; CREATE VIEW tube.bad AS SELECT * FROM tube.worse",
    "a column gone": "ALTER TABLE tube.bad DROP COLUMN ids",
    "no rights": "REVOKE ALL ON tube.bad FROM tube_daemon",
}


@pytest.fixture
async def tubes(database: Database) -> Database:
    """Two tubes, `bad` and `good`, each with a table of 1,000 rows attached; a role that may use them and no more."""
    from replicad.postgres import schema

    await schema.install(database, "tube")
    await schema.install(database, "stream")
    for name in ("bad", "good"):
        await database.execute(
            f"CREATE TABLE {name}_rows AS SELECT g::bigint AS id FROM generate_series(1, 1000) AS g;"
            f"ALTER TABLE {name}_rows ADD PRIMARY KEY (id);"
            f"SELECT tube.tube_ensure_exists('{name}'), tube.tube_table_ensure_attached('{name}', '{name}_rows', 0)"
        )
    return database


@pytest.fixture
async def as_role(tubes: Database, database_url: str) -> AsyncIterator[str]:
    """URL of a role that has what a daemon needs, granted one by one."""
    await tubes.execute(
        "DROP ROLE IF EXISTS tube_daemon; CREATE ROLE tube_daemon LOGIN PASSWORD 'x';"
        "GRANT USAGE ON SCHEMA tube, replicad TO tube_daemon;"
        "GRANT ALL ON ALL TABLES IN SCHEMA tube, replicad, public TO tube_daemon;"
        "GRANT ALL ON ALL SEQUENCES IN SCHEMA tube, replicad TO tube_daemon;"
        "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tube, replicad TO tube_daemon"
    )
    yield database_url.replace("postgres@", "tube_daemon@", 1)
    await tubes.execute("DROP OWNED BY tube_daemon; DROP ROLE tube_daemon")


async def until(look: Callable[[], Awaitable[Any]]) -> None:
    with trio.fail_after(PATIENCE):
        while not await look():
            await trio.sleep(0.02)


async def until_true(look: Callable[[], Any]) -> None:
    async def looked() -> Any:
        return look()

    await until(looked)


async def claim(nc: Netcat, tube: str) -> int:
    await nc.send(f"CLAIM {tube} 0/1")
    [lease] = await nc.expect(f"LEASE {tube} 0/1 \\d+ [\\d.]+")
    return int(lease.split()[3])


async def read(nc: Netcat, tube: str, term: int, after: str = "0.0") -> tuple[list[int], str]:
    """The ids of an answer to PODS that waits for some, and its cursor."""
    ids: list[int] = []
    await nc.send(f"PODS {tube} 0/1 {term} after={after} wait=30 limit=100000")
    while True:
        [line] = await nc.expect("(RDATA|CURSOR) .*")
        if line.startswith("CURSOR"):
            return ids, line.split(" ")[3]
        ids += json.loads(line.split(" ", 4)[4])["ids"]


async def use(nc: Netcat, database: Database, term: int, new: int) -> None:
    """A backfill, live rows that wake a waiting reader, PODS and ACK on the good tube."""
    await database.fetch_value("SELECT tube.tube_backfill_schedule('good', 'id', 0, 0)")
    await until(
        lambda: database.fetch_value("SELECT count(*) > 0 FROM tube.good WHERE payload ->> 'type' = 'backfill_end'")
    )
    seen: set[int] = set()
    after = "0.0"
    with trio.fail_after(PATIENCE):
        while not {new, *range(1, 1001)} <= seen:
            if len(seen) >= 1000:
                await database.execute("INSERT INTO good_rows VALUES ($1) ON CONFLICT DO NOTHING", new)
            ids, after = await read(nc, "good", term, after)
            seen.update(ids)
    await nc.send(f"ACK good 0/1 {term} upto={after}")
    await nc.expect("ACKED good 0/1 [1-9]\\d*")
    await until(lambda: database.fetch_value("SELECT count(*) = 0 FROM tube.good"))


def cli(url: str, *words: str) -> list[dict[str, Any]]:
    done = replicad(*words, "--json", "--database", url)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("how", first(4, BREAKS))
async def test_a_broken_tube_says_why_everywhere_and_stops_nothing_of_the_other(
    tubes: Database, as_role: str, settings: Any, how: str
) -> None:
    from dataclasses import replace

    from tests.daemons import open_daemon

    async with open_daemon(replace(settings), as_role) as daemon:
        async with await trio.open_tcp_stream("127.0.0.1", daemon.addresses[0].port) as stream:
            nc = Netcat(stream)
            await nc.expect("SERVER .*")
            term, bad_term = await claim(nc, "good"), await claim(nc, "bad")
            await tubes.fetch_value("SELECT tube.tube_backfill_schedule('bad', 'id', 0, 0)")
            await tubes.execute(BREAKS[how])
            await use(nc, tubes, term, 1001)
            await until_true(lambda: daemon.troubles.why("tube", "bad"))
            assert daemon.troubles.of("tube", "good") == daemon.troubles.of("service", "tubes") == []
            for request in (
                "TUBE bad",
                "CLAIM bad 0/1",
                f"PODS bad 0/1 {bad_term} wait=5",
                f"ACK bad 0/1 {bad_term} 1",
            ):
                await nc.send(request)
                await nc.expect("ERROR tube_refused: tube bad cannot be served: .*(table|GRANT SELECT).*")
            await use(nc, tubes, term, 1002)
            await until(lambda: DaemonReports(tubes).troubles())  # for the command line
    await check_lists(tubes, as_role, how)


async def check_lists(tubes: Database, url: str, how: str) -> None:
    """The command line shows both tubes, each with its state, also after the daemon has ended and without its table."""
    await tubes.execute("REVOKE ALL ON replicad.stream_trouble FROM tube_daemon")
    rows = await trio.to_thread.run_sync(cli_rows, url)
    for listing in rows:
        states = {row["tube"]: row["state"] for row in listing}
        assert states["good"] in ("ok", "no reader"), how
        assert ("table" in states["bad"]) or ("GRANT" in states["bad"])


def cli_rows(url: str) -> list[list[dict[str, Any]]]:
    return [cli(url, "tubes", "list"), cli(url, "tubes", "stats"), cli(url, "top")]


@pytest.mark.parametrize("paces", [Paces(tubes=TubeIntervals(backfills=BackfillIntervals(retry=1.0)))])
async def test_a_tube_that_takes_no_ids_fails_its_own_backfill_only_and_until_it_is_mended(
    tubes: Database, daemon: Daemon, netcat: Connect
) -> None:
    await tubes.execute(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'out of order'; END $$;"
        "CREATE TRIGGER broken BEFORE INSERT ON tube.bad FOR EACH ROW WHEN (cardinality(NEW.ids) > 0)"
        " EXECUTE FUNCTION broken()"
    )
    await tubes.fetch_value("SELECT tube.tube_backfill_schedule('bad', 'id', 0, 0)")
    await until_true(lambda: "out of order" in (daemon.troubles.why("tube", "bad") or ""))
    async with netcat() as nc:
        await nc.expect("SERVER .*")
        await use(nc, tubes, await claim(nc, "good"), 1001)
    await tubes.execute("DROP TRIGGER broken ON tube.bad")
    await until_true(lambda: daemon.troubles.why("tube", "bad") is None)


@pytest.mark.parametrize("paces", [Paces(tubes=TubeIntervals(backfills=BackfillIntervals(piece=250, max_backlog=1)))])
async def test_two_backfills_that_wait_for_workers_leave_a_turn_to_another_tube(
    tubes: Database, daemon: Daemon
) -> None:
    await tubes.execute(
        "SELECT tube.tube_ensure_exists('bad', 2); CREATE TABLE more AS SELECT * FROM bad_rows;"
        "SELECT tube.tube_table_ensure_attached('bad', 'more', 1)"
    )
    await tubes.fetch_value("SELECT tube.tube_backfill_schedule('bad', 'id', 0, 1)")
    await until_true(lambda: len(daemon.tubes._backfiller._running) == 2)
    await tubes.fetch_value("SELECT tube.tube_backfill_schedule('good', 'id', 0, 0)")
    await until(lambda: tubes.fetch_value("SELECT count(*) > 0 FROM tube.good WHERE cardinality(ids) > 0"))


async def test_a_locked_table_of_one_tube_delays_nothing_of_the_other(
    tubes: Database, daemon: Daemon, netcat: Connect
) -> None:
    async with netcat() as nc, netcat() as waiting:
        await nc.expect("SERVER .*")
        await waiting.expect("SERVER .*")
        term = await claim(nc, "good")
        await waiting.send(f"PODS bad 0/1 {await claim(waiting, 'bad')} wait=60")
        async with tubes.connection() as connection, connection.transaction():
            await tubes.execute("INSERT INTO bad_rows VALUES (5000)")
            await connection.execute("LOCK TABLE tube.bad IN ACCESS EXCLUSIVE MODE")
            await use(nc, tubes, term, 1001)
            assert daemon.troubles.why("tube", "bad") is not None
        await until_true(lambda: daemon.troubles.why("tube", "bad") is None)


async def test_an_upgrade_goes_on_past_a_tube_whose_table_is_gone_and_creating_it_again_mends_it(
    tubes: Database,
) -> None:
    from replicad.postgres import schema

    await tubes.execute(
        "DROP TABLE tube.bad; UPDATE tube.tube_version SET digest = 'of another build';"
        "CREATE OR REPLACE FUNCTION tube.good_trigger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
    )
    assert await schema.upgrade(tubes, "tube") is schema.Outcome.UPGRADED
    await tubes.execute("INSERT INTO good_rows VALUES (1001)")
    assert await tubes.fetch_value("SELECT ids FROM tube.good") == [1001]
    await tubes.fetch_value("SELECT tube.tube_ensure_exists('bad', 1)")
    await tubes.execute("INSERT INTO bad_rows VALUES (1001)")
    assert await tubes.fetch_value("SELECT ids FROM tube.bad") == [1001]


STEPS = {
    "the look at tubes": ("replicad.tubes.pods.PodBook.tubes", "service"),
    "the look at leases": ("replicad.tubes.leases.LeaseBook.look", "service"),
    "the look for backfills": ("replicad.tubes.backfill.Backfiller.run", "service"),
    "a tube's jobs": ("replicad.tubes.backfill.Backfiller._jobs", "tube"),
    "a backfill": ("replicad.tubes.backfill.Backfiller._backfill", "tube"),
    "watching a tube": ("replicad.tubes.serving.known.KnownTubes._watch", "tube"),
    "waking": ("replicad.tubes.pods.PodBook.shards_between", "tube"),
}


ERRORS = (OSError("x"), MemoryError(), ValueError("x"), AssertionError(), DatabaseError("x"))


@pytest.mark.parametrize(
    ("step", "error"),
    [  # an error for each step, and each error for at least one step; in the long form all for each
        pytest.param(step, ERRORS[at % 5], marks=[] if at < number + 1 else [pytest.mark.long])
        for number, step in enumerate(STEPS)
        for at in range(number, number + 5)
    ],
)
@pytest.mark.parametrize("paces", [Paces(tubes=TubeIntervals(look=0.05, backfills=BackfillIntervals(retry=0.5)))])
async def test_what_a_step_raises_ends_that_step_only_and_is_reported_until_it_works_again(
    tubes: Database, daemon: Daemon, netcat: Connect, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    target, kind = STEPS[step]
    raised = 0

    def fail(*_: Any) -> Any:
        nonlocal raised
        raised += 1
        raise error

    async with netcat() as nc:
        await nc.expect("SERVER .*")
        term = await claim(nc, "good")
        with monkeypatch.context() as patch:
            patch.setattr(target, fail)
            await tubes.fetch_value("SELECT tube.tube_backfill_schedule('good', 'id', 0, 0)")
            await nc.send(f"PODS good 0/1 {term} wait=30")
            await trio.sleep(0.2)  # let it wait; where it does not yet, it needs no waking
            await tubes.execute("INSERT INTO good_rows VALUES (1001)")
            await nc.until("CURSOR good 0/1 .*")  # woken all the same
            await until_true(lambda: raised >= 2 or step == "waking")
            assert raised >= 1
            assert any(one.place.kind == kind for one in daemon.troubles.current())
        await use(nc, tubes, term, 1002)
        await until_true(lambda: not daemon.troubles.current())


async def test_the_service_begins_again_after_a_failure_of_all_of_it(
    tubes: Database, daemon: Daemon, netcat: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with netcat() as nc:
        await nc.expect("SERVER .*")
        term = await claim(nc, "good")
        with monkeypatch.context() as patch:
            patch.setattr("replicad.daemon.troubles.Troubles.contain", None)  # so that nothing contains anything
            await until_true(lambda: daemon.troubles.why("service", "tubes"))
        await use(nc, tubes, term, 1001)
