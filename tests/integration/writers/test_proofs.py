"""A reservation counts only with a proof: what a role without rights locks holds nothing back; a writer's lock does.

Whatever the guard admits is seen by the horizon: `Facts.poll` finds every row that turns up below a published position.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from replicad.errors import DatabaseError, StreamRefused
from replicad.streams.registry import horizon_source
from replicad.streams.writer import open_writer

from .conftest import Facts

PROOFS = (
    "SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks "
    "WHERE locktype = 'advisory' AND classid::bigint >> 16 < 12800"
)


@pytest.fixture
async def stranger(facts: Facts) -> AsyncIterator[str]:
    """A role that may merely connect."""
    role = "proofs_" + str(await facts.db.fetch_value("SELECT oid FROM pg_database WHERE datname = current_database()"))
    await facts.db.execute(f"CREATE ROLE {role}; CREATE SCHEMA app; GRANT USAGE ON SCHEMA app TO {role}")
    yield role
    await facts.db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_advisory_locks_of_a_role_without_rights_hold_nothing_back(facts: Facts, stranger: str) -> None:
    number = facts.stream.number
    async with open_writer(facts.db, "facts", "one") as writer, facts.transaction("one") as thief:
        await thief.execute(f"SET LOCAL ROLE {stranger}")
        async with writer.get_next(), facts.transaction("two") as other:
            await other.execute("SELECT replicad.stream_next('facts')")
            # Both the proof of a session and that of a transaction can be read by every role, and locked as well.
            proofs = [row[0] for row in await thief.fetch(PROOFS)]
            assert len(proofs) == 2
            for key in proofs:
                await thief.execute("SELECT pg_advisory_lock_shared($1), pg_advisory_xact_lock_shared($1)", key)
            for certified in ("false", "true"):
                key_sql = f"SELECT pg_advisory_lock_shared(replicad.stream_lock_key($1, 0, {certified}))"
                await thief.execute(key_sql, number)
            await thief.execute("SELECT pg_current_xact_id()")
            await other.execute("COMMIT")
        assert not await thief.fetch_value("SELECT replicad.stream_prove($1)", number)
        with pytest.raises(DatabaseError, match="permission denied"):
            async with facts.transaction() as curious:
                await curious.execute(f"SET LOCAL ROLE {stranger}; SELECT replicad.stream_proof_key({number}, 'x1')")
        await facts.spend(5)
        reading = await facts.poll()
        assert reading.position == 7
        assert reading.held_by is None
        # What holds no position back makes no id good either.
        with pytest.raises(StreamRefused, match="not reserved"):
            await facts.insert(7)
        assert await facts.db.fetch_value("SELECT min(position) FROM replicad.stream_positions('facts')") == 7
        await thief.execute("SELECT pg_advisory_unlock_all()")


async def test_what_a_writer_reserved_counts_though_its_right_is_revoked(facts: Facts, stranger: str) -> None:
    await facts.db.execute(f"GRANT INSERT ON facts TO {stranger}; GRANT USAGE ON SEQUENCE facts_id_seq TO {stranger};")
    async with facts.transaction() as writer:
        await writer.execute(
            f"SET LOCAL ROLE {stranger}; INSERT INTO facts VALUES (replicad.stream_next('facts'), 'one')"
        )
        await facts.db.execute(f"REVOKE ALL ON facts, facts_id_seq FROM {stranger}")
        await facts.spend(3)
        assert (await facts.poll()).position == 0
        await writer.execute("COMMIT")
    assert (await facts.poll()).position == 4
    assert facts.rows == {1}


async def test_a_function_of_another_owner_reserves_for_a_role_without_rights(facts: Facts, stranger: str) -> None:
    """Nothing in the catalogue gives this session a right. That it could take an id proves it; that id is not used."""
    await facts.db.execute(
        "CREATE FUNCTION app.write() RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$ INSERT INTO public.facts "
        "VALUES (replicad.stream_next('facts'), 'one') RETURNING id $$"
    )
    async with facts.transaction() as writer:
        await writer.execute(f"SET LOCAL ROLE {stranger}")
        assert await writer.fetch_value("SELECT app.write()") == 2
        assert await writer.fetch_value("SELECT app.write()") == 3
        await facts.spend(3)
        assert (await facts.poll()).position == 1
        await writer.execute("COMMIT")
    assert (await facts.poll()).position == 6
    assert facts.rows == {2, 3}


async def test_a_role_that_may_insert_and_take_no_ids_inserts_what_a_writer_reserved(
    facts: Facts, stranger: str
) -> None:
    await facts.db.execute(f"GRANT INSERT ON facts TO {stranger}")
    async with facts.transaction() as inserter:
        await inserter.execute(f"SET LOCAL ROLE {stranger}")
        async with open_writer(facts.db, "facts", "one") as writer, writer.get_next() as number:
            await facts.insert(number, via=inserter)
        await facts.spend(3)
        assert (await facts.poll()).position == 0
        await inserter.execute("COMMIT")
    assert (await facts.poll()).position == 4
    assert facts.rows == {1}


async def test_a_refused_reservation_names_the_grant(facts: Facts, stranger: str) -> None:
    async with facts.transaction() as writer:
        await writer.execute(f"SET LOCAL ROLE {stranger}")
        with pytest.raises(DatabaseError, match=rf"GRANT USAGE ON SEQUENCE \S*facts_id_seq TO {stranger}") as refused:
            await writer.execute("SELECT replicad.stream_next('facts')")
        assert refused.value.sqlstate == "42501"


async def test_without_the_secret_every_lock_counts(facts: Facts, stranger: str) -> None:
    """A daemon of fewer rights serves as before. It cannot tell a writer's lock, so it skips nothing."""
    await facts.db.execute("CREATE TABLE hidden AS SELECT * FROM replicad.stream_reservation_key WITH NO DATA")
    source = horizon_source(facts.stream)
    for table in (None, "public.missing", "public.hidden"):
        facts.horizon.watch("facts", type(source)(facts.stream.number, source.sequence, table), published=0)  # type: ignore
        async with facts.transaction() as writer:
            await writer.execute("SELECT replicad.stream_next('facts')")
            held = await facts.poll()
            assert held.held_by is not None
            await writer.execute("COMMIT")


async def test_no_id_is_reserved_while_the_secret_is_missing(facts: Facts) -> None:
    await facts.db.execute("DELETE FROM replicad.stream_reservation_key")
    with pytest.raises(DatabaseError, match="stream_reservation_key is empty"):
        await facts.db.execute("SELECT replicad.stream_next('facts')")


async def test_a_session_lets_go_of_its_proof_with_its_last_id(facts: Facts) -> None:
    async with open_writer(facts.db, "facts", "one") as writer:
        for _ in range(3):
            async with writer.get_next(), writer.get_next():
                assert await facts.locks("one") >= 3
            assert await facts.locks("one") == 0
