"""A checkpoint goes on with the downstream that it has written to, and with no other one of the same name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from helpers import psql
from index_server import IndexServer

from replicad.errors import DownstreamError, UsageError
from replicad.spark.checkpoint import DOWNSTREAM, open_checkpoint
from replicad.spark.database import forget
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.preflight import check_downstream
from replicad.spark.sinks.base import Shape, Sink
from replicad.spark.sinks.bulk import BulkSink
from replicad.spark.sinks.custom import CustomSink
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink

SHAPE = Shape(
    pa.schema([("id", pa.int64()), ("name", pa.string()), ("_shard", pa.int32()), ("_seq", pa.int64())]), "id"
)


class Mine:
    """A downstream of the user's."""

    number = 1

    def write(self, rows: pa.Table) -> None: ...

    def delete(self, shard: int, ids: Any) -> None: ...

    def stale_ids(self, shard: int, before: int) -> list[int]:
        return []

    def identity(self) -> int:
        return self.number


class Place:
    """A downstream of some kind: its sink, and what makes another one in its place."""

    def __init__(self, sink: Sink, replace: Callable[[], object]) -> None:
        self.sink = sink
        self.replace = replace


@pytest.fixture
def url(database_url: str) -> Iterator[str]:
    yield database_url
    forget(database_url)


@pytest.fixture(params=["postgres", "dropped database", "parquet", "delta", "index", "own class"])
def place(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / "downstream"
    if request.param == "postgres":
        yield Place(PostgresSink(url, "dw.cities"), lambda: psql(url, "DROP TABLE dw.cities"))
    elif request.param == "dropped database":
        server, _, rest = url.partition("test_")
        other = f"{server}other_of_test_{rest}"
        name = urlsplit(other).path[1:]
        psql(url, f'CREATE DATABASE "{name}"')
        yield Place(
            PostgresSink(other, "cities"),
            lambda: (forget(other), psql(url, f'DROP DATABASE "{name}"'), psql(url, f'CREATE DATABASE "{name}"')),
        )
        forget(other)
        psql(url, f'DROP DATABASE "{name}"')
    elif request.param == "parquet":
        yield Place(ParquetSink(folder), lambda: shutil.rmtree(folder))
    elif request.param == "delta":
        yield Place(DeltaSink(str(folder)), lambda: shutil.rmtree(folder))
    elif request.param == "index":
        server_of_index = IndexServer()
        server_of_index.documents["1:1"] = {}
        yield Place(
            BulkSink(f"http://127.0.0.1:{server_of_index.port}", "cities"),
            lambda: setattr(server_of_index, "uuid", "second"),
        )
        server_of_index.close()
    else:
        target = Mine()
        yield Place(CustomSink(target), lambda: setattr(target, "number", 2))


def start(url: str, sink: Sink, checkpoint: Path, *, rebuild: bool = False) -> None:
    """What a start does before Spark has anything to do."""
    checkpoint.mkdir(exist_ok=True)
    sink.prepare(SHAPE)
    config = PipelineConfig("cities", url, "public.cities", sink, checkpoint, rebuild=rebuild)
    check_downstream(config, open_checkpoint(checkpoint))


def scheduled(url: str) -> str:
    return psql(url, "SELECT count(*) FROM tube.cities WHERE payload->>'type' = 'backfill_schedule'")


def test_another_downstream_in_its_place_is_refused_until_a_backfill_is_asked_for(
    url: str, place: Place, tmp_path: Path
) -> None:
    psql(url, "CREATE TABLE public.cities (id bigint PRIMARY KEY, name text)")
    psql(url, "SELECT tube.tube_ensure_exists('cities'), tube.tube_table_ensure_attached('cities', 'cities', 1)")
    checkpoint = tmp_path / "checkpoint"
    for _ in range(2):
        start(url, place.sink, checkpoint)
    place.replace()
    for _ in range(2):  # preparing made a new one, which is still not that of the checkpoint
        with pytest.raises(UsageError, match=r"is not the one that checkpoint .* has written to.*--rebuild"):
            start(url, place.sink, checkpoint)
    assert scheduled(url) == "0"
    start(url, place.sink, tmp_path / "another checkpoint")
    start(url, place.sink, checkpoint, rebuild=True)
    assert scheduled(url) == "1"
    start(url, place.sink, checkpoint, rebuild=True)
    assert scheduled(url) == "1", "nothing has changed since"
    start(url, place.sink, checkpoint)


def test_an_index_that_is_gone_is_missed_and_one_that_comes_with_its_first_document_is_not(
    url: str, tmp_path: Path
) -> None:
    server = IndexServer()
    sink = BulkSink(f"http://127.0.0.1:{server.port}", "cities")
    start(url, sink, tmp_path / "c")
    server.documents["1:1"] = {}
    for _ in range(2):
        start(url, sink, tmp_path / "c")
    server.documents.clear()
    with pytest.raises(UsageError, match="is not the one"):
        start(url, sink, tmp_path / "c")
    psql(url, "SELECT tube.tube_ensure_exists('cities')")
    start(url, sink, tmp_path / "c", rebuild=True)
    server.documents["1:1"], server.uuid = {}, "second"
    start(url, sink, tmp_path / "c")
    server.close()


def test_a_class_whose_identity_fails_is_named(url: str, tmp_path: Path) -> None:
    class Failing(Mine):
        def identity(self) -> int:
            raise OSError("no route")

    with pytest.raises(DownstreamError, match=r"Failing.identity\(\) failed: OSError: no route"):
        start(url, CustomSink(Failing()), tmp_path / "c")


def test_a_class_that_cannot_tell_is_taken_as_it_is(url: str, tmp_path: Path) -> None:
    class Plain:
        def write(self, rows: pa.Table) -> None: ...

        def delete(self, shard: int, ids: Any) -> None: ...

        def stale_ids(self, shard: int, before: int) -> list[int]:
            return []

    for _ in range(2):
        start(url, CustomSink(Plain()), tmp_path / "c")
    assert not (tmp_path / "c" / DOWNSTREAM).exists()
