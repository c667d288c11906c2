"""Reads a Delta table that a pipeline keeps, also one with `mode = "changes"`, whose changes lie over its rows.

    from replicad.spark.lake import Lake
    lake = Lake("/srv/lake/public.film")        # one version of the table
    lake.arrow(), lake.pandas(), lake.polars(), lake.duckdb(connection), lake.spark(session)

A `Lake` has one version of the table, whatever is written meanwhile; its files stay for `keep` (10 minutes). The base
is read lazily by Polars, DuckDB and Spark; the changes, at most a quarter of the rows, are laid over it by their key.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from replicad.errors import UsageError
from replicad.spark.sinks.delta import BASE_LAYER, CHANGE, CHANGES_LAYER, DESCRIPTION, LAYER, DeltaSink, plain_type
from replicad.spark.sinks.delta_files import GONE, DataFile, deltalake, files_of, newest_of, without

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Lake:
    """One version of the table at `uri`. Raises UsageError if there is none."""

    def __init__(self, uri: str, storage: dict[str, str] | None = None, *, version: int | None = None) -> None:
        self._sink = DeltaSink(uri, storage or {})
        if not deltalake().DeltaTable.is_deltatable(self._sink.uri, storage_options=storage):
            raise UsageError(f"{uri} has no Delta table")
        table = deltalake().DeltaTable(self._sink.uri, version=version, storage_options=storage)
        self.version: int = table.version()
        fields = [one.with_type(plain_type(one.type)) for one in pa.schema(table.schema().to_arrow())]
        names = [one.name for one in fields]
        self._layered = LAYER in names
        ours = (CHANGE, GONE, LAYER) if self._layered else ()
        self.schema = pa.schema([one for one in fields if one.name not in ours])
        self.key = ("_shard", (table.metadata().description or "").removeprefix(DESCRIPTION))
        if self.key[1] not in names:
            raise UsageError(f"the Delta table {uri} was not made by a pipeline: its description does not name a key")
        files = files_of(table, self.key[1])
        self._base = [one for one in files if one.layer in (None, BASE_LAYER)]
        self._changed = [one for one in files if one.layer == CHANGES_LAYER]
        bounds = {(one.low[:1], one.high[:1]) for one in files}
        alone = len(bounds) == 1 and all(
            len(one.low) == len(one.high) == 2 and one.low[0] == one.high[0] for one in files
        )
        self._joined = self.key[1:] if alone else self.key  # with one shard a reader need not read `_shard`

    def _paths(self, files: list[DataFile]) -> list[str]:
        return [f"{self._sink.uri.rstrip('/')}/{unquote(one.path)}" for one in files]

    def changes(self) -> pa.Table:
        """The newest change of each key that the layer of changes has, with `_replicad_gone` for a delete."""
        schema = pa.schema([*self.schema, (CHANGE, pa.int64()), (GONE, pa.bool_())])
        if not self._changed:
            return schema.empty_table()
        return newest_of(self._sink.files(schema, self.key[1]).dataset(self._changed).to_table(), self.key[1])

    def arrow(self) -> pa.Table:
        """The rows."""
        return self.overlaid(self.changes())

    def overlaid(self, changes: pa.Table) -> pa.Table:
        """The base with changes over it, as `changes` gives them."""
        base = self._sink.files(self.schema, self.key[1]).read(self._base)
        new = changes.filter(pc.invert(changes.column(GONE))).select(self.schema.names)
        return pa.concat_tables([without(base, changes, self.key[1]), new])

    def pandas(self) -> Any:
        """The rows, as a DataFrame."""
        return self.arrow().to_pandas()

    def polars(self) -> Any:
        """The rows, as a LazyFrame."""
        pl: Any = import_module("polars")
        changes = pl.from_arrow(self.changes()).lazy()
        new = changes.filter(~pl.col(GONE)).select(self.schema.names)
        if not self._base:
            return new
        options = dict(self._sink.storage) or None
        base = pl.scan_parquet(
            self._paths(self._base), missing_columns="insert", extra_columns="ignore",
            schema=pl.from_arrow(self.schema.empty_table()).schema, storage_options=options,
        )  # fmt: skip
        if not self._changed:
            return base
        return pl.concat([base.join(changes, on=list(self._joined), how="anti"), new])

    def duckdb(self, connection: Any) -> Any:
        """The rows, as a relation of a connection."""
        names = ", ".join(f'"{name}"' for name in self.schema.names)
        number = f"replicad_changes_{id(self)}"
        connection.register(number, self.changes())
        new = f"SELECT {names} FROM {number} WHERE NOT {GONE}"
        if not self._base:
            return connection.sql(new)
        files = ", ".join("'" + path.replace("'", "''") + "'" for path in self._paths(self._base))
        on = " AND ".join(f'c."{name}" = b."{name}"' for name in self._joined)
        base = f"SELECT {names} FROM read_parquet([{files}], union_by_name = true) b"
        if not self._changed:
            return connection.sql(base)
        return connection.sql(f"{base} WHERE NOT EXISTS (SELECT 1 FROM {number} c WHERE {on}) UNION ALL {new}")

    def spark(self, session: SparkSession) -> DataFrame:
        """The rows, as a DataFrame."""
        from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - only this needs Spark

        schema = from_arrow_schema(self.schema)
        changes: Any = session.createDataFrame(self.changes())
        new = changes.filter(f"NOT {GONE}").select(*self.schema.names)
        if not self._base:
            return new
        base = session.read.schema(schema).parquet(*self._paths(self._base))
        kept = base.join(changes.select(*self._joined), list(self._joined), "left_anti")
        return kept.select(*self.schema.names).unionAll(new)
