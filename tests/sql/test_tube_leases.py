"""Leases: one holder at a time under any interleaving, terms that fence reads and acks; parking and replay."""

from __future__ import annotations

import itertools

import pytest
import trio

from replicad.errors import LeaseHeld, LeaseLost, PartitionsChanged, TubeRefused, UnknownTube
from replicad.postgres.bridge import Connection, Database
from replicad.tubes.commands import Lease, Part
from replicad.tubes.leases import LeaseBook
from tests.conftest import PATIENCE

CLAIM = "SELECT term, beat FROM tube.tube_lease_claim('a', $1, $2, $3, '10 seconds', $4::bigint[])"


async def claim(
    db: Database | Connection, partitions: int, partition: int, holder: str = "me", expired: tuple[int, ...] = ()
) -> tuple[int, int]:
    row = await db.fetch_row(CLAIM, partitions, partition, holder, list(expired))
    assert row is not None
    return row["term"], row["beat"]


@pytest.fixture
async def tube(db: Database) -> Database:
    """A tube `a` of 2 partitions with the pods 1..8 (by id) of shards 0..7."""
    await db.execute("SELECT tube.tube_ensure_exists('a', 2)")
    await db.execute("SELECT tube.a_touch(i - 1, ARRAY[i::bigint], 'T') FROM generate_series(1, 8) i ORDER BY i")
    return db


async def left(db: Database) -> list[int]:
    return [row["id"] for row in await db.fetch("SELECT unnest(ids) AS id FROM tube.a ORDER BY seq")]


async def test_one_statement_renews_the_leases_of_these_terms_that_are_held_by_the_client(tube: Database) -> None:
    mine, other = await claim(tube, 2, 0, "billing/w c1"), await claim(tube, 2, 1, "billing2/w c2")
    book = LeaseBook(tube, "tube")
    terms = [mine[0], other[0], 10**9]

    async def beats() -> dict[int, int]:
        return {row["term"]: row["beat"] for row in await tube.fetch("SELECT term, beat FROM tube.tube_lease")}

    assert await book.keep("a", terms, "billing") == [Lease("a", Part(0, 2), mine[0], 10.0)]
    first = await beats()
    assert (first[mine[0]] > mine[1], first[other[0]]) == (True, other[1])
    assert {lease.term for lease in await book.keep("a", terms)} == {mine[0], other[0]}
    second = await beats()
    assert all(second[term] > first[term] for term in first)
    assert await book.keep("b", terms) == []


async def test_the_holder_gets_its_term_again_and_nobody_else_gets_the_partition(tube: Database) -> None:
    term, beat = await claim(tube, 2, 1)
    again, later = await claim(tube, 2, 1)
    assert (again, later > beat) == (term, True)
    other, _ = await claim(tube, 2, 0, "you")
    assert other != term
    with pytest.raises(LeaseHeld, match="partition 1/2 of tube 'a' is held by me"):
        await claim(tube, 2, 1, "you")
    with pytest.raises(LeaseHeld, match=r"held by (me|you)"):
        await claim(tube, 1, 0, "me")
    with pytest.raises(LeaseHeld):
        await claim(tube, 2, 1, "you", (beat,))  # a beat that is no longer the lease's
    taken, _ = await claim(tube, 2, 1, "you", (beat, later))
    assert taken > term
    assert not await tube.fetch_value("SELECT tube.tube_lease_release('a', 2, 1, $1)", term)
    assert await tube.fetch_value("SELECT tube.tube_lease_release('a', 2, 1, $1)", taken)
    with pytest.raises(LeaseHeld, match="held by you"):
        await claim(tube, 1, 0)


