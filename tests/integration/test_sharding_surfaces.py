"""The same writers from where there is no trio: threads on a DB-API driver, and the command line."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from typing import Any

import pytest
from adbc_driver_postgresql import dbapi

from replicad.cli import app
from replicad.errors import NotOwner
from replicad.postgres.literals import fill
from replicad.sharding import BlockingShardedWriter
from tests.conftest import PATIENCE, psql
from tests.sharding_checker import OVERLAPS, ROWS, WRITE

pytestmark = pytest.mark.postgres

KEYS = [f"room{number}" for number in range(12)]


def replicad(url: str, *words: str, status: int = 0) -> Any:
    """Run a command on that database; what it prints, or the JSON objects of `--json`."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert app.run([*words, "--database", url]) == status
    return [json.loads(line) for line in out.getvalue().splitlines()] if "--json" in words else out.getvalue()


@pytest.fixture
def url(database_url: str) -> str:
    """A database with the stream `events`, whose writers share 16 slots."""
    psql(database_url, ROWS)
    replicad(database_url, "streams", "add", "events", "--table", "public.events", "--id", "id")
    assert "share 16 slots\n" in replicad(database_url, "sharding", "enable", "events", "--slots", "16")
    return database_url


def write(connection: Any, key: str, writer: BlockingShardedWriter) -> None:
    with connection.cursor() as cursor:
        cursor.execute(fill(WRITE, (key, writer.instance, writer.term(key))))


def balanced(*writers: BlockingShardedWriter) -> bool:
    return [writer.statistics().owned for writer in writers] == [16 // len(writers)] * len(writers)


def wait_until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(int(PATIENCE / 0.02)):
        if condition():
            return
        waited.wait(0.02)
    raise AssertionError("waited in vain")


def test_threads_of_two_writers_share_a_stream_while_one_of_them_comes_and_goes(url: str) -> None:
    over = threading.Event()
    done: list[str] = []

    def work(sites: dict[str, BlockingShardedWriter], key: str) -> None:
        at = "a"
        with dbapi.connect(url) as connection:
            while not over.is_set():
                try:
                    with sites[at].owning(connection, key, wait=PATIENCE):
                        write(connection, key, sites[at])
                    done.append(key)
                except NotOwner as refused:
                    if refused.owner is None:
                        raise  # it waited in vain
                    at = refused.owner

    def connect() -> Any:
        return dbapi.connect(url)

    with BlockingShardedWriter(connect, "events", "a", ttl=5) as first, ThreadPoolExecutor() as pool:
        sites = {"a": first}
        working = [pool.submit(work, sites, key) for key in KEYS[:3]]
        try:
            with BlockingShardedWriter(connect, "events", "b", ttl=5) as second:
                sites["b"] = second
                wait_until(lambda: balanced(first, second))
                before = len(done)
                wait_until(lambda: len(done) > before + 20)
            sites["b"] = first
            wait_until(lambda: balanced(first))
        finally:
            over.set()
        for future in working:
            future.result(PATIENCE)
    assert psql(url, f"SELECT count(*) FROM ({OVERLAPS}) o") == "0"
    assert int(psql(url, "SELECT count(*) FROM events")) == len(done) > 10
    assert psql(url, "SELECT count(*) FROM replicad.writer_member") == "0"


def test_a_fence_that_refuses_a_thread_rolls_back_and_names_the_owner(url: str) -> None:
    with BlockingShardedWriter(lambda: dbapi.connect(url), "events", "a", ttl=60) as writer:
        psql(url, "SELECT replicad.writer_join('events', 'b', '60 s', 'b:1')")
        psql(
            url,
            "SELECT replicad.writer_give('events', 'a', array_agg(s.slot), array_agg(s.term), array_agg('b'::text)) "
            "FROM replicad.writer_slot s WHERE s.owner = 'a'",
        )
        with dbapi.connect(url) as connection:
            with pytest.raises(NotOwner) as caught, writer.owning(connection, "k", wait=1):
                pass
            assert (caught.value.owner, caught.value.address) == ("b", "b:1")
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
                assert cursor.fetchone() == (1,)


def test_a_thread_that_cannot_join_says_why(url: str) -> None:
    replicad(url, "sharding", "disable", "events")
    with pytest.raises(Exception, match="do not share its keys"):
        with BlockingShardedWriter(lambda: dbapi.connect(url), "events", "a"):
            pass


def test_people_see_who_has_what_and_what_does_not_move(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "share 16 slots already" in replicad(url, "sharding", "enable", "events", "--slots", "16")
    (told,) = replicad(url, "sharding", "list", "--json")
    assert (told["stream"], told["slots"], told["writers"], told["unowned"]) == ("events", 16, 0, 16)
    assert "nothing; no writer has taken them yet" in replicad(url, "sharding", "show", "events")
    with BlockingShardedWriter(lambda: dbapi.connect(url), "events", "a", address="a:1", ttl=5):
        (told,) = replicad(url, "sharding", "show", "events", "--json")
        (member,) = told["writers"]
        assert (member["writer"], member["slots"], member["share"], member["address"]) == ("a", 16, "100.0%", "a:1")
        assert (told["unowned"], told["stuck"]) == (0, [])
        assert "100.0%" in replicad(url, "sharding", "show", "events")
    replicad(url, "sharding", "disable", "events")
    assert "no stream's keys are shared" in replicad(url, "sharding", "list")
    replicad(url, "sharding", "show", "events", status=7)
    assert "sharding enable events" in capsys.readouterr().err
