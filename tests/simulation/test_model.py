"""The model of Postgres does what Postgres does: the same steps on both, and after each the same answers.

The statements are those that the daemon sends, with the same text and the same arguments.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import psycopg.sql
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import RawCursor
from psycopg.rows import dict_row

from replicad.postgres.statements import load_sql, statement, value_call
from replicad.streams.row_text import RowText
from tests.conftest import install, psql
from tests.forks.cluster import Cluster as Servers
from tests.lengths import examples
from tests.roles import ROLES

from .postgres import LOCKED, Cluster, Failed, Mode, Pace, State, Transaction
from .statements import SCHEMA, Backend, Registry

pytestmark = pytest.mark.postgres

SESSIONS = 3
SOON = 0.02  # seconds that a step waits for a lock
TABLE = """
    CREATE TABLE public.s0 (id bigserial PRIMARY KEY, writer text NOT NULL, body json NOT NULL);
    SELECT replicad.stream_add('s0', 'public.s0', 'id', 'writer', 't.body')
"""

_session = st.integers(0, SESSIONS - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), _session, st.integers(1, 40)),
        st.tuples(st.just("draw"), _session, st.integers(1, 3)),
        st.tuples(
            st.sampled_from(("commit", "commit", "roll_back", "prepare", "truncate", "lock")), _session, st.just(0)
        ),
        st.tuples(st.sampled_from(("finish", "undo", "checkpoint", "note", "go_on")), st.just(0), st.just(0)),
        st.tuples(st.just("set_on"), st.just(0), st.integers(1, 50)),
    ),
    min_size=4,
    max_size=25,
)

Step = tuple[str, int, int]


class Real:
    """The steps on a real server. Statements with $1 go as they are."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.number = 0
        self.connect()

    def connect(self) -> None:
        self.sessions: list[Any] = []
        for number in range(SESSIONS + 1):
            name = f"w{number}"
            one = psycopg.connect(
                self.url, autocommit=True, application_name=name, cursor_factory=RawCursor, row_factory=dict_row
            )
            one.execute(f"SET lock_timeout = '{round(SOON * 1000)}ms'")
            self.sessions.append(one)
        self.observer = self.sessions.pop()
        self.open = [False] * SESSIONS
        self.gids: list[str] = []

    def close(self) -> None:
        for one in (*self.sessions, self.observer):
            with suppress(psycopg.Error):
                one.close()

    def clear(self) -> None:
        """Nothing is there but an unused table that is a stream."""
        for number, one in enumerate(self.sessions):
            if self.open[number]:
                one.execute("ROLLBACK")
        for gid in self.gids:
            self.observer.execute(f"ROLLBACK PREPARED '{gid}'")
        self.open, self.gids = [False] * SESSIONS, []
        self.observer.execute("SELECT replicad.stream_remove(name) FROM replicad.stream")
        self.observer.execute("DROP TABLE IF EXISTS public.s0")
        for one in TABLE.split(";"):
            self.observer.execute(one)

    def step(self, word: str, session: int, much: int) -> object:
        one = self.sessions[session]
        try:
            return getattr(self, word)(one, session, much)
        except psycopg.errors.LockNotAvailable:
            one.execute("ROLLBACK")
            self.open[session] = False
            return LOCKED

    def _begin(self, one: Any, session: int) -> None:
        if not self.open[session]:
            one.execute("BEGIN")
            self.open[session] = True

    def insert(self, one: Any, session: int, much: int) -> object:
        self._begin(one, session)
        rows = f"SELECT 'w{session}', '1' FROM generate_series(1, {much})"
        sql = f"INSERT INTO public.s0 (writer, body) {rows} RETURNING id"
        return [row["id"] for row in one.execute(sql).fetchall()]

    def draw(self, one: Any, session: int, much: int) -> object:
        self._begin(one, session)
        found = one.execute(f"SELECT nextval('public.s0_id_seq') AS id FROM generate_series(1, {much})").fetchall()
        return [row["id"] for row in found]

    def _end(self, one: Any, session: int, sql: str) -> object:
        if self.open[session]:
            one.execute(sql)
            self.open[session] = False
        return None

    def commit(self, one: Any, session: int, _: int) -> object:
        return self._end(one, session, "COMMIT")

    def roll_back(self, one: Any, session: int, _: int) -> object:
        return self._end(one, session, "ROLLBACK")

    def prepare(self, one: Any, session: int, _: int) -> object:
        if self.open[session]:
            self.number += 1
            self.gids.append(f"g{self.number}")
            return self._end(one, session, f"PREPARE TRANSACTION 'g{self.number}'")
        return None

    def finish(self, *_: object) -> object:
        return self.gids and self.observer.execute(f"COMMIT PREPARED '{self.gids.pop(0)}'") and None

    def undo(self, *_: object) -> object:
        return self.gids and self.observer.execute(f"ROLLBACK PREPARED '{self.gids.pop(0)}'") and None

    def lock(self, one: Any, session: int, _: int) -> object:
        self._begin(one, session)
        one.execute("LOCK TABLE public.s0 IN ACCESS EXCLUSIVE MODE")
        return None

    def truncate(self, one: Any, session: int, _: int) -> object:
        """In a transaction of its own: one that has taken ids sees its own new sequence, which the model has not."""
        if self.open[session]:
            one.execute("ROLLBACK")
            self.open[session] = False
        one.execute("TRUNCATE public.s0 RESTART IDENTITY")
        return None

    def checkpoint(self, *_: object) -> object:
        self.observer.execute("CHECKPOINT")
        return None

    def set_on(self, _one: Any, _session: int, much: int) -> object:
        try:
            self.observer.execute(
                f"SELECT setval('public.s0_id_seq', {much} + coalesce(pg_sequence_last_value('public.s0_id_seq'), 0))"
            )
        except psycopg.errors.LockNotAvailable:
            return LOCKED
        return None

    def note(self, *_: object) -> object:
        """A daemon notes the last value."""
        return self._at(
            "SELECT replicad.stream_note($1, replicad.stream_epoch(s), $2, '{}', '{}') AS done FROM replicad.stream s"
        )

    def _at(self, sql: str) -> object:
        number, last = (
            self._number(),
            self.observed("SELECT coalesce(pg_sequence_last_value('public.s0_id_seq'), 0) AS v"),
        )
        if last == LOCKED:
            return LOCKED
        return self.observed(sql, number, last[0]["v"])

    def go_on(self, *_: object) -> object:
        """A daemon looks whether the generation is valid."""
        return self.observed(value_call(SCHEMA, "stream_continue", 0))

    def _number(self) -> int:
        return int(self.observer.execute("SELECT number FROM replicad.stream").fetchone()["number"])

    def observed(self, sql: str, *args: Any) -> Any:
        try:
            return self.observer.execute(sql, args).fetchall()
        except psycopg.errors.LockNotAvailable:
            return LOCKED

    # --- what is seen ---

    def seen(self) -> dict[str, Any]:
        ids = self.observer.execute(
            "SELECT 's0'::regclass::oid::bigint AS t, 's0_id_seq'::regclass::oid::bigint AS q"
        ).fetchone()
        table, sequence = ids["t"], ids["q"]
        values = self.observed(load_sql("horizon_last_values"), [sequence])
        holders = self.observer.execute(
            load_sql("horizon_holders").replace("{moved}", "'{}'::oid[]").replace("{key}", "NULL::bytea"),
            ([table], [sequence], [], [], [], False, [sequence], [table]),
        ).fetchall()
        blockers = self.observer.execute(load_sql("horizon_blockers"), ([sequence], [])).fetchall()
        return {
            "value": self.observed("SELECT last_value, is_called, log_cnt FROM public.s0_id_seq"),
            "last_value": values if values == LOCKED else values[0]["last_value"],
            "holders": sorted(str(row["application_name"]) for row in holders if row["holder"] is not None),
            "blockers": len(blockers),
            "rows": self.observed(_rows_sql(table)),
            "lineage": [
                (row["number"], row["began_at"], row["reason"])
                for row in self.observed(statement("stream_lineage", SCHEMA), None)
            ],
            "published": [row["position"] for row in self.observed(statement("stream_published", SCHEMA))],
            "earliest": self.observed(_text()._look("rows_earliest"), self._number()),
        }