async def test_every_claim_and_renewal_gives_a_number_never_seen_before(tube: Database) -> None:
    terms: list[int] = []
    beats: list[int] = []
    for _ in range(3):
        term, beat = await claim(tube, 2, 0)
        terms.append(term)
        beats.append(beat)
        for _ in range(3):
            beats.append(await tube.fetch_value("SELECT tube.tube_lease_renew('a', 2, 0, $1)", term))
        assert await tube.fetch_value("SELECT beat FROM tube.tube_lease") == beats[-1]
        await tube.execute("SELECT tube.tube_lease_release('a', 2, 0, $1)", term)
    assert terms == sorted(set(terms))
    assert beats == sorted(set(beats))


async def test_two_leases_exclude_each_other_exactly_when_a_shard_could_belong_to_both(tube: Database) -> None:
    for n, m in itertools.product((1, 2, 3, 4), repeat=2):
        for p, q in itertools.product(range(n), range(m)):
            await tube.execute("DELETE FROM tube.tube_lease")
            await tube.execute("UPDATE tube.tube_registry SET partitions = $1", n)
            _, beat = await claim(tube, n, p, "first")
            await tube.execute("UPDATE tube.tube_registry SET partitions = $1", m)
            if any(shard % n == p and shard % m == q for shard in range(12)):
                with pytest.raises(LeaseHeld, match=f"partition {p}/{n} of tube 'a' is held by first"):
                    await claim(tube, m, q, "second")
                await claim(tube, m, q, "second", (beat,))
                assert await tube.fetch_value("SELECT count(*) FROM tube.tube_lease") == 1
            else:
                await claim(tube, m, q, "second", (beat + 1,))
                assert await tube.fetch_value("SELECT count(*) FROM tube.tube_lease") == 2


async def test_claims_that_make_no_sense_are_refused(tube: Database) -> None:
    for partitions, partition in ((2, 2), (2, -1), (0, 0), (40000, 1)):
        with pytest.raises(TubeRefused, match="is no partition"):
            await claim(tube, partitions, partition)
    with pytest.raises(PartitionsChanged, match="has 2 partitions and not 3"):
        await claim(tube, 3, 1)
    with pytest.raises(TubeRefused, match="holder with a name"):
        await claim(tube, 2, 1, "")
    with pytest.raises(UnknownTube):
        await tube.execute("SELECT tube.tube_lease_claim('b', 1, 0, 'me', '1 s', '{}')")
    with pytest.raises(TubeRefused, match="time to live"):
        await tube.execute("SELECT tube.tube_lease_claim('a', 1, 0, 'me', '0 s', NULL)")


async def test_of_many_who_claim_at_once_one_gets_the_partition_and_only_silent_ones_lose_it(tube: Database) -> None:
    parts = ((0, 1), (0, 2), (1, 2))
    holding: set[int] = set()
    silent: dict[int, int] = {}  # holder: its last beat; these may be taken for expired
    won = 0

    async def contend(number: int) -> None:
        nonlocal won
        partition, partitions = parts[number % 3]
        for _ in range(25):
            try:
                term, _ = await claim(tube, partitions, partition, str(number), tuple(silent.values()))
            except LeaseHeld:
                continue
            rivals = {n for n in holding if n % 3 == 0 or number % 3 == 0 or n % 3 == number % 3}
            assert not rivals, f"{number} got {partition}/{partitions} while {rivals} held it"
            silent.pop(number, None)
            holding.add(number)
            won += 1
            beat = await tube.fetch_value("SELECT tube.tube_lease_renew('a', $1, $2, $3)", partitions, partition, term)
            holding.discard(number)
            if number % 2:
                assert await tube.fetch_value(
                    "SELECT tube.tube_lease_release('a', $1, $2, $3)", partitions, partition, term
                )
            else:
                silent[number] = beat

    async with trio.open_nursery() as nursery:
        for number in range(9):
            nursery.start_soon(contend, number)
    assert won > 9


