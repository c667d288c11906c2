"""How many partitions each worker of a tube should hold, by `tube_worker_beat`."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from replicad.errors import TubeRefused, UnknownTube
from replicad.postgres.bridge import Database
from replicad.tubes.pods import PodBook


class Answer(NamedTuple):
    most: int | None
    free: int | None
    workers: int | None


class SharedTube:
    """A tube `t`, and the workers that divide its partitions."""

    def __init__(self, database: Database) -> None:
        self.db = database
        self._pods = PodBook(database, database, database, "tube")

    async def parted(self, partitions: int) -> None:
        await self.db.execute("SELECT tube.tube_ensure_exists('t', $1)", partitions)

    async def share(self, worker: str, *, ttl: float = 60, expired: tuple[int, ...] = ()) -> Answer:
        found = await self._pods.share("t", worker, ttl, expired)
        return Answer(found.most, found.free, found.workers)

    async def hold(self, worker: str, partitions: int, *numbers: int) -> list[int]:
        """Claim partitions; returns the beats of their leases."""
        claim = "SELECT beat FROM tube.tube_lease_claim('t', $1, $2, $3, '60 s', '{}')"
        return [await self.db.fetch_value(claim, partitions, number, worker) for number in numbers]

    async def age(self, worker: str, by: str) -> None:
        """Let the worker's last sign of life be older by the server's clock (or newer: the clock went back)."""
        query = "UPDATE tube.tube_worker SET seen_at = seen_at - $2::text::interval WHERE worker = $1"
        await self.db.execute(query, worker, by)


@pytest.fixture
async def tube(db: Database) -> SharedTube:
    return SharedTube(db)


@pytest.mark.parametrize(("partitions", "workers"), [(12, 1), (12, 3), (11, 3), (2, 5), (1, 2), (1000, 7)])
async def test_the_shares_of_all_workers_are_all_partitions_and_differ_by_one_at_most(
    tube: SharedTube, partitions: int, workers: int
) -> None:
    await tube.parted(partitions)
    names = [f"w{number}" for number in range(workers)]
    for name in names:
        await tube.share(name)
    shares = [await tube.share(name) for name in names]
    most = [share.most or 0 for share in shares]
    assert (sum(most), max(most) - min(most) <= 1) == (partitions, True)
    assert {(share.free, share.workers) for share in shares} == {(partitions, workers)}


async def test_who_holds_most_keeps_the_partition_that_is_left_over(tube: SharedTube) -> None:
    await tube.parted(5)
    await tube.share("a")
    await tube.share("b")
    await tube.hold("b", 5, 0, 1, 2)
    await tube.hold("a", 5, 3, 4)
    assert (await tube.share("a"), await tube.share("b")) == (Answer(2, 0, 2), Answer(3, 0, 2))


async def test_partitions_of_other_holders_are_not_divided(tube: SharedTube) -> None:
    await tube.parted(8)
    await tube.share("a")
    await tube.hold("a worker with chosen partitions", 8, 1, 2)
    assert await tube.share("b") == Answer(3, 6, 2)
    await tube.db.execute("DELETE FROM tube.tube_lease")
    await tube.hold("a reader of the whole tube", 1, 0)
    assert await tube.share("b") == Answer(0, 0, 2)


async def test_leases_of_another_number_of_partitions_hold_what_they_cover(tube: SharedTube) -> None:
    await tube.parted(4)
    await tube.hold("old", 4, 1)
    await tube.parted(8)  # 1/4 covers 1/8 and 5/8
    assert await tube.share("a") == Answer(6, 6, 1)
    await tube.parted(2)  # 1/4 overlaps 1/2
    assert await tube.share("a") == Answer(1, 1, 1)


async def test_expired_leases_are_free_for_the_others(tube: SharedTube) -> None:
    await tube.parted(4)
    beats = await tube.hold("killed", 4, 0, 1, 2)
    assert await tube.share("a") == Answer(1, 1, 1)
    assert await tube.share("a", expired=tuple(beats[:2])) == Answer(3, 3, 1)


@pytest.mark.parametrize("by", ["61 s", "-61 s"])
async def test_a_worker_without_a_sign_of_life_is_counted_for_its_time_to_live_whatever_the_clock_does(
    tube: SharedTube, by: str
) -> None:
    await tube.parted(4)
    await tube.share("killed")
    await tube.age("killed", "59 s")
    assert await tube.share("a") == Answer(2, 4, 2)
    await tube.share("killed")
    await tube.age("killed", by)
    assert await tube.share("a") == Answer(4, 4, 1)
    assert await tube.db.fetch_value("SELECT array_agg(worker) FROM tube.tube_worker") == ["a"]


async def test_a_worker_that_ends_is_counted_no_more(tube: SharedTube) -> None:
    await tube.parted(4)
    await tube.share("a")
    await tube.share("b")
    await tube.share("a", ttl=0)
    assert await tube.share("b") == Answer(4, 4, 1)
    await tube.db.execute("SELECT tube.tube_ensure_absent('t')")
    assert await tube.db.fetch_value("SELECT count(*) FROM tube.tube_worker") == 0
    with pytest.raises(UnknownTube):
        await tube.share("b")


async def test_the_number_of_workers_is_bounded_and_a_worker_can_still_end(tube: SharedTube) -> None:
    await tube.parted(1)
    await tube.share("a")
    await tube.db.execute(
        "INSERT INTO tube.tube_worker SELECT 't', 'w' || n, clock_timestamp(), '1 min' FROM generate_series(1, 9999) n"
    )
    await tube.share("a")
    with pytest.raises(TubeRefused, match="more than 10000 workers"):
        await tube.share("b")
    await tube.share("w1", ttl=0)
    assert (await tube.share("b")).workers == 10_000
