"""`replicad doctor`: every level that a check declares is reached on a real database, and said with a remedy."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from replicad.config.settings import Address, DatabaseSettings, ServerSettings
from replicad.errors import ConnectionLost, DatabaseUnavailable
from replicad.operations.doctor.checks import CHECKS, Check, Finding, Level, examine
from replicad.operations.doctor.seen import Evidence, Thresholds
from replicad.postgres.bridge import Database, open_database
from replicad.streams.daemons import DaemonReports, Row
from replicad.streams.registry import Registry
from tests import doctor_page as page
from tests.commands import replicad_async
from tests.conftest import PATIENCE
from tests.daemons import Daemon

WARNING, FAILING = Level.WARNING, Level.FAILING
BY_NAME = {check.name: check for check in CHECKS}


class World:
    """A database with a stream and a tube, and what a scenario changes."""

    def __init__(self, url: str, db: Database) -> None:
        self.url = url
        self.db = db
        self.settings = DatabaseSettings(database=url)
        self.thresholds = Thresholds()
        self.folder: Path | None = None
        self.daemon: Callable[[], Mapping[str, Any]] | None = None
        self.user: str | None = None  # the doctor's
        self.session = "replicad doctor"  # the name of its sessions

    async def sql(self, *statements: str) -> None:
        for statement in statements:
            await self.db.execute(statement)

    async def reports(self, kind: str, name: str, cause: str, code: str) -> None:
        row = Row(kind, name, cause, code, f"{name} is ill; see a doctor", 5.0)
        await DaemonReports(self.db).write_troubles("daemon 1", [row])

    async def find(self, check: Check, *others: Check) -> list[Finding]:
        """What the check finds."""
        url = self.url if self.user is None else re.sub(r"//[^@]*@", f"//{self.user}@", self.url)
        async with open_database(url, size=2, application_name=self.session) as db:
            seen = Evidence(db, self.settings, self.thresholds, folder=self.folder, daemon=self.daemon)
            return [finding async for _, finding in examine(seen, [*others, check])]


@pytest.fixture
async def world(database_url: str, database: Database) -> AsyncIterator[World]:
    made = World(database_url, database)
    await made.sql(
        "CREATE TABLE events (id bigserial PRIMARY KEY, body text)",
        "SELECT tube.tube_ensure_exists('orders', partitions => 2)",
    )
    await Registry(database).add("events", "public.events", "id")
    yield made
    for role in ("doctor_poor", "doctor_blind"):
        if await database.fetch_value("SELECT count(*) FROM pg_roles WHERE rolname = $1", role):
            await made.sql(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


Scenario = Callable[[World], Awaitable[None]]
SCENARIOS: dict[tuple[str, Level], tuple[Scenario, str]] = {}


def scenario(name: str, level: Level, said: str) -> Callable[[Scenario], Scenario]:
    """What has to be found: a check, a level, and a part of the line."""

    def add(function: Scenario) -> Scenario:
        SCENARIOS[name, level] = function, said
        return function

    return add


@scenario("paused", WARNING, "UTC: a migration; no reader gets its pods -> replicad tubes resume orders")
async def _(world: World) -> None:
    await world.sql("SELECT tube.tube_pause('orders', 'a migration')")


@scenario("standby", FAILING, "may only read here -> ALTER DATABASE")
async def _(world: World) -> None:
    name = await world.db.fetch_value("SELECT current_database()")
    await world.sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")


@scenario("schema", WARNING, "another build of version")
async def _(world: World) -> None:
    await world.sql("UPDATE tube.tube_version SET digest = 'other'")


@scenario("schema", FAILING, 'schema "nowhere"')
async def _(world: World) -> None:
    world.settings = DatabaseSettings(database=world.url, stream_schema="nowhere")


GRANTS = (
    "GRANT USAGE ON SCHEMA replicad, tube TO {0}",
    "GRANT SELECT ON ALL TABLES IN SCHEMA replicad, tube TO {0}",
    "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA replicad, tube TO {0}",
)


@scenario("rights", WARNING, "-> GRANT pg_read_all_stats TO")
async def _(world: World) -> None:
    await world.sql("CREATE ROLE doctor_blind LOGIN", *(one.format("doctor_blind") for one in GRANTS))
    await world.sql(
        "GRANT SELECT ON events TO doctor_blind", "GRANT SELECT, USAGE ON SEQUENCE events_id_seq TO doctor_blind"
    )
    world.user = "doctor_blind"


@scenario("rights", FAILING, "GRANT SELECT ON")
async def _(world: World) -> None:
    """The role of a daemon: it may write down that it runs. Of a role that may only look, this is no fault."""
    daemon = "GRANT INSERT, UPDATE ON replicad.stream_daemon TO {}"
    await world.sql("CREATE ROLE doctor_poor LOGIN", *(one.format("doctor_poor") for one in (*GRANTS, daemon)))
    world.user = "doctor_poor"


@scenario(
    "owners",
    WARNING,
    "run with the rights of role doctor_blind, and the table belongs to role doctor_poor -> replicad tubes attach",
)
async def _(world: World) -> None:
    """And a table of a superuser with a type of a third role."""
    await world.sql("CREATE ROLE doctor_poor", "CREATE ROLE doctor_blind", "CREATE TABLE given (id bigint PRIMARY KEY)")
    await world.sql("ALTER TABLE given OWNER TO doctor_poor")
    await world.sql("SELECT tube.tube_table_ensure_attached('orders', 'given', 0, 'id > 0')")
    await world.sql("ALTER TABLE given OWNER TO doctor_blind")
    await world.sql("CREATE TYPE mood AS ENUM ()", "ALTER TYPE mood OWNER TO doctor_poor")
    await world.sql("ALTER TABLE events ADD moods mood[]")
    check = BY_NAME["owners"]
    assert "of role doctor_poor: TYPE mood" in (await world.find(check))[-1].text
    [given, _] = await world.find(check)
    await world.sql("SELECT tube.tube_table_ensure_attached('orders', 'given', 0, 'id > 0')")
    assert [one.text for one in await world.find(check) if one.text == given.text] == []
    await world.sql("ALTER TABLE given OWNER TO doctor_poor")


@scenario("sessions", WARNING, "of max_connections = ")
async def _(world: World) -> None:
    world.thresholds = Thresholds(used=0.0)


@scenario("sessions", FAILING, "of max_connections = ")
async def _(world: World) -> None:
    world.thresholds = Thresholds(used_up=0.0)


@scenario("daemons", FAILING, "no daemon is connected to this database -> start `replicad serve`")
async def _(world: World) -> None:
    pass


@scenario("daemons", WARNING, "daemon db2 (pid 7, at 127.0.0.1:9009) is silent for 4")
async def _(world: World) -> None:
    await world.sql(
        "SELECT replicad.stream_daemon_beat(gen_random_uuid(), 'db2', 7, '{127.0.0.1:9009}', '0.1.0', 60,"
        " clock_timestamp() - interval '40 s')"
    )
    world.session = "replicad positions"


@scenario("troubles", WARNING, "daemon 1: service poller: poller is ill")
async def _(world: World) -> None:
    await world.reports("service", "poller", "run", "OSError")


@scenario("disk", WARNING, "are free below")
async def _(world: World) -> None:
    world.folder, world.thresholds = Path("/"), Thresholds(disk=1.1)


@scenario("disk", FAILING, "are free below")
async def _(world: World) -> None:
    world.folder, world.thresholds = Path("/"), Thresholds(disk_full=1.1)


@scenario("clock", WARNING, "-> run NTP on both")
async def _(world: World) -> None:
    world.thresholds = Thresholds(clock=-1.0)


@scenario("clients", WARNING, "client me was cut 5 s ago (slow_reader): it took nothing")
async def _(world: World) -> None:
    cut = {"name": "me", "peer": "::1", "ago_s": 5.0, "reason": "slow_reader", "why": "it took nothing"}
    world.daemon = lambda: {"cuts": [cut, {**cut, "name": "old", "ago_s": 1e6}]}


@scenario("clients", FAILING, "no answer over HTTP")
async def _(world: World) -> None:
    def fail() -> Mapping[str, Any]:
        raise ConnectionLost("no answer over HTTP")

    world.daemon = fail


@scenario("streams", WARNING, "stream events (no_daemon): rows wait")
async def _(world: World) -> None:
    await world.sql("INSERT INTO events (body) VALUES ('x')")


@scenario("streams", FAILING, "stream events (stream_refused): table public.events has no column id any more")
async def _(world: World) -> None:
    await world.sql("ALTER TABLE events RENAME COLUMN id TO other")


@scenario("lag", WARNING, "stream events: 1 rows have waited")
async def _(world: World) -> None:
    await world.sql("INSERT INTO events (body) VALUES ('x')")
    world.session, world.thresholds = "replicad", Thresholds(lag=-1.0)  # named as a daemon's


@scenario("sequences", WARNING, "stream events: its sequence has used")
async def _(world: World) -> None:
    world.thresholds = Thresholds(used=0.0)


@scenario("sequences", FAILING, "stream events: its sequence has used 100%")
async def _(world: World) -> None:
    await world.sql("SELECT setval('events_id_seq', 9223372036854775807)")


@scenario("tubes", FAILING, "tube orders: its table tube.orders is missing")
async def _(world: World) -> None:
    await world.sql("DROP TABLE tube.orders")


POD = "INSERT INTO tube.orders (op, shard, ids, payload) VALUES ('{}', 1, '{{1}}', '{{}}')"


@scenario("readers", WARNING, "partition 1: 1 pod waits for up to 0 s, and no worker has the lease -> start a worker")
async def _(world: World) -> None:
    await world.sql(POD.format("U"))


@scenario("readers", FAILING, "and no worker has the lease -> start a worker")
async def _(world: World) -> None:
    await world.sql(POD.format("U"))
    world.thresholds = Thresholds(lag=-1.0)


@scenario("leases", WARNING, "tube orders, orders is ill -> start a worker")
async def _(world: World) -> None:
    await world.reports("tube", "orders", "lease 0/1", "lease_expired")


@scenario("parked", WARNING, "tube orders: 1 pod is parked -> replicad tubes parked list orders")
async def _(world: World) -> None:
    await world.sql(
        "INSERT INTO tube.tube_parked (tube, seq, op, shard, ids, ts, tries, error)"
        " VALUES ('orders', 1, 'U', 0, '{1}', now(), 3, 'no')"
    )


@scenario("backfills", WARNING, "has added nothing for")
async def _(world: World) -> None:
    await world.sql(
        "INSERT INTO tube.tube_backfill (tube, tbl, shard, start_seq, order_col, shards)"
        " VALUES ('orders', 'events', 0, '1', 'id', '{0}')"
    )
    world.thresholds = Thresholds(backfill=0.0)


SENDER = (
    "INSERT INTO replicad.federation_sender (source, name, stream, token, senders)"
    " VALUES ('events', 's1', 'events', 1, '{s1}')",
    "INSERT INTO replicad.federation_destination (source, name, txn_id, failures, failing_since, last_error)"
    " SELECT 'events', n, nullif(n, 'quiet'), 3, now() - interval '2 hours', 'status 503'"
    " FROM unnest('{a,b,quiet}'::text[]) n",
)


@scenario("senders", WARNING, "a has taken nothing for 2.0 h (status 503), and 1 other destination for more than")
async def _(world: World) -> None:
    await world.sql(*SENDER)


@scenario("senders", FAILING, "stream events: facts or updates wait, and its sender s1 does not run -> start")
async def _(world: World) -> None:
    await world.sql(*SENDER)
    await world.sql("INSERT INTO replicad.federation_destination_room VALUES ('events', 'a', 1, 0, NULL)")


async def test_a_sender_that_died_before_it_has_read_all_rows_is_told_of(world: World) -> None:
    await world.sql(SENDER[0])
    stream = (await Registry(world.db).load_streams())["events"]
    for position, levels in ((1, [Level.FINE]), (2, [FAILING])):
        assert await Registry(world.db).publish(stream, position, {})
        assert [one.level for one in await world.find(BY_NAME["senders"])] == levels


async def test_what_senders_have_parked_is_told_with_the_command_that_lists_it(world: World) -> None:
    await world.sql(
        "INSERT INTO replicad.federation_parked (source, destination, body, reason)"
        " SELECT 'events', 'a', '{}', 'status 422' FROM generate_series(1, 2)"
    )
    (found,) = await world.find(BY_NAME["senders"])
    assert (found.level, found.text) == (WARNING, "stream events: 2 items are parked")
    assert found.remedy == "replicad sender parked list --stream events"


APART = {("database", FAILING), ("holders", WARNING), ("holders", FAILING)}  # tests of their own


def test_every_level_that_is_declared_has_a_scenario() -> None:
    declared_levels = {(check.name, level) for check in CHECKS for level in check.levels if level}
    assert declared_levels == SCENARIOS.keys() | APART


def test_the_table_in_the_docs_is_what_is_declared() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.render(text) == text, "run `python -m tests.doctor_page`"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_a_healthy_database_passes_each_check(check: Check, world: World) -> None:
    async with open_database(world.url, size=1, application_name="replicad positions"):
        found = await world.find(check)
    assert [one.level for one in found] == [Level.FINE], found


@pytest.mark.parametrize(("name", "level"), SCENARIOS, ids=lambda value: getattr(value, "name", value))
async def test_each_level_is_reached_and_said_with_a_remedy(name: str, level: Level, world: World) -> None:
    prepare, said = SCENARIOS[name, level]
    await prepare(world)
    found = await world.find(BY_NAME[name])
    assert max(one.level for one in found) is level, found
    worst = next(one for one in found if one.level is level)
    assert said in f"{worst.text} -> {worst.remedy}"
    assert worst.remedy
    assert "\n" not in worst.text


@pytest.mark.parametrize("level", [WARNING, FAILING], ids=lambda level: level.name)
async def test_what_holds_a_stream_and_a_tube_back_is_named_with_the_statement_that_ends_it(
    level: Level, world: World
) -> None:
    world.thresholds = Thresholds(held=0.0, held_long=0.0 if level is FAILING else 1e9)
    async with open_database(world.url, size=1, application_name="forgetful") as other:
        async with other.connection() as connection, connection.transaction():
            pid = await connection.fetch_value("SELECT pg_backend_pid()")
            await connection.execute("INSERT INTO events (body) VALUES ('x')")
            await connection.execute(POD.format("U"))
            await world.sql("INSERT INTO events (body) VALUES ('y')")
            found = await world.find(BY_NAME["holders"])
    assert [one.level for one in found] == [level, level]
    assert f"by pid {pid} (forgetful)" in found[0].text
    assert {(one.remedy, one.by) for one in found} == {(f"SELECT pg_terminate_backend({pid})", "")}
    assert found[1].text.startswith("tube orders is held back for ")


async def test_a_role_that_may_look_at_nothing_is_told_which_right_it_lacks_and_what_grants_them_all(
    world: World,
) -> None:
    await world.sql("CREATE ROLE doctor_poor LOGIN")
    world.user = "doctor_poor"
    (finding,) = await world.find(BY_NAME["schema"])
    assert finding.level is FAILING
    assert "GRANT SELECT ON stream_version" in finding.text
    assert finding.remedy.startswith("that GRANT; `replicad sql roles` prints all that a role needs")


async def test_without_a_database_only_what_needs_none_is_checked() -> None:
    seen = Evidence(DatabaseUnavailable("Postgres is away"), DatabaseSettings(database="postgresql://x@y/z"))
    found = [(check.name, one.level, one.text) async for check, one in examine(seen)]
    assert found[0] == ("database", FAILING, "Postgres is away")
    assert [name for name, level, _ in found if level] == ["database"]
    assert {name for name, _, _ in found} == {check.name for check in CHECKS if check.needs is None}


@asynccontextmanager
async def broken_check(run: Callable[[Evidence], Awaitable[Any]]) -> AsyncIterator[list[Finding]]:
    check = Check("odd", "nothing", "never", None, "none", run, needs=None)
    seen = Evidence(DatabaseUnavailable("x"), DatabaseSettings())
    yield [one async for _, one in examine(seen, [check, BY_NAME["disk"]], longest=0.1)]


async def test_a_check_that_hangs_or_has_a_defect_hides_no_other() -> None:
    async def hang(_: Evidence) -> Any:
        await trio.sleep_forever()

    async def fail(_: Evidence) -> Any:
        raise ZeroDivisionError("a defect")

    async with broken_check(hang) as found:
        assert [one.level for one in found] == [WARNING, Level.FINE]
        assert "no answer within 0.1 s" in found[0].text
    async with broken_check(fail) as found:
        assert "ZeroDivisionError" in found[0].text


# --- the command ---


@pytest.fixture
def settings() -> ServerSettings:
    any_port = Address("127.0.0.1", 0)
    return ServerSettings(listen=any_port, http=any_port, server_name="example.com")


async def run(*words: str) -> tuple[int, str, str]:
    """The exit status and both outputs of a command."""
    done = await replicad_async(*words)
    return done.returncode, done.stdout, done.stderr


async def test_a_running_daemon_is_fine(events: Database, daemon: Daemon, database_url: str) -> None:
    await events.execute("INSERT INTO events (body) SELECT '{}' FROM generate_series(1, 5)")
    words = ("doctor", "--database", database_url, "--http", str(daemon.http))
    with trio.fail_after(PATIENCE):
        while (done := await run(*words))[0] != 0:
            assert "FAILING" not in done[1], done[1]
    shown = done[1].splitlines()
    assert [line.split()[1] for line in shown[: len(CHECKS)]] == [check.name for check in CHECKS]
    assert shown[-1] == "all is fine"


async def test_the_exit_status_and_the_forms_tell_the_worst(world: World, database_url: str) -> None:
    await world.sql(POD.format("U"))
    assert (await run("doctor", "--database", database_url))[0] == 2, "no daemon"
    status, shown, _ = await run("doctor", "--database", database_url, "--nagios")
    assert status == 2
    first, *others = shown.splitlines()
    assert re.fullmatch(r"REPLICAD CRITICAL - daemons: no daemon .* \| warnings=\d failing=1", first)
    assert [line.split()[0] for line in others] == ["FAILING", *["WARNING"] * (len(others) - 1)]
    async with open_database(database_url, size=1, application_name="replicad positions"):
        status, shown, _ = await run("doctor", "--database", database_url, "--json")
    assert status == 1
    assert {json.loads(line)["level"] for line in shown.splitlines()} == {"fine", "warning"}
    status, _, said = await run("doctor", "--database", database_url, "--json", "--nagios")
    assert status == 2
    assert "give one of them" in said


async def test_an_unreachable_database_is_failing_and_no_error_of_the_command(tmp_path: Path) -> None:
    status, shown, said = await run("doctor", "--database", "postgresql://nobody@127.0.0.1:1/none")
    assert status == 2
    assert shown.startswith("FAILING  database")
    assert said == ""
    status, shown, _ = await run("doctor", "--data-folder", str(tmp_path / "none"))
    assert status == 2
    assert "no `replicad serve` runs one in" in shown
    assert not (tmp_path / "none").exists(), "nothing is made"


async def test_clients_and_those_that_were_cut_are_listed(events: Database, daemon: Daemon) -> None:
    address = daemon.addresses[0]
    async with (
        await trio.open_tcp_stream(address.host, address.port) as good,
        await trio.open_tcp_stream(address.host, address.port) as bad,
    ):
        await good.send_all(b"NAME reader\nREPLICATE events NOW\n")
        await bad.send_all(b"NAME rude\nNONSENSE\n")
        with trio.fail_after(PATIENCE):
            while b"POSITION" not in await good.receive_some(65536):
                pass
            while await bad.receive_some(65536):
                pass
        status, shown, _ = await run("clients", "--http", str(daemon.http))
        assert status == 0
        assert re.search(r"reader +127\.0\.0\.1:\d+ .* events +0\.0$", shown, re.MULTILINE), shown
        assert re.search(r"rude +127\.0\.0\.1:\d+ .*bad_line +bad_line: unknown command 'NONSENSE'", shown), shown
        status, shown, _ = await run("clients", "--http", str(daemon.http), "--json")
        rows = [json.loads(line) for line in shown.splitlines()]
        assert [(row["name"], row["cut"]) for row in rows] == [("reader", False), ("rude", True)]
        unreachable = ("--database", "postgresql://x@127.0.0.1:1/y")
        assert "client rude was cut" in (await run("doctor", *unreachable, "--http", str(daemon.http)))[1]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("clients",), 2, "give --http HOST:PORT"),
        (("clients", "--http", "nonsense"), 2, "--http: 'nonsense' is not valid"),
        (("clients", "--http", "127.0.0.1:1"), 4, "does `serve --http` listen there?"),
    ],
)
async def test_what_cannot_be_asked_is_a_sentence(words: tuple[str, ...], status: int, said: str) -> None:
    done = await run(*words)
    assert done[0] == status
    assert said in done[2]