async def test_who_begins_a_generation_and_who_claims_meanwhile_do_not_wait_for_each_other(tube: Database) -> None:
    await claim(tube, 2, 1, "you")
    seen = await tube.fetch_value("SELECT id FROM tube.tube_generation_now()")
    refused = trio.Event()

    async def claim_meanwhile() -> None:
        with pytest.raises(LeaseLost, match="history forked"):
            await claim(tube, 2, 1, "you")
        refused.set()

    async with tube.connection() as forking, trio.open_nursery() as nursery:
        async with forking.transaction():
            assert await forking.fetch_value("SELECT tube.tube_fork($1, 'restarted')", seen) != seen
            nursery.start_soon(claim_meanwhile)
            await wait_for_lock(tube)
            await claim(forking, 2, 0)  # locks the tube's row too
        await refused.wait()


async def test_who_finds_a_generation_begun_by_another_holds_up_no_other_tube(tube: Database) -> None:
    await tube.execute("SELECT tube.tube_ensure_exists('b', 1)")
    seen = await tube.fetch_value("SELECT (tube.tube_continue()).id")
    claimed = trio.Event()

    async def claim_late() -> None:
        async with tube.connection() as late, late.transaction():
            assert await late.fetch_value("SELECT tube.tube_fork($1, 'restarted')", seen) != seen
            await claim(late, 2, 0)
        claimed.set()

    async with tube.connection() as forking, tube.connection() as slow, trio.open_nursery() as nursery:
        async with slow.transaction():
            await slow.execute("SELECT tube.tube_lock('a')")
            async with forking.transaction():
                await forking.fetch_value("SELECT tube.tube_fork($1, 'restarted')", seen)
                nursery.start_soon(claim_late)
                await wait_for_lock(tube)
            with trio.fail_after(PATIENCE):
                await tube.fetch_value(CLAIM.replace("'a'", "'b'"), 1, 0, "other", [])
                await slow.fetch_value("SELECT tube.tube_generation_check((tube.tube_generation_now()).id)")
            assert not claimed.is_set()
        await claimed.wait()


async def test_an_ack_under_way_holds_off_the_takeover_and_the_next_one_is_refused(tube: Database) -> None:
    term, beat = await claim(tube, 2, 0)
    seqs = [row["seq"] for row in await tube.fetch("SELECT seq FROM tube.a WHERE shard % 2 = 0 ORDER BY seq")]
    taken = trio.Event()
    async with tube.connection() as zombie, trio.open_nursery() as nursery:

        async def take_over() -> None:
            await claim(tube, 2, 0, "you", (beat,))
            taken.set()

        async with zombie.transaction():
            assert await zombie.fetch_value("SELECT pods FROM tube.tube_ack('a', 2, 0, $1, $2)", term, seqs[:2]) == 2
            # Renewals are not held off: the row's key does not change.
            nursery.start_soon(take_over)
            await wait_for_lock(tube)
            assert not taken.is_set()
        await taken.wait()
        for late in (
            "SELECT pods FROM tube.tube_ack('a', 2, 0, $1, $2)",
            "SELECT pods FROM tube.tube_ack_upto('a', 2, 0, $1, 0, 0, $2[1] + 100, 0)",
            "SELECT tube.tube_park('a', 2, 0, $1, $2[4], NULL, 1, 'late')",
        ):  # fmt: skip
            with pytest.raises(
                LeaseLost, match=f"term {term} does not hold partition 0/2 of tube 'a': it is held by you"
            ):
                await zombie.fetch_value(late.replace("$2[", "($2::bigint[])["), term, seqs)
    with pytest.raises(LeaseLost):
        await tube.execute("SELECT tube.tube_lease_renew('a', 2, 0, $1)", term)
    assert await left(tube) == [2, 4, 5, 6, 7, 8]


async def test_an_ack_that_comes_during_the_takeover_waits_and_changes_nothing(tube: Database) -> None:
    term, beat = await claim(tube, 2, 0)
    refused = trio.Event()
    async with tube.connection() as new, trio.open_nursery() as nursery:

        async def ack() -> None:
            with pytest.raises(LeaseLost):
                await tube.execute("SELECT pods FROM tube.tube_ack_upto('a', 2, 0, $1, 0, 0, $2, $2)", term, 10**9)
            refused.set()

        async with new.transaction():
            await claim(new, 2, 0, "you", (beat,))
            nursery.start_soon(ack)
            await wait_for_lock(tube)
            assert not refused.is_set()
        await refused.wait()
    assert len(await left(tube)) == 8


