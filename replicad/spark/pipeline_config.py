"""The configuration of a pipeline, checked before Spark starts. pipeline_file.py reads it from a TOML file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from replicad.config.declaring import (
    SECONDS,
    TABLE_OF_TEXTS,
    TEXT,
    WHOLE,
    Key,
    ValueKind,
    one_of,
    only_toml,
    seconds,
)
from replicad.config.settings import DATABASE_URL
from replicad.errors import UsageError
from replicad.spark.checkpoint import place_of
from replicad.spark.columns import DECIMAL, NUMERIC_FORMS, PARK, RANGE_FORMS, ColumnForms
from replicad.spark.options import SourceOptions, parse_options
from replicad.spark.sinks.base import Sink
from replicad.spark.tables import FOLLOW, NEW_COLUMN_FORMS, WIDER_TYPE_FORMS, TableRule

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

IDS_OF_TASK = 200_000  # of which the rows are loaded in one task, unless `maxIdsPerTask` is given: some 100 MB
AVAILABLE_NOW = "available_now"
ALL_COLUMNS = "*"
KEY = "key"  # the column downstream with the ids of a key of several columns


def _interval(text: str) -> str | float:
    if text == AVAILABLE_NOW:
        return text
    try:
        return seconds(text)
    except ValueError:
        raise ValueError(f"give {_INTERVAL.expected}") from None


def _all_columns(text: str) -> str:
    if text != ALL_COLUMNS:
        raise ValueError(f"give {_COLUMNS.expected}")
    return text


def _some_columns(names: Sequence[object]) -> Sequence[object]:
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"give {_COLUMNS.expected}")
    return names


_INTERVAL = ValueKind(
    "interval", f"{AVAILABLE_NOW}, or {SECONDS.expected}", _interval, (str, int, float), SECONDS.convert, unit="seconds"
)
_COLUMNS = ValueKind(
    "names",
    f'a list of names such as ["id", "name"], or "{ALL_COLUMNS}" for all',
    _all_columns,
    (str, list),
    _some_columns,
)
_RULES = only_toml(
    "tables",
    'a list such as [{shards = "0-9", table = "shard_{shard:04d}.cities"}]',
    (list,),
    lambda rules: all(isinstance(rule, dict) for rule in rules),
)
ENRICH = (
    Key("database", DATABASE_URL, None, "URL of the Postgres with the rows; or --database, or REPLICAD_DATABASE"),
    Key("table", TEXT, None, "table of a shard; `{shard}` stands for its number. Give this or `tables`"),
    Key(
        "tables",
        _RULES,
        None,
        "tables for sets of shards, with `shards`, `table` and perhaps `database`; the first with the shard counts",
    ),
    Key("id", TEXT, "id", "column that is the key of the tables; several with commas: `actor_id,film_id`"),
    Key("columns", _COLUMNS, ALL_COLUMNS, "columns that go downstream, or `*` for all; the id is always among them"),
    Key(
        "numeric",
        one_of(*NUMERIC_FORMS),
        DECIMAL,
        "how numeric is carried; " + "; ".join(f"`{name}`: {to}" for name, to in NUMERIC_FORMS.items()),
    ),
    Key(
        "out_of_range",
        one_of(*RANGE_FORMS),
        PARK,
        "dates and times beyond the years 1 to 9999; "
        + "; ".join(f"`{name}`: {to}" for name, to in RANGE_FORMS.items()),
    ),
    Key(
        "new_columns",
        one_of(*NEW_COLUMN_FORMS),
        FOLLOW,
        "a column that a table gets while `columns` is `*`; "
        + "; ".join(f"`{name}`: {to}" for name, to in NEW_COLUMN_FORMS.items()),
    ),
    Key(
        "wider_types",
        one_of(*WIDER_TYPE_FORMS),
        FOLLOW,
        "a column that gets a type with more values in some table, such as bigint for integer; "
        + "; ".join(f"`{name}`: {to}" for name, to in WIDER_TYPE_FORMS.items()),
    ),
    Key(
        "renamed",
        TABLE_OF_TEXTS,
        {},
        'columns that are renamed in one table after the other: `{old = "new"}`; downstream they keep the old name',
    ),
)
ENGINES = {"spark": "Spark, on a cluster or on this machine", "local": "one Python process, without Spark and Java"}
RUN = (
    Key(
        "engine",
        one_of(*ENGINES),
        "spark",
        "what runs the pipeline; " + "; ".join(f"`{name}`: {what}" for name, what in ENGINES.items()),
    ),
    Key("checkpoint", TEXT, None, "folder, or URI for Hadoop, in which Spark keeps how far it is", required=True),
    Key(
        "trigger",
        _INTERVAL,
        AVAILABLE_NOW,
        f"how often to look for changes; `{AVAILABLE_NOW}`: end without any",
        minimum=0,
        maximum=86_400,
    ),
    Key("name", TEXT, "pipeline", "name of the query, in `replicad top` and in the lease"),
    Key("transform", TEXT, None, "a function of yours, `module:name`, from DataFrame to DataFrame"),
    Key(
        "tries",
        WHOLE,
        5,
        "after so many failures of a batch the rows that cause them are looked for, and parked",
        minimum=1,
        maximum=1000,
    ),
    Key(
        "traceparent",
        TEXT,
        None,
        "column of rows downstream with a W3C traceparent: the span of a batch continues its trace (docs/metrics.md)",
    ),
)
_KEYS = {key.name: key for key in (*ENRICH, *RUN)}
_CHECKED = ("numeric", "out_of_range", "new_columns", "wider_types", "tries")


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """A pipeline: a tube, the tables with the rows of its ids, and a downstream.

    `table` is the table of a shard, e.g. `shard_{shard:04d}.cities`, or a list of rules for sets of shards.
    `checkpoint` is a path, or a URI that Spark's Hadoop reads.
    `columns` are the columns that the downstream gets, `*` for all; `id_column` is always among them. Several columns
    of a key are given with commas; the downstream gets their ids in the column `key` (see `id_name`).
    `trigger` is `available_now` (end when all pods that were there at the start have been read, and all backfills that
    were scheduled) or an interval in seconds, 0 for as soon as pods arrive.
    `options` are further options of the source by their Spark names, e.g. `{"maxPodsPerTrigger": "5000"}`.
    `numeric` is a name in NUMERIC_FORMS, `out_of_range` one in RANGE_FORMS (columns.py, docs/types.md).
    `new_columns`, a name in NEW_COLUMN_FORMS: what becomes of a column that a table gets (tables.py).
    `wider_types`, a name in WIDER_TYPE_FORMS: what becomes of a column that gets a wider type in some table.
    `renamed` has the new names of columns that are being renamed in the tables, by the names that they have downstream.
    `tries`: after so many failures of a batch in a row, with growing pauses between, the ids whose rows cannot be read
    are parked. If there are none, the run ends.
    `traceparent`: a column of the rows, downstream, with a W3C traceparent; batches are spans in its trace.
    `rebuild`: if the downstream is not the same as in the checkpoint, schedule a backfill of all rows by
    the functions in `tube_schema`, and continue; otherwise the pipeline does not start (preflight.py).
    `spark` are settings of the session that `run` makes, e.g. `{"spark.driver.memory": "2g"}`.
    `transform` gets and returns a DataFrame. A row that it leaves out is deleted downstream. It must keep `id_column`,
    `_shard` and `_seq`, and return at most one row per id.

    The constructor raises UsageError for whatever can be checked without Spark and Postgres.
    """

    tube: str
    database: str = field(repr=False)
    table: str | Sequence[TableRule]
    sink: Sink
    checkpoint: Path | str
    host: str = "127.0.0.1"
    port: int = 9009
    token: str | None = field(default=None, repr=False)
    id_column: str = "id"
    columns: Sequence[str] | str = ALL_COLUMNS
    numeric: str = DECIMAL
    out_of_range: str = PARK
    new_columns: str = FOLLOW
    wider_types: str = FOLLOW
    renamed: Mapping[str, str] = field(default_factory=dict)
    trigger: str | float = AVAILABLE_NOW
    name: str = "pipeline"
    tries: int = 5
    traceparent: str | None = None
    transform: Callable[[DataFrame], DataFrame] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    rebuild: bool = False
    spark: Mapping[str, str] = field(default_factory=dict)
    tube_schema: str = "tube"

    def __post_init__(self) -> None:
        _KEYS["database"].take(self.database, "database")
        if not isinstance(self.sink, Sink):
            raise UsageError(
                f"sink: {type(self.sink).__qualname__} is not a downstream; give one of replicad.spark.sinks, "
                "or your own object in a CustomSink"
            )
        for name in _CHECKED:
            _KEYS[name].take(getattr(self, name), name)
        _KEYS["columns"].take(self.columns if isinstance(self.columns, str) else list(self.columns), "columns")
        object.__setattr__(self, "trigger", _KEYS["trigger"].take(self.trigger, "trigger"))
        both = self.renamed.keys() & self.renamed.values()
        if both:
            raise UsageError(
                f"renamed: {min(both)} is an old and a new name; give the names downstream and in the tables"
            )
        object.__setattr__(self, "checkpoint", place_of(str(self.checkpoint)))
        if not self.rules:
            raise UsageError("table: give at least one")
        parse_options(self.source_options, streaming=True)

    @property
    def rules(self) -> tuple[TableRule, ...]:
        """The rules that map shards to tables. The first rule that has a shard is used."""
        return (TableRule(self.table),) if isinstance(self.table, str) else tuple(self.table)

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the tables' key."""
        return tuple(name.strip() for name in self.id_column.split(","))

    @property
    def id_name(self) -> str:
        """The name of the column downstream that has the ids."""
        return self.id_column if len(self.key) == 1 else KEY

    @property
    def reading(self) -> ColumnForms:
        """How the columns of the tables are read."""
        return ColumnForms(self.numeric, self.out_of_range, exact=self.sink.casts and self.transform is None)

    @property
    def source_options(self) -> dict[str, str]:
        """The options of the source, by their Spark names."""
        given = {key.lower() for key in self.options}
        ours = {"tube": self.tube, "includePayload": "true"}
        if "islands" not in given:
            ours |= {"host": self.host, "port": str(self.port)}
        if self.token is not None:
            ours["token"] = self.token
        clash = next((key for key in ours if key.lower() in given), None)
        if clash is not None:
            raise UsageError(f"options: {clash} is a field of PipelineConfig; set it there")
        if "consumer" not in given:
            ours["consumer"] = re.sub(r"[^!-~]", "-", self.name)
        if "maxidspertask" not in given:
            ours["maxIdsPerTask"] = str(IDS_OF_TASK)
        return {**ours, **self.options}

    @property
    def source(self) -> SourceOptions:
        """The options of the source, parsed and checked."""
        return parse_options(self.source_options, streaming=True)
