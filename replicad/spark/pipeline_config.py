"""The configuration of a pipeline, checked before Spark starts. pipeline_file.py reads it from a TOML file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from replicad.config.declaring import seconds
from replicad.errors import UsageError
from replicad.spark.checkpoint import place_of
from replicad.spark.columns import DECIMAL, NUMERIC_FORMS, PARK, RANGE_FORMS, ColumnForms
from replicad.spark.options import SourceOptions, parse_options
from replicad.spark.sinks.base import Sink
from replicad.spark.tables import FOLLOW, NEW_COLUMN_FORMS, WIDER_TYPE_FORMS, TableRule

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CHOICES: Mapping[str, Mapping[str, str]] = {
    "numeric": NUMERIC_FORMS,
    "out_of_range": RANGE_FORMS,
    "new_columns": NEW_COLUMN_FORMS,
    "wider_types": WIDER_TYPE_FORMS,
}
IDS_OF_TASK = 200_000  # of which the rows are loaded in one task, unless `maxIdsPerTask` is given: some 100 MB
AVAILABLE_NOW = "available_now"
ALL_COLUMNS = "*"


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """A pipeline: a tube, the tables with the rows of its ids, and a downstream.

    `table` is the table of a shard, e.g. `shard_{shard:04d}.cities`, or a list of rules for sets of shards.
    `checkpoint` is a path, or a URI that Spark's Hadoop reads.
    `columns` are the columns that the downstream gets, `*` for all; `id_column` is always among them.
    `trigger` is `available_now` (end when all pods that were there at the start have been read) or an interval in
    seconds, 0 for as soon as pods arrive.
    `options` are further options of the source by their Spark names, e.g. `{"maxPodsPerTrigger": "5000"}`.
    `numeric` is a name in NUMERIC_FORMS, `out_of_range` one in RANGE_FORMS (columns.py, docs/types.md).
    `new_columns`, a name in NEW_COLUMN_FORMS: what becomes of a column that a table gets (tables.py).
    `wider_types`, a name in WIDER_TYPE_FORMS: what becomes of a column that gets a wider type in some table.
    `renamed` has the new names of columns that are being renamed in the tables, by the names that they have downstream.
    `tries`: after so many failures of a batch in a row, with growing pauses between, the ids whose rows cannot be read
    are parked. If there are none, the run ends.
    `rebuild`: if the downstream is not the one that the checkpoint has written to, schedule a backfill of all rows by
    the functions in `tube_schema`, and go on; otherwise the pipeline does not start (preflight.py).
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
    transform: Callable[[DataFrame], DataFrame] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    rebuild: bool = False
    spark: Mapping[str, str] = field(default_factory=dict)
    tube_schema: str = "tube"

    def __post_init__(self) -> None:
        if not re.match(r"postgres(ql)?://", self.database):
            raise UsageError("database: give a URL such as postgresql://user@host:5432/name")
        if not isinstance(self.sink, Sink):
            raise UsageError(
                f"sink: {type(self.sink).__qualname__} is not a downstream; give one of replicad.spark.sinks, "
                "or your own object in a CustomSink"
            )
        if not 1 <= self.tries <= 1000:
            raise UsageError(f"tries: {self.tries} is out of range; give a number from 1 to 1000")
        for name, forms in _CHOICES.items():
            if getattr(self, name) not in forms:
                raise UsageError(f"{name}: {getattr(self, name)!r} is not valid; give one of {', '.join(forms)}")
        both = self.renamed.keys() & self.renamed.values()
        if both:
            raise UsageError(
                f"renamed: {min(both)} is an old and a new name; give the names downstream and in the tables"
            )
        if isinstance(self.columns, str) and self.columns != ALL_COLUMNS:
            raise UsageError(f"columns: give a list of names, or {ALL_COLUMNS!r} for all")
        if not isinstance(self.columns, str) and not self.columns:
            raise UsageError(f"columns: the list is empty; give the names of columns, or {ALL_COLUMNS!r}")
        object.__setattr__(self, "checkpoint", place_of(str(self.checkpoint)))
        self._check_trigger()
        if not self.rules:
            raise UsageError("table: give at least one")
        parse_options(self.source_options, streaming=True)

    def _check_trigger(self) -> None:
        if self.trigger == AVAILABLE_NOW:
            return
        if isinstance(self.trigger, str):
            try:
                object.__setattr__(self, "trigger", seconds(self.trigger))
            except ValueError as error:
                raise UsageError(f"trigger: {self.trigger!r} is not valid; give {AVAILABLE_NOW}, or {error}") from None
        if not 0 <= float(self.trigger) <= 86400:
            raise UsageError(f"trigger: {self.trigger} is out of range; give seconds from 0 to 86400")

    @property
    def rules(self) -> tuple[TableRule, ...]:
        """The rules that map shards to tables. The first rule that has a shard is used."""
        return (TableRule(self.table),) if isinstance(self.table, str) else tuple(self.table)

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
