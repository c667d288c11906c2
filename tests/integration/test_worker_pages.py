"""The worker programs of docs/howto/, with the commands beside them, keep their downstreams equal."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from replicad.postgres.bridge import Database
from tests.commands import replicad_async
from tests.conftest import PATIENCE, psql
from tests.daemons import Daemon
from tests.redis_servers import PROGRAM, WHY_NOT, RealRedis

ROOT = Path(__file__).parents[2]
BLOCKS = re.compile(r"```\n((?:replicad tubes [^\n]*\n)+)```\n\n```python\n(.*?)```\n", re.DOTALL)
PROGRAMS = {
    re.search(r"tubes create (\w+)", commands)[1]: (commands, program)  # type: ignore[index]
    for page in ("search-index", "copy-to-postgres", "redis-cache")
    for commands, program in BLOCKS.findall((ROOT / f"docs/howto/{page}.md").read_text(encoding="utf-8"))
}


def test_the_pages_have_whole_programs() -> None:
    assert sorted(PROGRAMS) == ["casts", "documents", "films"]


async def set_up(database_url: str, tube: str) -> None:
    for line in PROGRAMS[tube][0].splitlines():
        done = await replicad_async(*shlex.split(line)[1:], "--database", database_url)
        assert done.returncode == 0, done.stderr


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


async def works(
    database: Database, tube: str, changes: list[str], equal: Callable[[], Any], fresh: Callable[[], Any]
) -> None:
    """Run the program of a tube beside the changes. `equal`: the downstream; `fresh`: what it must be."""
    with running(PROGRAMS[tube][1]) as process:
        for change in [*changes, f"SELECT tube.tube_backfill_schedule('{tube}', NULL, 0, 9)"]:
            await database.execute(change)
            with trio.fail_after(PATIENCE):
                while await database.fetch_value(f"SELECT count(*) FROM tube.{tube}"):
                    assert process.poll() is None, process.stderr and process.stderr.read().decode()
                    await trio.sleep(0.05)
            if "replica" not in change:
                assert await trio.to_thread.run_sync(equal) == fresh()
        process.send_signal(signal.SIGINT)
        await trio.to_thread.run_sync(process.communicate)


@pytest.fixture
def addresses(daemon: Daemon, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE", database_url)
    monkeypatch.setenv("REPLICAD_PORT", str(daemon.addresses[0].port))


async def test_the_search_index_has_the_released_films(
    database: Database, database_url: str, addresses: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDEX", str(tmp_path / "films.sqlite"))
    psql(
        database_url,
        "CREATE TABLE film (film_id integer PRIMARY KEY, title text, description text, released boolean);"
        "INSERT INTO film SELECT n, 'title ' || n, 'of a cat', n % 3 > 0 FROM generate_series(1, 300) n",
    )
    await set_up(database_url, "films")

    def equal() -> list[tuple[Any, ...]]:
        texts = sqlite3.connect(tmp_path / "films.sqlite")
        return texts.execute("SELECT rowid, title FROM films WHERE films MATCH 'cat' ORDER BY rowid").fetchall()

    def fresh() -> list[tuple[Any, ...]]:
        rows = psql(database_url, "SELECT film_id, title FROM film WHERE released AND description ~ 'cat' ORDER BY 1")
        return [(int(number), title) for number, title in (row.split("|") for row in rows.splitlines())]

    changes = [
        "SELECT 1",
        "UPDATE film SET released = NOT released WHERE film_id < 100",
        "UPDATE film SET description = 'of a dog' WHERE film_id % 5 = 0; DELETE FROM film WHERE film_id % 7 = 0",
        "SET session_replication_role = replica; DELETE FROM film WHERE film_id > 250; RESET ALL",
    ]
    await works(database, "films", changes, equal, fresh)


@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
async def test_the_cache_has_all_documents(
    database: Database, database_url: str, addresses: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = RealRedis(tmp_path)
    monkeypatch.setenv("REDIS_PORT", str(redis.port))
    psql(
        database_url,
        "CREATE TABLE document (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), title text, body text);"
        "INSERT INTO document (title, body) SELECT 't' || n, E'ü\\n' || n FROM generate_series(1, 300) n",
    )
    await set_up(database_url, "documents")
    names: dict[str, Any] = {"__name__": "reader"}
    exec(compile(PROGRAMS["documents"][1], "documents", "exec"), names)

    def equal() -> dict[str, Any]:
        (keys,) = names["ask_redis"](("KEYS", "document:*"))
        values = names["ask_redis"](("MGET", *[key.decode() for key in keys]))[0] if keys else []
        return {key.decode().partition(":")[2]: json.loads(value) for key, value in zip(keys, values, strict=True)}

    def fresh() -> dict[str, Any]:
        text = psql(
            database_url, "SELECT json_object_agg(id, json_build_object('title', title, 'body', body)) FROM document"
        )
        return dict(json.loads(text))

    changes = [
        "SELECT 1",
        "UPDATE document SET body = 'new' WHERE title > 't2'; DELETE FROM document WHERE title ~ '5'",
        "SET session_replication_role = replica; DELETE FROM document WHERE title ~ '7'; RESET ALL",
    ]
    try:
        await works(database, "documents", changes, equal, fresh)
    finally:
        redis.stop()


async def test_the_other_postgres_has_the_same_rows(
    database: Database, database_url: str, postgres_url: str, addresses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    psql(
        database_url,
        "CREATE TABLE film_actor (actor_id integer, film_id integer, role text, PRIMARY KEY (actor_id, film_id));"
        "INSERT INTO film_actor SELECT n % 20, n, 'r' || n FROM generate_series(1, 300) n;"
        "CREATE SCHEMA target; CREATE TABLE target.film_actor (LIKE film_actor INCLUDING ALL, seq bigint)",
    )
    monkeypatch.setenv("TARGET", f"{database_url}&options=-csearch_path%3Dtarget")
    await set_up(database_url, "casts")

    def equal() -> str:
        return psql(database_url, "SELECT actor_id, film_id, role FROM target.film_actor ORDER BY 1, 2")

    def fresh() -> str:
        return psql(database_url, "SELECT actor_id, film_id, role FROM film_actor ORDER BY 1, 2")

    changes = [
        "SELECT 1",
        "UPDATE film_actor SET actor_id = actor_id + 100 WHERE film_id < 40",
        "DELETE FROM film_actor WHERE film_id % 7 = 0",
        "SET session_replication_role = replica; DELETE FROM film_actor WHERE film_id > 250; RESET ALL",
    ]
    await works(database, "casts", changes, equal, fresh)
