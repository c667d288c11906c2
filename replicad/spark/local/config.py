"""The configuration of a pipeline with `engine = "local"`: one tube, one table or many, one downstream or several."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from replicad.errors import UsageError
from replicad.spark.columns import DECIMAL, PARK, ColumnForms
from replicad.spark.options import SourceOptions, parse_options
from replicad.spark.pipeline_config import ALL_COLUMNS, AVAILABLE_NOW
from replicad.spark.sinks.base import Sink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.spark.tables import FOLLOW, TableRule

ROWS, TRANSACTION = "rows", "transaction"
CONSISTENCY = {
    ROWS: "each row is as it was when it was written; tables may be of different moments for a short time",
    TRANSACTION: "each transaction downstream takes all tables to one common state of the source, after the backfill",
}
BACKLOG_AFTER = 30.0  # seconds that a downstream may fail before its touches go into a tube of its own
BACKLOG_IDS = 10_000_000  # in the tube of a downstream that fails; then the others wait for it
MOST_DOWNSTREAMS = 16  # each has a thread and some connections

SinkOf = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TableOptions:
    """What a file says of one table, by the name `schema.table`."""

    columns: Sequence[str] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Selection:
    """The tables of a database: those that a pattern of `include` names and none of `exclude`."""

    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    options: Mapping[str, TableOptions] = field(default_factory=dict)

    def chooses(self, table: str) -> bool:
        """Whether a table, by its name without quotes, is one of them."""
        return any(fnmatchcase(table, one) for one in self.include) and not any(
            fnmatchcase(table, one) for one in self.exclude
        )


class SinkMaker:
    """Makes the sinks of one downstream. `make(schema, table)`: names in the source, without quotes."""

    def __init__(self, kind: str, make: object, url: str | None = None) -> None:
        self.kind = kind
        self._make = make
        self.url = url  # of a Postgres, whose tables are written in one transaction

    def make(self, schema: str, table: str) -> Sink:
        """The sink of a table."""
        made = self._make(schema, table)  # type: ignore[operator]
        assert isinstance(made, Sink)
        return made


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """A pipeline in one process. Times in seconds.

    `tables` has the tables of a tube of many tables; or `rules` has those of a tube whose shards have tables of one
    form, whose key is `key`. `downstreams` by name. `checkpoint` is a folder of this machine. `exact`: values that
    Arrow could change come as their text, for a downstream that casts them.
    """

    options: Mapping[str, str]
    database: str
    checkpoint: Path
    downstreams: Mapping[str, SinkMaker]
    tables: Selection | None = None
    rules: tuple[TableRule, ...] = ()
    key: tuple[str, ...] = ("id",)
    columns: Sequence[str] | str = ALL_COLUMNS
    renamed: Mapping[str, str] = field(default_factory=dict)
    numeric: str = DECIMAL
    out_of_range: str = PARK
    new_columns: str = FOLLOW
    wider_types: str = FOLLOW
    trigger: str | float = AVAILABLE_NOW
    name: str = "pipeline"
    tries: int = 5
    traceparent: str | None = None
    consistency: str = ROWS
    backlog_after: float = BACKLOG_AFTER
    backlog_ids: int = BACKLOG_IDS
    rebuild: bool = False
    tube_schema: str = "tube"
    exact: bool = True

    def __post_init__(self) -> None:
        if not self.downstreams or len(self.downstreams) > MOST_DOWNSTREAMS:
            raise UsageError(
                f"a pipeline has 1 to {MOST_DOWNSTREAMS} downstreams, and this one {len(self.downstreams)}"
            )
        for name, one in self.downstreams.items():
            if not re.fullmatch(r"[A-Za-z0-9_]{1,20}", name):
                raise UsageError(f"[downstream.{name}]: a name has 1 to 20 letters, digits and _")
            if self.consistency == TRANSACTION and (one.url is None or self.tables is None):
                raise UsageError(
                    f'[run] consistency = "{TRANSACTION}" needs [tables] and downstreams of kind postgres, whose '
                    f"tables are written in one transaction; downstream {name} is of kind {one.kind}"
                )
        if self.source.islands is not None:
            raise UsageError('[source] islands cannot be used with engine = "local"; start a pipeline for each daemon')

    @property
    def source(self) -> SourceOptions:
        """The options of the source, parsed and checked."""
        ours = {"consumer": re.sub(r"[^!-~]", "-", self.name), "includePayload": "true"}
        given = {name.lower() for name in self.options}
        return parse_options(
            {**{name: text for name, text in ours.items() if name.lower() not in given}, **self.options}, streaming=True
        )

    @property
    def tube(self) -> str:
        """The name of the tube."""
        assert self.source.tube is not None
        return self.source.tube

    def reading(self, sink: Sink) -> ColumnForms:
        """How the columns of tables are read for a sink."""
        return ColumnForms(self.numeric, self.out_of_range, exact=self.exact and sink.casts)


def in_one_transaction(sink: Sink) -> bool:
    """Whether a sink is a table of Postgres, which can be written with others."""
    return isinstance(sink, PostgresSink)
