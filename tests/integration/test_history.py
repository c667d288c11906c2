"""`replicad pipeline history`: every version of the rows of a table, in Postgres and in Delta, beside an audit log."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from replicad.client.blocking_client import BlockingClient
from replicad.client.events import Reset
from replicad.config.settings import ServerSettings
from replicad.errors import DownstreamError, UsageError
from replicad.postgres.bridge import Database
from replicad.spark import history as module
from replicad.spark.history import TableHistory, follow_history, sink_of_history
from replicad.spark.lake import Lake
from replicad.streams.registry import RecordedChanges, Registry
from tests.commands import replicad_async
from tests.conftest import PATIENCE, psql
from tests.daemons import Daemon, Paces, open_daemon
from tests.lengths import first

pytest.importorskip("deltalake")

VERSIONS = """
SELECT json_agg(json_build_array(_from, _to, _key, valid_from, valid_to, id, n, note, paid) ORDER BY _from)::text
FROM {table}"""
AUDIT = """
CREATE TABLE audit (number bigserial, op text, id integer, row text);
CREATE FUNCTION audited() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF tg_op = 'TRUNCATE' THEN INSERT INTO audit (op) VALUES ('t'); RETURN NULL; END IF;
  IF tg_op = 'DELETE' OR (tg_op = 'UPDATE' AND old.id <> new.id) THEN
    INSERT INTO audit (op, id) VALUES ('d', old.id); END IF;
  IF tg_op <> 'DELETE' THEN
    INSERT INTO audit (op, id, row) VALUES ('i', new.id, row(new.n, new.note, new.paid)::text); END IF;
  RETURN NULL; END $$;
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON orders FOR EACH ROW EXECUTE FUNCTION audited();
CREATE TRIGGER emptied AFTER TRUNCATE ON orders FOR EACH STATEMENT EXECUTE FUNCTION audited()"""
TABLE = "CREATE TABLE orders (id integer PRIMARY KEY, n integer, note text, paid numeric(30, 10))"


@pytest.fixture
async def orders(database: Database, daemon: Daemon) -> Daemon:
    """A table with an audit log, and a stream of its changes."""
    await database.execute(f"{TABLE}; {AUDIT}")
    await Registry(database).add_changes("orders", "public.orders", RecordedChanges())
    await daemon.publisher.find("orders")
    return daemon


@pytest.fixture(params=["postgres", "delta"])
def target(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> Iterator[str]:
    return (yield database_url if request.param == "postgres" else f"delta:{tmp_path / 'lake'}")


def history_of(target: str) -> TableHistory:
    return TableHistory(sink_of_history(target, "orders_history"), "orders")


async def catch_up(daemon: Daemon, history: TableHistory, **options: Any) -> TableHistory:
    """Until the history has everything that there is now."""

    def work() -> None:
        with BlockingClient("127.0.0.1", daemon.addresses[0].port, name="history") as client:
            follow_history(client, history, "orders", once=True, **options)

    with trio.fail_after(PATIENCE):
        await trio.to_thread.run_sync(work)
    return history


def held(target: str) -> list[dict[str, Any]]:
    """The versions, in their order."""
    if target.startswith("delta:"):
        return sorted(Lake(target.removeprefix("delta:")).arrow().to_pylist(), key=lambda row: row["_from"])
    text = psql(target, "SELECT COALESCE(json_agg(h ORDER BY _from), '[]') FROM orders_history h")
    return list(json.loads(text, parse_float=str))


def chains(versions: list[dict[str, Any]]) -> dict[int, list[tuple[Any, ...]]]:
    """The states of each row in their order, None for its absence; and checks that versions join without overlaps."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    ends: dict[int, tuple[int | None, Any]] = {}
    for row in versions:
        states = found.setdefault(row["id"], [])
        if states:
            token, at = ends[row["id"]]
            assert token is not None, "a version has ended before the next one begins"
            assert token <= row["_from"]
            assert at <= row["valid_from"]
            if token < row["_from"]:
                states.append(())
        assert row["valid_to"] is None or row["valid_from"] <= row["valid_to"]
        states.append((row["n"], row["note"], None if row["paid"] is None else str(row["paid"])))
        ends[row["id"]] = (row["_to"], row["valid_to"])
    for key, (token, _) in ends.items():
        if token is not None:
            found[key].append(())
    return found