def _text() -> RowText:
    return RowText(1, "s0", "public.s0", "id", "writer", "t.body", unique_ids=True)


def _rows_sql(_: int) -> str:
    """The rows without a check of trimming, which is another function for each stream."""
    return "SELECT id, writer FROM public.s0 AS t ORDER BY id"


class Model:
    """The same steps on the model."""

    def __init__(self, seed: int = 1) -> None:
        self.cluster = Cluster(random.Random(seed), pace=Pace(0.0002, 0.0002, 1.0))
        self.registry = Registry(self.cluster)
        self.table = self.cluster.create("s0")
        self.entry = self.registry.add(self.table, by_writer=True)
        self.reconnect()

    def reconnect(self) -> None:
        self.backend = Backend(self.cluster, self.registry, "observer")
        self.backend._lock_timeout = SOON
        self.open: list[Transaction | None] = [None] * SESSIONS

    async def step(self, word: str, session: int, much: int) -> object:
        try:
            return await getattr(self, word)(session, much)
        except Failed as error:
            if error.sqlstate == LOCKED and (one := self.open[session]) is not None:
                self.cluster.abort(one)
                self.open[session] = None
            return error.sqlstate

    def _begin(self, session: int) -> Transaction:
        one = self.open[session]
        if one is None:
            one = self.open[session] = self.cluster.begin(f"w{session}")
        return one

    async def insert(self, session: int, much: int) -> object:
        one = self._begin(session)
        await self.cluster.locks.acquire(self.table.oid, one, Mode.ROW_EXCLUSIVE, SOON)
        ids = await self._draw(one, much)
        for id in ids:
            self.cluster.insert(self.table, one, id, f"w{session}", "1")
        return ids

    async def draw(self, session: int, much: int) -> object:
        return await self._draw(self._begin(session), much)

    async def _draw(self, one: Transaction, much: int) -> list[int]:
        await self.cluster.locks.acquire(self.table.sequence.oid, one, Mode.ROW_EXCLUSIVE, SOON)
        return [self.cluster.nextval(self.table.sequence, one) for _ in range(much)]

    async def commit(self, session: int, _: int) -> object:
        if (one := self.open[session]) is not None:
            await self.cluster.commit(one)
            self.open[session] = None
        return None

    async def roll_back(self, session: int, _: int) -> object:
        if (one := self.open[session]) is not None:
            self.cluster.abort(one)
            self.open[session] = None
        return None

    async def prepare(self, session: int, _: int) -> object:
        if (one := self.open[session]) is not None:
            await self.cluster.prepare(one, "g")
            self.open[session] = None
        return None

    def _prepared(self) -> Transaction | None:
        return next((one for one in self.cluster.transactions if one.state is State.PREPARED), None)

    async def finish(self, *_: object) -> object:
        if (one := self._prepared()) is not None:
            await self.cluster.commit(one)
        return [] if one is None else None

    async def undo(self, *_: object) -> object:
        if (one := self._prepared()) is not None:
            self.cluster.abort(one)
        return [] if one is None else None

    async def lock(self, session: int, _: int) -> object:
        await self.cluster.locks.acquire(self.table.oid, self._begin(session), Mode.ACCESS_EXCLUSIVE, SOON)
        return None

    async def truncate(self, session: int, _: int) -> object:
        await self.roll_back(session, 0)
        one = self._begin(session)
        await self.cluster.locks.acquire(self.table.oid, one, Mode.ACCESS_EXCLUSIVE, SOON)
        await self.cluster.locks.acquire(self.table.sequence.oid, one, Mode.ACCESS_EXCLUSIVE, SOON)
        self.cluster.truncate(self.table, one)
        return await self.commit(session, 0)

    async def checkpoint(self, *_: object) -> object:
        self.cluster.checkpoint()

    async def set_on(self, _: int, much: int) -> object:
        one = self.cluster.begin("observer")
        try:
            await self.cluster.locks.acquire(self.table.sequence.oid, one, Mode.ROW_EXCLUSIVE, SOON)
            self.cluster.setval(self.table.sequence, much + (self.cluster.last_value(self.table.sequence) or 0))
        finally:
            self.cluster.abort(one)

    async def note(self, *_: object) -> object:
        last = self.cluster.last_value(self.table.sequence) or 0
        return [{"done": self.registry.note(self.entry.number, self.entry.present.id, last, [], [])}]

    async def go_on(self, *_: object) -> object:
        return [{"stream_continue": self.registry.continue_streams()}]

    async def observed(self, sql: str, *args: Any) -> Any:
        try:
            return await self.backend.fetch(sql, *args)
        except Failed as error:
            return error.sqlstate

    async def seen(self) -> dict[str, Any]:
        table, sequence = self.table.oid, self.table.sequence.oid
        values = await self.observed(load_sql("horizon_last_values"), [sequence])
        sql = load_sql("horizon_holders").replace("{moved}", "'{}'::oid[]").replace("{key}", "NULL::bytea")
        holders = await self.observed(sql, [table], [sequence], [], [], [], False, [sequence], [table])
        value = self.table.sequence.value
        shown = {"last_value": value.last, "is_called": value.called, "log_cnt": value.logged}
        locked = self.cluster.locks.conflicts(self.table.oid, self.backend._session, Mode.ACCESS_SHARE)
        rows = [{"id": row.id, "writer": row.writer} for row in self.table.between(-1, 1 << 60)]
        return {
            "value": [shown],
            "last_value": values if values == LOCKED else values[0]["last_value"],
            "holders": sorted(str(row["application_name"]) for row in holders if row["holder"] is not None),
            "blockers": len(await self.observed(load_sql("horizon_blockers"), [sequence], [])),
            "rows": LOCKED if locked else rows,
            "lineage": [
                (row["number"], row["began_at"], row["reason"])
                for row in await self.observed(statement("stream_lineage", SCHEMA), None)
            ],
            "published": [row["position"] for row in await self.observed(statement("stream_published", SCHEMA))],
            "earliest": [
                {"coalesce": row["earliest"]} for row in await self.observed(_text()._look("rows_earliest"), 1)
            ]
            if not locked
            else LOCKED,
        }