async def test_a_takeover_that_is_rolled_back_costs_the_holder_nothing(tube: Database) -> None:
    term, beat = await claim(tube, 2, 0)
    async with tube.connection() as new:
        await new.execute("BEGIN")
        await claim(new, 2, 0, "you", (beat,))
        await new.execute("ROLLBACK")
    assert await tube.fetch_value("SELECT pods FROM tube.tube_ack_upto('a', 2, 0, $1, 0, 0, $2, $2)", term, 10**9) == 4


async def test_renewals_go_on_while_an_ack_is_under_way(tube: Database) -> None:
    term, beat = await claim(tube, 2, 0)
    async with tube.connection() as connection, connection.transaction():
        await connection.execute("SELECT pods FROM tube.tube_ack_upto('a', 2, 0, $1, 0, 0, $2, $2)", term, 10**9)
        with trio.fail_after(PATIENCE):
            assert await tube.fetch_value("SELECT tube.tube_lease_renew('a', 2, 0, $1)", term) > beat


async def test_acks_remove_what_was_read_and_nothing_of_other_partitions_or_beyond_the_range(tube: Database) -> None:
    await tube.execute("SELECT tube.a_touch(0, '{9}', 'B'), tube.a_touch(0, '{10}', 'U'), tube.a_touch(0, '{11}', 'B')")
    seq = {row["id"]: row["seq"] for row in await tube.fetch("SELECT ids[1] AS id, seq FROM tube.a")}
    term, _ = await claim(tube, 2, 0)
    ack, upto = (
        "SELECT pods FROM tube.tube_ack('a', 2, 0, $1, $2)",
        "SELECT pods FROM tube.tube_ack_upto('a', 2, 0, $1, $2, $3, $4, $5)",
    )
    assert await tube.fetch_value(ack, term, [seq[1], seq[2], seq[2], 10**12]) == 1
    assert await tube.fetch_value(ack, term, []) == 0
    assert await tube.fetch_value(upto, term, 0, 0, seq[5], 0) == 2
    assert await left(tube) == [2, 4, 6, 7, 8, 9, 10, 11]
    assert await tube.fetch_value(upto, term, seq[7], 0, seq[10], seq[9]) == 2
    assert await left(tube) == [2, 4, 6, 7, 8, 11]
    assert await tube.fetch_value(upto, term, 0, 0, seq[10], seq[11]) == 2
    assert await tube.fetch_value(upto, term, 0, 0, seq[10], seq[11]) == 0
    assert await left(tube) == [2, 4, 6, 8]
    with pytest.raises(LeaseLost):
        await tube.fetch_value("SELECT pods FROM tube.tube_ack('a', 2, 1, $1, $2)", term, [seq[2]])


async def test_acks_of_several_readers_in_one_statement_remove_what_single_acks_remove_or_nothing(
    tube: Database,
) -> None:
    ack = "SELECT pods FROM tube.tube_ack_all('a', 2, $1, $2, $3, $4)"
    seq = {row["id"]: row["seq"] for row in await tube.fetch("SELECT ids[1] AS id, seq FROM tube.a")}
    (even, _), (odd, beat) = await claim(tube, 2, 0), await claim(tube, 2, 1)
    seqs = [seq[1], seq[2], seq[3], seq[3], seq[4], 10**12]  # those of 2 and 4 are of the other partition
    assert await tube.fetch_value(ack, [0, 1], [even, odd], [*seqs, seq[6]], [1] * len(seqs) + [2]) == [2, 1]
    assert await left(tube) == [2, 4, 5, 7, 8]
    assert await tube.fetch_value(ack, [1, 0], [odd, even], [], []) == [0, 0]
    refused = trio.Event()
    async with tube.connection() as new, trio.open_nursery() as nursery:

        async def late() -> None:
            with pytest.raises(
                LeaseLost, match=f"term {odd} does not hold partition 1/2 of tube 'a': it is held by you"
            ):
                await tube.fetch_value(ack, [0, 1], [even, odd], [seq[5], seq[8]], [1, 2])
            refused.set()

        async with new.transaction():
            await claim(new, 2, 1, "you", (beat,))
            nursery.start_soon(late)
            await wait_for_lock(tube)
            assert not refused.is_set()
        await refused.wait()
    assert await left(tube) == [2, 4, 5, 7, 8]