def audited(url: str) -> dict[int, list[tuple[Any, ...]]]:
    """The same from the audit log, without states that are equal to the one before."""
    lines = json.loads(
        psql(
            url,
            "SELECT COALESCE(json_agg(json_build_array(op, a.id, (r).n, (r).note, (r).paid::text) ORDER BY number), "
            "'[]') FROM (SELECT *, row::audit_row AS r FROM audit) a",
        )
    )
    found: dict[int, list[tuple[Any, ...]]] = {}
    for op, id_, *values in lines:
        for key in list(found) if op == "t" else [id_]:
            state = tuple(values) if op == "i" else ()
            states = found.setdefault(key, [])
            if (states and states[-1] != state) or (not states and state):
                states.append(state)
    return found


def check(url: str, target: str) -> None:
    assert chains(held(target)) == audited(url)


async def write(database: Database, chance: random.Random, statements: int) -> None:
    for statement in written(chance, statements):
        await database.execute(statement)


def written(chance: random.Random, statements: int) -> Iterator[str]:
    for _ in range(statements):
        one, other = chance.randrange(30), chance.randrange(30)
        paid = chance.choice(["NULL", "12345678901234567890.0123456789", "0.1"])
        yield chance.choice(
            [
                f"INSERT INTO orders VALUES ({one}, {other}, 'it''s \"{other}\"', {paid}) ON CONFLICT DO NOTHING",
                f"UPDATE orders SET n = n + 1, paid = {paid} WHERE id BETWEEN {one} AND {other}",
                f"UPDATE orders SET note = note WHERE id = {one}",
                f"DELETE FROM orders WHERE id = {one}",
                f"UPDATE orders SET id = {other} WHERE id = {one} AND NOT EXISTS (SELECT FROM orders WHERE "
                f"id = {other})",
                f"BEGIN; UPDATE orders SET n = 5 WHERE id = {one}; DELETE FROM orders WHERE id = {other}; COMMIT",
                f"BEGIN; UPDATE orders SET n = 6 WHERE id = {one}; ROLLBACK",
                "TRUNCATE orders" if chance.random() < 0.1 else f"UPDATE orders SET note = 'x' WHERE id = {one}",
            ]
        )


@pytest.mark.parametrize("seed", first(1, range(2)))
async def test_a_history_equals_an_audit_log_through_restarts(
    database: Database, database_url: str, orders: Daemon, target: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 7)
    monkeypatch.setattr(module, "_PAGE", 5)
    await database.execute("CREATE TYPE audit_row AS (n integer, note text, paid numeric(30, 10))")
    chance = random.Random(seed)
    for _ in range(3):
        await write(database, chance, 25)
        await catch_up(orders, history_of(target))
        check(database_url, target)
    before = held(target)
    history = history_of(target)
    await catch_up(orders, history)
    assert history.written == 0
    assert held(target) == before


async def test_a_snapshot_writes_what_was_there_before_and_no_version_twice(
    database: Database, orders: Daemon, target: str
) -> None:
    await database.execute("ALTER TABLE orders DISABLE TRIGGER ALL; INSERT INTO orders VALUES (1, 1, 'old', 1.5)")
    await database.execute("ALTER TABLE orders ENABLE TRIGGER ALL; INSERT INTO orders VALUES (2, 2, 'new', 2.5)")
    for _ in range(2):
        await Registry(database).request_snapshot("orders")
        while await Registry(database).snapshot_step(1) is not None:
            await trio.lowlevel.checkpoint()
        await catch_up(orders, history_of(target))
        assert sorted((row["id"], row["note"], row["valid_to"]) for row in held(target)) == [
            (1, "old", None), (2, "new", None)
        ]  # fmt: skip