@pytest.fixture(scope="module")
def real(postgres_url: str, served_template: str) -> Iterator[Real]:
    name = "test_of_the_model"
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {served_template} STRATEGY FILE_COPY")
        one = Real(psycopg.conninfo.make_conninfo(postgres_url, dbname=name))
        yield one
        one.close()
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def on_both(real: Real, steps: list[Step]) -> None:
    """Take the steps on both; after each compare."""

    async def scenario() -> None:
        model = Model()
        for number, step in enumerate(steps):
            done = steps[: number + 1]
            assert real.step(*step) == await model.step(*step), done
            there, here = real.seen(), await model.seen()
            assert there == here, done

    real.clear()
    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))


@given(STEPS)
@settings(max_examples=examples(12), deadline=None)
def test_random_steps_have_the_same_rows_values_locks_and_generations(real: Real, steps: list[Step]) -> None:
    on_both(real, steps)


@pytest.mark.long
def test_a_crash_a_promotion_and_a_switchover_leave_the_same(postgres_folder: Path) -> None:
    """Of sequences above all: each server shows what its own files and the WAL that it has read have."""
    chance = random.Random(4)
    servers = Servers(postgres_folder)
    try:
        servers.start()
        psql(servers.url, ROLES)
        install(servers.url)
        real = Real(servers.url)
        real.clear()
        standby = servers.make_standby()
        old = None

        async def scenario() -> None:
            nonlocal standby, old
            model = Model()

            async def work() -> None:
                for _ in range(8):
                    word = chance.choice(
                        ("insert", "insert", "draw", "commit", "commit", "prepare", "checkpoint", "note")
                    )
                    step = word, chance.randrange(SESSIONS), chance.choice((1, 5, 40))
                    assert real.step(*step) == await model.step(*step), step
                real.observed("SELECT pg_logical_emit_message(true, 'flush', '')")
                model.cluster._flush(model.cluster.lsn)

            async def compare(what: str) -> None:
                real.close()
                gids = real.gids
                real.connect()
                real.gids = gids
                model.reconnect()
                assert real.seen() == await model.seen(), what
                assert real.step("go_on", 0, 0) == await model.step("go_on", 0, 0)
                assert real.seen() == await model.seen(), f"{what}, in the next generation"

            def replicated() -> None:
                lag = "SELECT bool_and(replay_lsn >= pg_current_wal_flush_lsn()) AS done FROM pg_stat_replication"
                while real.observed(lag)[0]["done"] is not True:
                    time.sleep(0.02)
                model.cluster.replicated = model.cluster.lsn

            for what in ("crash", "restart", "crash", "switchover", "crash", "switchover", "crash"):
                await work()
                if what == "crash":
                    servers.restart()
                    model.cluster.crash()
                elif what == "restart":
                    servers.restart(signal.SIGINT)
                    model.cluster.restart()
                else:
                    replicated()
                    real.close()
                    old = servers.switch_over(standby)
                    servers.follow(old)
                    standby = old
                    model.cluster.promote(planned=True)
                await compare(what)
            await work()
            replicated()
            servers.promote(standby)
            model.cluster.promote(planned=False)
            await compare("promotion")

        trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))
        real.close()
    finally:
        servers.close()