async def test_a_lease_of_the_whole_tube_covers_each_partition_and_a_lease_of_a_partition_those_within_it(
    tube: Database,
) -> None:
    check = "SELECT tube.tube_lease_check('a', $1, $2, $3)"
    whole, _ = await claim(tube, 1, 0)
    for partitions, partition in ((1, 0), (2, 0), (2, 1), (6, 5)):
        assert await tube.fetch_value(check, partitions, partition, whole)
    await tube.execute("SELECT tube.tube_lease_release('a', 1, 0, $1)", whole)
    half, _ = await claim(tube, 2, 1)
    for partitions, partition in ((2, 1), (4, 1), (4, 3), (6, 5)):
        assert await tube.fetch_value(check, partitions, partition, half)
    for partitions, partition in ((1, 0), (2, 0), (4, 2), (3, 1)):
        with pytest.raises(LeaseLost):
            await tube.fetch_value(check, partitions, partition, half)


async def test_leases_go_with_their_tube(tube: Database) -> None:
    term, _ = await claim(tube, 2, 0)
    await tube.execute("SELECT tube.tube_ensure_absent('a'); SELECT tube.tube_ensure_exists('a', 2)")
    with pytest.raises(LeaseLost):
        await tube.execute("SELECT pods FROM tube.tube_ack_upto('a', 2, 0, $1, 0, 0, 100, 100)", term)


async def test_what_keeps_failing_is_kept_aside_with_its_error_and_comes_back_or_goes(tube: Database) -> None:
    await tube.execute(
        "SELECT tube.a_touch(0, '{21,22,23,22}', 'U', '{\"why\": 1}'), tube.a_touch(0, '{}', 'T',"
        ' \'{"type": "ping"}\')'
    )
    pod, control = await tube.fetch_value("SELECT array_agg(seq ORDER BY seq) FROM tube.a WHERE payload IS NOT NULL")
    other = await tube.fetch_value("SELECT seq FROM tube.a WHERE shard = 1")
    term, _ = await claim(tube, 2, 0)
    park = "SELECT tube.tube_park('a', 2, 0, $1, $2, $3::text[], $4, $5)"
    assert await tube.fetch_value(park, term, pod, ["22", "99"], 3, "column dropped") == 2
    assert await tube.fetch_value(park, term, pod, ["22"], 3, "again") == 0
    assert await tube.fetch_value(park, term, other, ["2"], 3, "not ours") == 0
    assert await tube.fetch_value(park, term, control, [], 1, "no handler") == 1
    assert await tube.fetch_value(park, term, control, None, 1, "gone already") == 0
    assert await left(tube) == [*range(1, 9), 21, 23]
    assert await tube.fetch_value(park, term, pod, None, 5, "the rest") == 2
    assert await left(tube) == list(range(1, 9))

    rows = await tube.fetch("SELECT * FROM tube.tube_parked_list('a')")
    assert [(r["seq"], r["op"], r["ids"], r["tries"], r["error"]) for r in rows] == [
        (pod, "U", [22, 22], 3, "column dropped"),
        (control, "T", [], 1, "no handler"),
        (pod, "U", [21, 23], 5, "the rest"),
    ]
    assert rows == await tube.fetch("SELECT * FROM tube.tube_parked_list()")
    assert await tube.fetch("SELECT * FROM tube.tube_parked_list('b')") == []
    one, two, three = (row["parked"] for row in rows)
    assert await tube.fetch_value("SELECT tube.tube_parked_replay('a', $1)", [one, two, 10**9]) == 2
    back = await tube.fetch("SELECT op, shard, ids, payload::text FROM tube.a WHERE seq > $1 ORDER BY seq", control)
    assert [tuple(row) for row in back] == [("U", 0, [22, 22], '{"why": 1}'), ("T", 0, [], '{"type": "ping"}')]
    assert await tube.fetch_value("SELECT tube.tube_parked_drop('a', $1)", [one]) == 0
    assert await tube.fetch_value("SELECT tube.tube_parked_drop('a')") == 1
    assert await tube.fetch_value("SELECT tube.tube_parked_replay('a')") == 0
    assert three not in [row["parked"] for row in await tube.fetch("SELECT * FROM tube.tube_parked_list()")]
    for function in ("replay", "drop"):
        with pytest.raises(UnknownTube):
            await tube.execute(f"SELECT tube.tube_parked_{function}('b')")