async def test_columns_come_and_go(database: Database, orders: Daemon, target: str) -> None:
    await database.execute(
        "DROP TABLE audit; DROP FUNCTION audited() CASCADE; INSERT INTO orders VALUES (1, 1, 'a', 1)"
    )
    await catch_up(orders, history_of(target))
    await database.execute(
        "CREATE TYPE mood AS ENUM ('good'); ALTER TABLE orders ADD COLUMN more jsonb, ADD COLUMN mood mood, "
        "ADD COLUMN tags text[], ADD COLUMN due timestamptz"
    )
    await database.execute(
        """UPDATE orders SET more = '{"a": [1.50, "é"]}', mood = 'good', tags = '{a,NULL}', due = '2026-01-01 00:00Z'"""
    )
    await catch_up(orders, history_of(target))
    await database.execute("ALTER TABLE orders DROP COLUMN note")
    await database.execute("UPDATE orders SET n = 2")
    await catch_up(orders, history_of(target))
    await database.execute("UPDATE orders SET n = 3; DELETE FROM orders")
    await catch_up(orders, history_of(target))
    rows = [(row["n"], row["note"], row["more"]) for row in held(target)]
    [last] = [row for row in held(target) if row["n"] == 3]
    assert (last["mood"], last["tags"], last["valid_to"] is None) == ("good", '["a", null]', False)
    assert str(last["due"]).startswith("2026-01-01")
    more: Any = '{"a": [1.50, "é"]}'
    if not target.startswith("delta:"):
        more = {"a": ["1.50", "é"]}
    assert rows == [(1, "a", None), (1, "a", more), (2, None, more), (3, None, more)]


