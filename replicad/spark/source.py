"""The data source `replicad`: `spark.readStream.format("replicad")` and `spark.read.format("replicad")`.

Options are checked here; the readers are in `tubes`, `streams` and `islands`. They are imported only for reading,
because Spark starts processes for every query that only ask for the columns.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from replicad.errors import UsageError
from replicad.spark.options import SourceOptions, parse_options
from replicad.tubes.keys import TEXT

POD_COLUMNS = "seq bigint, op string, shard int, ids array<bigint>, ts timestamp"
POD_COLUMNS_PAYLOAD = "seq bigint, op string, shard int, ids array<bigint>, payload string, ts timestamp"
STREAM_COLUMNS = "stream string, instance string, token bigint, row string"
CHANGE_COLUMNS = (
    "token bigint, op string, key struct<...>, row struct<...>, old struct<...>, unchanged array<string>, xid bigint, "
    "at timestamp"
)


_NO_TABLE = (
    "CREATE TABLE cannot be used with this source: Spark does not pass the OPTIONS of a table on to a source in "
    "Python; write CREATE TEMPORARY VIEW ... USING replicad OPTIONS (...), or use spark.readStream"
)


class ReplicadDataSource(DataSource):  # type: ignore[misc]
    """Pods of a tube, or rows of a stream. `options.OPTIONS` lists the options."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        if "provider" in {name.lower() for name in options}:  # a property of a table in Spark's catalog
            raise UsageError(_NO_TABLE)
        self._given = dict(options)
        self._parsed = parse_options(self._given)

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "replicad"

    def schema(self) -> str | StructType:
        """The columns of the rows, as DDL where they do not depend on the stream."""
        if self._parsed.changes:
            from replicad.spark.streams import changed_columns  # noqa: PLC0415

            return changed_columns(self._parsed)
        if self._parsed.stream is not None:
            return STREAM_COLUMNS
        columns = POD_COLUMNS_PAYLOAD if self._parsed.include_payload else POD_COLUMNS
        return columns.replace("array<bigint>", "array<string>") if self._parsed.keys == TEXT else columns

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """The reader of a streaming query."""
        options = self._options(schema, streaming=True)
        if options.islands is not None:
            from replicad.spark.tubes import IslandsStreamReader  # noqa: PLC0415

            return IslandsStreamReader(options)
        if options.tube is not None:
            from replicad.spark.tubes import TubeStreamReader  # noqa: PLC0415

            return TubeStreamReader(options)
        from replicad.spark.streams import StreamStreamReader  # noqa: PLC0415

        return StreamStreamReader(options, schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of a batch read, which removes nothing."""
        options = self._options(schema, streaming=False)
        if options.tube is not None:
            from replicad.spark.tubes import TubeBatchReader  # noqa: PLC0415

            return TubeBatchReader(options)
        from replicad.spark.streams import StreamBatchReader  # noqa: PLC0415

        return StreamBatchReader(options, schema)

    def _options(self, schema: StructType, *, streaming: bool) -> SourceOptions:
        known = CHANGE_COLUMNS if self._parsed.changes else str(self.schema())
        columns = [part.split()[0] for part in known.split(", ")]
        if schema.fieldNames() != columns:
            raise UsageError(f"the source has the columns {known}; leave .schema(...) out and select from them")
        return parse_options(self._given, streaming=streaming)
