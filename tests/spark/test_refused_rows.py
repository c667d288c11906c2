"""Rows that a downstream refuses, or that cannot be carried, are found among the others and parked with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cities import Cities
from fake_daemon import FakeDaemon
from helpers import psql
from index_server import IndexServer

from replicad.errors import DownstreamError, DownstreamUnavailable, ValueUnheld
from replicad.protocol.tokens import START
from replicad.spark import parking
from replicad.spark.checkpoint import PARKED, open_checkpoint
from replicad.spark.database import forget
from replicad.spark.holding import TubeHold
from replicad.spark.options import parse_options
from replicad.spark.parking import SuspectShards, park_refused
from replicad.spark.pipeline import make_enricher
from replicad.spark.sinks.base import Shape, Sink
from replicad.spark.sinks.bulk import BulkSink
from replicad.spark.sinks.custom import CustomSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.tubes.commands import Part

GUARDED = """
CREATE SCHEMA dw;
CREATE TABLE dw.cities (
  id bigint, name text UNIQUE, people integer CHECK (people <> 13), area numeric CHECK (area < 100000), born date,
  _shard integer, _seq bigint, PRIMARY KEY (_shard, id), UNIQUE (people) DEFERRABLE INITIALLY DEFERRED);
"""


class Picky:
    """A downstream of the user's that does not like one row, or is away."""

    def __init__(self, bad: int) -> None:
        self.bad, self.rows, self.away = bad, set[int](), False

    def write(self, rows: pa.Table) -> None:
        if self.away:
            raise ConnectionRefusedError("nobody there")
        ids = set(rows.column("id").to_pylist())
        if self.bad in ids:
            raise ValueError("that one is bad")
        self.rows |= ids

    def delete(self, shard: int, ids: Any) -> None: ...

    def stale_ids(self, shard: int, before: int) -> list[int]:
        return []


@pytest.fixture
def cities(database_url: str, daemon: FakeDaemon) -> Iterator[Cities]:
    found = Cities(database_url, daemon)
    psql(database_url, "".join(f"ALTER TABLE shard_{shard:04d}.cities ADD COLUMN born date;" for shard in (1, 2, 3)))
    yield found
    forget(database_url)


def put(cities: Cities, ids: range, shard: int = 1) -> None:
    """Cities with a number of people of their own, all in one pod."""
    psql(
        cities.url,
        f"INSERT INTO shard_000{shard}.cities SELECT i, 'city ' || i, i, 1 FROM generate_series({ids[0]}, {ids[-1]}) i",
    )
    cities.daemon.touch("t", shard, list(ids))


def search(cities: Cities, sink: Sink, folder: Path) -> dict[int, str]:
    """What is parked, by id, if batches with this downstream have failed."""
    config = cities.config(sink, folder)
    checkpoint = open_checkpoint(config.checkpoint)
    checkpoint.make()
    enricher = make_enricher(config)
    shape = Shape(enricher.schema, "id", enricher.layout.types)
    sink.prepare(shape)
    given = {key: value for key, value in config.source_options.items() if key != "consumer"}
    options = parse_options({**given, "holder": "me"}, streaming=True)
    parked = park_refused(options, enricher, lambda found: sink.try_out(shape, found), 5, checkpoint)
    found = {one: why for _, ids, why in cities.daemon.tubes["t"].parked for one in ids}
    assert len(found) == parked
    assert (checkpoint.read(PARKED) is not None) == (parked > 0)
    return found


def test_what_a_table_refuses_is_parked_with_its_reason_and_nothing_is_written(cities: Cities, tmp_path: Path) -> None:
    psql(cities.url, GUARDED)
    sink = PostgresSink(cities.url, "dw.cities")
    put(cities, range(9, 25))
    psql(cities.url, "UPDATE shard_0001.cities SET area = 123456.7 WHERE id = 10")
    psql(
        cities.url,
        "INSERT INTO dw.cities VALUES (1, 'taken', 20, NULL, NULL, 9, 1), (2, 'city 21', 99, NULL, NULL, 9, 1)",
    )
    psql(cities.url, "UPDATE shard_0001.cities SET born = 'infinity' WHERE id = 11")
    found = search(cities, sink, tmp_path)
    assert sorted(found) == [10, 13, 20, 21]
    assert "cities_people_check" in found[13]
    assert "cities_area_check" in found[10]
    assert "cities_people_key" in found[20]
    assert "cities_name_key" in found[21]
    assert psql(cities.url, "SELECT count(*) FROM dw.cities") == "2"


def test_a_lone_row_that_is_surely_refused_is_parked_and_a_table_that_is_gone_parks_nothing(
    cities: Cities, tmp_path: Path
) -> None:
    psql(cities.url, GUARDED)
    sink = PostgresSink(cities.url, "dw.cities")
    put(cities, range(13, 14))
    assert list(search(cities, sink, tmp_path / "a")) == [13]
    put(cities, range(1, 2))

    class Dropped(PostgresSink):
        def prepare(self, shape: Shape) -> None:
            psql(cities.url, "DROP TABLE dw.cities")

    with pytest.raises(DownstreamError, match="does not exist"):
        search(cities, Dropped(cities.url, "dw.cities"), tmp_path / "b")
    assert len(cities.daemon.tubes["t"].parked) == 1


