"""Writes that no longer reach their tube, users that may only read, numbers out of range: none is silent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.lengths import first

from .conftest import Connect, netcat_to
from .test_tubes_contained import as_role, claim, cli, read, tubes, until, until_true

__all__ = ["as_role", "tubes"]

ATTACH = "SELECT tube.tube_table_ensure_attached('bad', 'bad_rows', 0)"
BREAKS = {
    "disabled": "ALTER TABLE bad_rows DISABLE TRIGGER USER",
    "one disabled": "ALTER TABLE bad_rows DISABLE TRIGGER bad_rows_bad_after_update_trigger",
    "for replicas only": "ALTER TABLE bad_rows ENABLE REPLICA TRIGGER bad_rows_bad_after_insert_trigger",
    "one dropped": "DROP TRIGGER bad_rows_bad_after_delete_trigger ON bad_rows",
    "truncate dropped": "DROP TRIGGER bad_rows_bad_before_truncate_trigger ON bad_rows",
    "function dropped": "DROP FUNCTION tube.bad_trigger() CASCADE",
    "another function": "CREATE FUNCTION public.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
    "CREATE OR REPLACE TRIGGER bad_rows_bad_after_insert_trigger AFTER INSERT ON bad_rows"
    " REFERENCING NEW TABLE AS tube_new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.f('0')",
}


async def mended(tubes: Database, daemon: Daemon) -> None:
    """The triggers are there, and what was missed stays a trouble until the table has been backfilled."""
    await until_true(lambda: "They are on now. Run a backfill" in (daemon.troubles.why("tube", "bad") or ""))
    await tubes.execute("SELECT tube.tube_backfill_schedule('bad', NULL, 0, 100)")
    await until_true(lambda: daemon.troubles.why("tube", "bad") is None)


async def states(url: str) -> dict[str, str]:
    rows = await trio.to_thread.run_sync(cli, url, "tubes", "list")
    return {row["tube"]: row["state"] for row in rows}


@pytest.mark.parametrize("how", first(3, BREAKS))
async def test_a_table_whose_writes_no_longer_touch_is_a_trouble_of_its_tube_which_is_served_until_it_is_attached_again(
    tubes: Database, daemon: Daemon, netcat: Connect, database_url: str, how: str
) -> None:
    with capture_logs() as logs:
        async with netcat() as nc:
            await nc.expect("SERVER .*")
            await tubes.execute("INSERT INTO bad_rows VALUES (5000)")
            await tubes.execute(BREAKS[how])
            await until_true(lambda: daemon.troubles.why("tube", "bad"))
            reason = daemon.troubles.why("tube", "bad") or ""
            assert "public.bad_rows" in reason
            assert "replicad tubes attach bad public.bad_rows --shard 0" in reason
            assert "replicad tubes backfill bad" in reason
            assert daemon.troubles.why("tube", "good") is None
            term = await claim(nc, "bad")
            ids, after = await read(nc, "bad", term)
            assert ids == [5000]
            await nc.send(f"ACK bad 0/1 {term} upto={after}")
            await nc.expect("ACKED bad 0/1 1")
            if how == "one disabled":
                assert await states(database_url) == {"bad": reason, "good": "ok"}
            await tubes.execute(ATTACH)
            await mended(tubes, daemon)
            await tubes.execute("DELETE FROM tube.bad")
            await tubes.execute("INSERT INTO bad_rows VALUES (5001); UPDATE bad_rows SET id = id WHERE id = 5001")
            assert await tubes.fetch_value("SELECT array_agg(ids[1]) FROM tube.bad") == [5001, 5001]
    told = [line["event"] for line in logs if line.get("cause") == "triggers"]
    assert told == ["trouble_began", "trouble_over"]


@pytest.mark.parametrize("remedy", first(1, ["attach", "detach"]))
async def test_a_dropped_table_is_a_trouble_of_its_tube_until_a_new_one_is_attached_or_it_is_detached(
    tubes: Database, daemon: Daemon, database_url: str, remedy: str
) -> None:
    oid = await tubes.fetch_value("SELECT 'bad_rows'::regclass::oid::bigint")
    await tubes.execute("DROP TABLE bad_rows; CREATE TABLE bad_rows (id bigint)")
    await until_true(lambda: daemon.troubles.why("tube", "bad"))
    reason = daemon.troubles.why("tube", "bad") or ""
    assert "public.bad_rows" in reason
    assert f"replicad tubes detach bad {oid}" in reason
    assert (await states(database_url))["bad"] == reason
    if remedy == "attach":
        await tubes.execute(ATTACH)
    else:
        await tubes.fetch_value("SELECT tube.tube_table_ensure_detached('bad', $1)", str(oid))
    await until_true(lambda: daemon.troubles.why("tube", "bad") is None)


async def test_a_dropped_partition_is_no_trouble_and_one_without_triggers_names_the_table_to_attach(
    tubes: Database, daemon: Daemon
) -> None:
    await tubes.execute(
        "CREATE TABLE p (id bigint, v integer) PARTITION BY RANGE (id);"
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (9);"
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (9) TO (99);"
        "SELECT tube.tube_table_ensure_attached('bad', 'p', 7, 'v > 0'); DROP TABLE p1;"
        "ALTER TABLE p2 DISABLE TRIGGER ALL"
    )
    await until_true(lambda: "table public.p2" in (daemon.troubles.why("tube", "bad") or ""))
    reason = daemon.troubles.why("tube", "bad") or ""
    assert "attach bad public.p --shard 7 --predicate 'v > 0'" in reason
    await tubes.execute("SELECT tube.tube_table_ensure_attached('bad', 'p', 7, 'v > 0')")
    await mended(tubes, daemon)


OFF = {
    "in one transaction": "BEGIN; ALTER TABLE bad_rows DISABLE TRIGGER ALL; INSERT INTO bad_rows VALUES (7000);"
    "ALTER TABLE bad_rows ENABLE TRIGGER ALL; COMMIT",
    "one by one": "ALTER TABLE bad_rows DISABLE TRIGGER USER; INSERT INTO bad_rows VALUES (7000);"
    "ALTER TABLE bad_rows ENABLE TRIGGER USER",
    "dropped and attached again": "DROP TRIGGER bad_rows_bad_after_insert_trigger ON bad_rows;"
    f"INSERT INTO bad_rows VALUES (7000); {ATTACH}",
    "disabled and attached again": "ALTER TABLE bad_rows DISABLE TRIGGER USER; INSERT INTO bad_rows VALUES (7000);"
    f"{ATTACH}",
}


@pytest.mark.parametrize("running", [True, False], ids=["a daemon runs", "no daemon runs"])
@pytest.mark.parametrize("how", first(1, OFF))
async def test_triggers_that_were_off_between_two_looks_are_a_trouble_until_the_table_is_backfilled(
    tubes: Database, start_daemon: Callable[..., AbstractAsyncContextManager[Daemon]], how: str, running: bool
) -> None:
    async with start_daemon() as daemon:
        seen = "SELECT count(*) FROM tube.tube_trigger_seen WHERE tbl = 'bad_rows'::regclass"
        with trio.fail_after(PATIENCE):
            while not await tubes.fetch_value(seen):
                await trio.sleep(0.05)
        if running:
            await tubes.execute(OFF[how])
            await mended(tubes, daemon)
    if not running:
        await tubes.execute(OFF[how])
        async with start_daemon() as daemon:
            await mended(tubes, daemon)
    assert 7000 in await tubes.fetch_value("SELECT array_agg(id) FROM (SELECT unnest(ids) AS id FROM tube.bad) AS put")


async def test_a_backfill_that_began_while_the_triggers_were_off_does_not_end_the_trouble(
    tubes: Database, daemon: Daemon
) -> None:
    await tubes.execute("ALTER TABLE bad_rows DISABLE TRIGGER USER")
    await until_true(lambda: daemon.troubles.why("tube", "bad"))
    await tubes.execute("SELECT tube.tube_backfill_schedule('bad', NULL, 0, 0)")
    with trio.fail_after(PATIENCE):
        while not await tubes.fetch_value("SELECT count(*) FROM tube.tube_backfill WHERE finished"):
            await trio.sleep(0.05)
    await tubes.execute("INSERT INTO bad_rows VALUES (7000); ALTER TABLE bad_rows ENABLE TRIGGER USER")
    await until_true(lambda: "They are on now" in (daemon.troubles.why("tube", "bad") or ""))
    assert await tubes.fetch_value("SELECT count(*) FROM tube.tube_missed WHERE healed_at IS NULL") == 1
    await tubes.execute("DELETE FROM tube.bad")
    await mended(tubes, daemon)


async def test_renaming_a_table_or_altering_the_tube_is_no_missed_change(tubes: Database, daemon: Daemon) -> None:
    await tubes.execute(
        "ALTER TABLE bad_rows RENAME TO bad_lines; SELECT tube.tube_ensure_exists('bad', 2, 'id > 0'),"
        "tube.tube_table_ensure_attached('bad', 'bad_lines', 3, 'id > 1')"
    )
    await tubes.execute("SELECT tube.tube_triggers_check()")
    assert await tubes.fetch_value("SELECT count(*) FROM tube.tube_missed") == 0


async def test_a_partition_that_was_added_later_is_named_until_the_table_is_attached_again(
    tubes: Database, daemon: Daemon, database_url: str
) -> None:
    await tubes.execute(
        "CREATE TABLE p (id bigint, v integer) PARTITION BY RANGE (id);"
        "SELECT tube.tube_table_ensure_attached('bad', 'p', 7);"
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (9) PARTITION BY RANGE (id)"
    )
    await until_true(lambda: daemon.troubles.why("tube", "bad"))
    reason = daemon.troubles.why("tube", "bad") or ""
    assert "statements on public.p1 (unattached), a partition of public.p that was added later" in reason
    assert "attach bad public.p --shard 7, and then backfill it" in reason
    assert (await states(database_url))["bad"] == reason
    await tubes.execute("SELECT tube.tube_table_ensure_attached('bad', 'p', 7)")
    await until_true(lambda: daemon.troubles.why("tube", "bad") is None)


async def test_the_target_of_a_subscription_and_a_role_that_fires_no_trigger_are_named(
    tubes: Database, daemon: Daemon
) -> None:
    role = "replica_" + await tubes.fetch_value("SELECT current_database()")
    await tubes.execute(f"CREATE ROLE {role}; ALTER ROLE {role} SET session_replication_role = replica")
    try:
        await until_true(lambda: f"user {role} has" in (daemon.troubles.why("tube", "bad") or ""))
    finally:
        await tubes.execute(f"DROP ROLE {role}")
    await until_true(lambda: daemon.troubles.why("tube", "bad") is None)
    await tubes.execute(
        "CREATE SUBSCRIPTION sub CONNECTION 'dbname=nowhere' PUBLICATION p WITH (connect = false, slot_name = NONE)"
    )
    try:
        await tubes.execute(
            "INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate)"
            " SELECT oid, 'bad_rows'::regclass, 'r' FROM pg_subscription WHERE subname = 'sub'"
        )
        await until_true(lambda: "through subscription sub" in (daemon.troubles.why("tube", "bad") or ""))
    finally:
        await tubes.execute("DELETE FROM pg_subscription_rel; DROP SUBSCRIPTION sub")


async def test_a_user_that_may_only_read_is_told_by_the_list_and_served_again_without_a_restart(
    tubes: Database,
    as_role: str,
    settings: Any,
) -> None:
    from tests.daemons import open_daemon

    async with open_daemon(settings, as_role) as daemon:
        setting = "ALTER ROLE tube_daemon {} default_transaction_read_only"
        await tubes.execute(setting.format("SET") + " = on")
        await tubes.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'tube_daemon'")

        async def answer() -> str:
            async with netcat_to(daemon) as nc:
                await nc.expect("SERVER .*")
                await nc.send("CLAIM good 0/1 ttl=1")
                [line] = await nc.expect(".*")
                return line

        async def refused() -> bool:
            line = await answer()
            return line.startswith("ERROR database_refused") and "replaces its own" in line

        async def served() -> bool:
            return (await answer()).startswith("LEASE good")

        await until(refused)
        for state in (await states(as_role)).values():
            assert "may only read" in state
        await tubes.execute(setting.format("RESET"))
        await until(served)
        assert set((await states(as_role)).values()) == {"ok"}


@pytest.mark.parametrize(
    ("request_line", "what"),
    [(f"PODS good 0/1 {{}} {what}={n}", what) for what in ("backfill", "limit", "ids") for n in (2**31, 2**62, -1)]
    + [(f"PARK good 0/1 {{}} 1 * {tries} it failed", "tries") for tries in (2**31, -(2**31) - 1)],
)
async def test_a_number_that_is_out_of_range_is_the_clients_line_at_fault(
    tubes: Database,
    start_daemon: Callable[..., AbstractAsyncContextManager[Daemon]],
    request_line: str,
    what: str,
) -> None:
    async with start_daemon() as daemon, netcat_to(daemon) as nc:
        await nc.expect("SERVER .*")
        await nc.send(request_line.format(await claim(nc, "good")))
        await nc.expect(f"ERROR .*{what} must be a whole number from 0 to 2147483647, got .*")