async def scheduled(tube: Database) -> tuple[int, list[int]]:
    """Schedules the backfills of two tables; the term of the whole tube's lease, and the seqs of the control pods."""
    await tube.execute("CREATE SCHEMA sh9; CREATE TABLE sh9.t (id bigint); CREATE TABLE sh9.u (id bigint)")
    for table in ("sh9.t", "sh9.u"):
        await tube.execute("SELECT tube.tube_table_ensure_attached('a', $1::text::regclass)", table)
    assert await tube.fetch_value("SELECT tube.tube_backfill_schedule('a', 'id', 0, 100)") == 2
    term, _ = await claim(tube, 1, 0)
    return term, [row["seq"] for row in await tube.fetch("SELECT seq FROM tube.a WHERE ids = '{}' ORDER BY seq")]


async def test_a_tube_that_is_dropped_waits_for_the_ack_under_way_and_makes_no_circle_with_it(tube: Database) -> None:
    term, marks = await scheduled(tube)
    async with trio.open_nursery() as nursery, tube.connection() as worker, worker.transaction():
        ack = "SELECT pods FROM tube.tube_ack('a', 1, 0, $1, $2)"
        assert await worker.fetch_value(ack, term, [await worker.fetch_value("SELECT min(seq) FROM tube.a")]) == 1
        nursery.start_soon(tube.execute, "SELECT tube.tube_ensure_absent('a')")
        await wait_for_lock(tube)
        assert await worker.fetch_value(ack, term, marks) == 2
    assert await tube.fetch("SELECT * FROM tube.tube_list()") == []


@pytest.mark.parametrize(
    "change", ["tube_table_ensure_detached('a', 'sh9.t')", "tube_backfill_cancel('a')"], ids=["detach", "cancel"]
)
async def test_whoever_takes_control_pods_away_leaves_those_to_their_worker_that_it_acks(
    tube: Database, change: str
) -> None:
    term, marks = await scheduled(tube)
    async with tube.connection() as worker, tube.connection() as other:
        async with worker.transaction():
            await worker.execute("SELECT pods FROM tube.tube_ack('a', 1, 0, $1, $2)", term, marks[:1])
            with trio.fail_after(PATIENCE):  # without waiting for the worker
                await other.execute(f"SELECT tube.{change}")
            await worker.execute("SELECT pods FROM tube.tube_ack('a', 1, 0, $1, $2)", term, marks[1:])
    assert await left(tube) == list(range(1, 9))
    assert await tube.fetch_value("SELECT count(*) FROM tube.a WHERE ids = '{}'") == 0


async def wait_for_lock(db: Database) -> None:
    """Return once somebody waits for a lock in this database."""
    with trio.fail_after(PATIENCE):
        while not await db.fetch_value(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        ):
            await trio.sleep(0.01)