def test_what_an_index_or_a_class_refuses_is_parked_and_an_outage_parks_nothing(cities: Cities, tmp_path: Path) -> None:
    server = IndexServer()
    server.refuse = "1:7"
    put(cities, range(1, 21))
    index = BulkSink(f"http://127.0.0.1:{server.port}", "cities", patience=0.05)
    server.busy = 10**6
    with pytest.raises(DownstreamUnavailable):
        search(cities, index, tmp_path / "a")
    server.busy = 0
    own = Picky(8)
    own.away = True
    with pytest.raises(DownstreamUnavailable):
        search(cities, CustomSink(own), tmp_path / "a")
    assert cities.daemon.tubes["t"].parked == []
    found = search(cities, index, tmp_path / "b")
    assert list(found) == [7]
    assert "mapper_parsing" in found[7]
    server.close()
    own.away = False
    cities.daemon.tubes["t"].parked.clear()
    assert search(cities, CustomSink(own), tmp_path / "c") == {8: "Picky refuses it: ValueError: that one is bad"}
    assert own.rows == set(range(1, 21)) - {7, 8}


def test_values_that_cannot_be_carried_are_parked_and_too_many_of_them_are_a_wrong_setting(
    cities: Cities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cities, range(1, 21))
    psql(cities.url, "UPDATE shard_0001.cities SET born = 'infinity' WHERE id IN (3, 4)")
    sink = ParquetSink(tmp_path / "lake")
    enricher = make_enricher(cities.config(sink, tmp_path))
    touched = pa.table({"shard": pa.array([1], pa.int32()), "id": [3], "seq": [1]})
    with pytest.raises(ValueUnheld, match=r"row 3 of shard 1 cannot be carried: column born is infinity \(docs"):
        list(enricher.changes(touched))
    assert search(cities, sink, tmp_path) == dict.fromkeys((3, 4), "column born is infinity")
    put(cities, range(21, 24))
    psql(cities.url, "UPDATE shard_0001.cities SET born = '-infinity' WHERE id > 20")
    monkeypatch.setattr(parking, "MOST_UNHELD", 2)
    with pytest.raises(ValueUnheld, match="more than 2 rows cannot be carried, for example row 21 of shard 1"):
        search(cities, sink, tmp_path / "b")


def test_a_read_that_fails_for_the_data_of_a_lone_row_is_parked(cities: Cities, tmp_path: Path) -> None:
    psql(
        cities.url,
        "ALTER TABLE shard_0003.cities RENAME TO raw; CREATE VIEW shard_0003.cities AS "
        "SELECT id, name, 100 / (people - 13) AS people, area, born FROM shard_0003.raw; "
        "INSERT INTO shard_0003.raw VALUES (13, 'x', 13)",
    )
    cities.daemon.touch("t", 3, [13])
    assert "division by zero" in search(cities, ParquetSink(tmp_path / "lake"), tmp_path)[13]


def test_ids_of_unreadable_tables_are_parked_under_the_lease_of_the_running_query(
    cities: Cities, tmp_path: Path
) -> None:
    put(cities, range(1, 4), shard=2)
    (seq,) = cities.daemon.tubes["t"].pods
    config = cities.config(CustomSink(Picky(0)), tmp_path)
    enricher = make_enricher(config)
    checkpoint = open_checkpoint(config.checkpoint)
    checkpoint.make()
    given = {key: value for key, value in config.source_options.items() if key != "consumer"}
    options = parse_options({**given, "holder": "me"}, streaming=True)
    suspects = SuspectShards(options, checkpoint)
    psql(cities.url, "DROP TABLE shard_0002.cities")
    found = enricher.unreadable([1, 2, 3])
    assert list(found) == [2]
    assert suspects.add(found, enricher)
    assert not suspects.add(found, enricher), "nothing new was learnt"
    with TubeHold(options, holder="me", renewing=False) as query:
        term = query.term()
        assert suspects._park([(seq, 2, [1, 2, 3])], found) == 3
        assert query.term() == term
        assert query.plan(Part(0, 1), START, limit=10).pods == 0, "its lease is still good, and the pod is gone"
    ((parked, ids, why),) = cities.daemon.tubes["t"].parked
    assert (parked, ids) == (seq, (1, 2, 3))
    assert "the table of shard 2 cannot be read" in why
    assert checkpoint.read(PARKED) is not None
    psql(cities.url, "DROP TABLE shard_0001.cities, shard_0003.cities")
    assert not suspects.add(enricher.unreadable([1, 2, 3]), enricher), "then it is not because of one shard"
    assert list(suspects.reasons) == [2]