async def test_versions_after_a_fork_are_taken_back(
    database: Database, database_url: str, orders: Daemon, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAGE", 2)
    await database.execute("CREATE TYPE audit_row AS (n integer, note text, paid numeric(30, 10))")
    chance = random.Random(5)
    await write(database, chance, 40)
    await catch_up(orders, history_of(target))
    before = held(target)
    await write(database, chance, 40)
    history = await catch_up(orders, history_of(target))
    point = max(max(row["_from"], row["_to"] or 0) for row in before)
    after = held(target)
    assert after != before
    await trio.to_thread.run_sync(history.take_back, point, None)
    unmarked = [{name: row[name] for name in row if name not in ("_token", "_seq")} for row in (*before, *held(target))]
    assert unmarked[: len(before)] == unmarked[len(before) :]
    await catch_up(orders, history_of(target))
    check(database_url, target)


async def test_a_source_that_was_restored_takes_back_what_came_after(
    database_url: str, settings: ServerSettings, paces: Paces, target: str, tmp_path: Path
) -> None:
    """The database is copied, written to, and then replaced by the copy, in which other things happen."""
    copy = f"{database_url}_restored" if "?" not in database_url else database_url.replace("?", "_restored?", 1)
    name = database_url.partition("?")[0].rpartition("/")[2]
    if not target.startswith("delta:"):
        target = copy.replace(f"{name}_restored", f"{name}_history", 1)
        psql(database_url, f'CREATE DATABASE "{name}_history" TEMPLATE template0')
    psql(database_url, f"{TABLE}; {AUDIT}; CREATE TYPE audit_row AS (n integer, note text, paid numeric(30, 10))")
    add = ("streams", "add", "orders", "--table", "public.orders", "--changes", "--database", database_url)
    assert (await replicad_async(*add)).returncode == 0
    chance = random.Random(7)

    async def play(url: str) -> None:
        async with open_daemon(settings, url, paces=paces) as daemon:
            with trio.fail_after(PATIENCE):
                while psql(url, *written(chance, 15)) or (await daemon.publisher.find("orders")) is None:
                    await trio.sleep(0.05)
            await catch_up(daemon, history_of(target))
            check(url, target)

    await play(database_url)
    psql(database_url.replace(name, "postgres", 1), f'CREATE DATABASE "{name}_restored" TEMPLATE "{name}"')
    await play(database_url)
    before = held(target)
    await play(copy)
    assert [row["_from"] for row in before] != [row["_from"] for row in held(target)]
    for one in ("restored", "history"):
        psql(database_url, f'DROP DATABASE IF EXISTS "{name}_{one}" WITH (FORCE)')


async def test_of_two_processes_one_is_refused_and_the_history_is_whole(
    database: Database, database_url: str, orders: Daemon, target: str
) -> None:
    await database.execute("CREATE TYPE audit_row AS (n integer, note text, paid numeric(30, 10))")
    chance = random.Random(1)
    await write(database, chance, 20)
    await catch_up(orders, history_of(target))
    late = history_of(target)
    await trio.to_thread.run_sync(late.begin)
    await database.execute("INSERT INTO orders VALUES (100, 1, 'a', 1)")
    await catch_up(orders, history_of(target))
    line = '{"op":"i","key":101,"row":{"id":101,"n":1,"note":"z","paid":1},"schema":1,"at":"2026-01-01T00:00:00+00:00"}'
    with pytest.raises(DownstreamError, match="another"):
        await trio.to_thread.run_sync(partial(late.take, [(late.done + 1000, line)], None))
    check(database_url, target)


async def test_a_process_that_is_killed_goes_on_where_it_was(
    database: Database, database_url: str, orders: Daemon, target: str
) -> None:
    await database.execute("CREATE TYPE audit_row AS (n integer, note text, paid numeric(30, 10))")
    command = [
        sys.executable, "-m", "replicad", "pipeline", "history", "orders", "--to", target,
        "--server", f"127.0.0.1:{orders.addresses[0].port}",
    ]  # fmt: skip
    chance = random.Random(3)
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:  # noqa: ASYNC220
            await write(database, chance, 30)
            wanted = int(psql(database_url, "SELECT max(id) FROM replicad.change_1"))
            with trio.fail_after(PATIENCE):
                while (await trio.to_thread.run_sync(_reached, target)) < wanted // 2:
                    await trio.sleep(0.05)
                    await write(database, chance, 2)
            started.kill()
    done = await replicad_async(*command[3:], "--once")
    assert done.returncode == 0, done.stderr
    check(database_url, target)


def _reached(target: str) -> int:
    history = history_of(target)
    history.begin()
    return history.done


async def test_a_stream_that_lost_changes_or_is_another_one_is_refused(
    database: Database, orders: Daemon, target: str
) -> None:
    await database.execute("INSERT INTO orders VALUES (1, 1, 'a', 1)")
    history = await catch_up(orders, history_of(target))
    with pytest.raises(UsageError, match="--accept-gap"):
        module._reset(history, Reset("orders", "*", None, "token_expired"), None, accept_gap=False)
    module._reset(history, Reset("orders", "*", None, "token_expired"), None, accept_gap=True)
    with pytest.raises(UsageError, match="give another table"):
        module._reset(history, Reset("orders", "*", None, "token_ahead"), None, accept_gap=True)
    with pytest.raises(UsageError, match="give postgresql"):
        sink_of_history("mysql://x", "t")


async def test_what_is_no_history_is_refused(database: Database, database_url: str, orders: Daemon) -> None:
    await database.execute("CREATE TABLE orders_history (id integer)")
    refused = await replicad_async(
        "pipeline", "history", "orders", "--to", database_url, "--once",
        "--server", f"127.0.0.1:{orders.addresses[0].port}",
    )  # fmt: skip
    assert refused.returncode == 2
    assert "is no history: it has no column _from" in refused.stderr


DESCRIBED = [
    {"name": "id", "type": "integer"}, {"name": "text", "type": "text"}, {"name": "due", "type": "date"}
]  # fmt: skip


def test_rows_without_unchanged_columns_and_values_that_cannot_be_held(tmp_path: Path) -> None:
    target = f"delta:{tmp_path / 'lake'}"
    history = history_of(target)
    history.begin()

    def change(op: str, **row: Any) -> str:
        return json.dumps({"op": op, "key": row["id"], "row": row, "schema": 1, "at": "2026-01-01T00:00:00+02:00"})

    def describe(*columns: dict[str, str]) -> str:
        return json.dumps({"op": "s", "row": {"columns": [*DESCRIBED, *columns]}, "schema": 1, "at": "x"})

    lines = [
        describe(), change("u", id=1, due=None), change("u", id=2, text="a", due="2026-01-02"),
        change("u", id=2, due=None), change("r", id=2, text="a", due=None),
    ]  # fmt: skip
    history.take(list(enumerate(lines, 1)), "ab12")
    assert [(row["_from"], row["_to"], row["text"], str(row["due"])) for row in held(target)] == [
        (3, 4, "a", "2026-01-02"), (4, None, "a", "None")
    ]  # fmt: skip
    assert history.token == "ab12!5"
    with pytest.raises(DownstreamError, match=r"change 6: column due is 'infinity'.*cannot hold as date32"):
        history.take([(6, change("i", id=3, text="", due="infinity"))], "ab12")
    with pytest.raises(UsageError, match='column "valid_from"'):
        history.take([(6, describe({"name": "valid_from", "type": "date"}))], "ab12")
    with pytest.raises(UsageError, match="no changes of a table"):
        history.take([(6, '{"a": 1}')], "ab12")
    assert len(held(target)) == 2


@pytest.mark.parametrize("kind", first(1, ["delta", "postgres"]))
def test_a_batch_of_long_rows_is_bounded_in_bytes(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Forty rows of 100 kB, which are written, changed by short changes, and ended together."""
    target = database_url if kind == "postgres" else f"delta:{tmp_path / 'lake'}"
    rows, width, bound = 40, 100_000, 800_000
    monkeypatch.setattr(module, "MOST_BYTES", bound)
    history = history_of(target)
    history.begin()
    sizes: list[int] = []
    as_rows = TableHistory.as_rows

    def watched(history: TableHistory, versions: Any, gone: Any = ()) -> Any:
        found = as_rows(history, versions, gone)
        sizes.append(found.writes.nbytes)
        return found

    monkeypatch.setattr(TableHistory, "as_rows", watched)

    def change(op: str, id_: int, **row: Any) -> str:
        return json.dumps({"op": op, "key": id_, "row": row, "schema": 1, "at": "2026-01-01T00:00:00Z"})

    lines = [json.dumps({"op": "s", "row": {"columns": DESCRIBED}, "schema": 1, "at": "x"})]
    lines += [change("i", one, id=one, text=f"{one:0{width}}", due=None) for one in range(rows)]
    history.take(list(enumerate(lines, 1)), "ab12")
    assert (max(sizes) <= bound + 2 * width, sum(sizes) >= rows * width, history.written >= 5) == (True, True, True)
    sizes.clear()
    short = [change("u", one, id=one, due="2026-01-02") for one in range(rows)]
    history.take(list(enumerate(short, 1000)), "ab12")
    assert max(sizes) <= 2 * bound + 2 * width, "the old versions and the new ones"
    assert sum(sizes) >= 2 * rows * width
    sizes.clear()
    emptied = json.dumps({"op": "t", "schema": 1, "at": "2026-01-03T00:00:00Z"})
    history.take([(2000, emptied)], "ab12")
    assert max(sizes) <= bound + 2 * width
    found = held(target)
    assert [(row["_from"], row["_to"], str(row["due"])) for row in found] == [
        *((2 + one, 1000 + one, "None") for one in range(rows)),
        *((1000 + one, 2000, "2026-01-02") for one in range(rows)),
    ]
    assert all(row["text"] == f"{row['id']:0{width}}" for row in found)
