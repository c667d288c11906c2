"""The configuration of a pipeline, checked before Spark starts, and its TOML file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicad.config.declaring import load_object, read_toml, seconds
from replicad.errors import UsageError
from replicad.spark.options import SourceOptions, parse_options
from replicad.spark.reading_columns import NUMERIC_FORMS, PARK, RANGE_FORMS, Reading
from replicad.spark.sinks.base import Sink
from replicad.spark.sinks.bulk import BulkSink
from replicad.spark.sinks.custom import CustomSink
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.spark.tables import TableRule
from replicad.tubes.shards import ShardSet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

AVAILABLE_NOW = "available_now"
ALL_COLUMNS = "*"


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """A pipeline: a tube, the tables with the rows of its ids, and a downstream.

    `table` is the table of a shard, e.g. `shard_{shard:04d}.cities`, or a list of rules for sets of shards.
    `columns` are the columns that the downstream gets, `*` for all; `id_column` is always among them.
    `trigger` is `available_now` (end when all pods that were there at the start have been read) or an interval in
    seconds, 0 for as soon as pods arrive.
    `options` are further options of the source by their Spark names, e.g. `{"maxPodsPerTrigger": "5000"}`.
    `numeric` is a name in NUMERIC_FORMS, `out_of_range` one in RANGE_FORMS (reading_columns.py, docs/types.md).
    `tries`: after so many failures of a batch in a row, with growing pauses between, the ids whose rows cannot be read
    are parked. If there are none, the run ends.
    `rebuild`: if the downstream is not the one that the checkpoint has written to, schedule a backfill of all rows by
    the functions in `tube_schema`, and go on; otherwise the pipeline does not start (downstream.py).
    `transform` gets and returns a DataFrame. A row that it leaves out is deleted downstream. It must keep `id_column`,
    `_shard` and `_seq`, and return at most one row per id.

    The constructor raises UsageError for whatever can be checked without Spark and Postgres.
    """

    tube: str
    database: str = field(repr=False)
    table: str | Sequence[TableRule]
    sink: Sink
    checkpoint: Path
    host: str = "127.0.0.1"
    port: int = 9009
    token: str | None = field(default=None, repr=False)
    id_column: str = "id"
    columns: Sequence[str] | str = ALL_COLUMNS
    numeric: str = "text"
    out_of_range: str = PARK
    trigger: str | float = AVAILABLE_NOW
    name: str = "pipeline"
    tries: int = 5
    transform: Callable[[DataFrame], DataFrame] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    rebuild: bool = False
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
        if self.numeric not in NUMERIC_FORMS:
            raise UsageError(f"numeric: {self.numeric!r} is not valid; give one of {', '.join(NUMERIC_FORMS)}")
        if self.out_of_range not in RANGE_FORMS:
            raise UsageError(f"out_of_range: {self.out_of_range!r} is not valid; give one of {', '.join(RANGE_FORMS)}")
        if isinstance(self.columns, str) and self.columns != ALL_COLUMNS:
            raise UsageError(f"columns: give a list of names, or {ALL_COLUMNS!r} for all")
        if not isinstance(self.columns, str) and not self.columns:
            raise UsageError(f"columns: the list is empty; give the names of columns, or {ALL_COLUMNS!r}")
        object.__setattr__(self, "checkpoint", Path(self.checkpoint).expanduser())
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
    def reading(self) -> Reading:
        """How the columns of the tables are read."""
        return Reading(self.numeric, self.out_of_range, exact=self.sink.casts and self.transform is None)

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
        return {**ours, **self.options}

    @property
    def source(self) -> SourceOptions:
        """The options of the source, parsed and checked."""
        return parse_options(self.source_options, streaming=True)


# --- the file ---


_KEYS: dict[str, set[str]] = {
    "enrich": {"database", "table", "tables", "id", "columns", "numeric", "out_of_range"},
    "run": {"checkpoint", "trigger", "name", "transform", "tries"},
}
_SINKS: dict[str, type[ParquetSink | PostgresSink | DeltaSink | BulkSink]] = {
    "parquet": ParquetSink,
    "postgres": PostgresSink,
    "delta": DeltaSink,
    "bulk": BulkSink,
}
_NOT_IN_FILES = {"patience"}  # fields of sinks that a file cannot set


def load_config(path: Path, *, database: str | None = None, trigger: str | None = None) -> PipelineConfig:
    """Read a pipeline's TOML file. `database` and `trigger` override those of the file; paths are relative to it.

    Raises:
        UsageError: the file cannot be read, or a value is not valid; the message names the key.
    """
    found = read_toml(path)
    unknown = found.keys() - {"source", "enrich", "downstream", "run"}
    if unknown:
        raise UsageError(
            f"{path}: unknown section [{min(unknown)}]; there are [source], [enrich], [downstream] and [run]"
        )
    try:
        return _from_sections(found, path.parent, database, trigger)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _from_sections(found: Mapping[str, Any], folder: Path, database: str | None, trigger: str | None) -> PipelineConfig:
    source = {key: _text(value) for key, value in _section(found, "source").items()}
    enrich, run, sink = (_section(found, name) for name in ("enrich", "run", "downstream"))
    for name, section in (("enrich", enrich), ("run", run)):
        _known(f"[{name}]", section, _KEYS[name])
    url = database or enrich.get("database")
    if url is None:
        raise UsageError("[enrich] has no database, and neither --database nor REPLICAD_DATABASE is given")
    ours = {key.lower(): key for key in source}

    def take(key: str, default: str | None = None) -> str | None:
        return source.pop(ours[key]) if key in ours else default

    tube, port = take("tube"), take("port", "9009")
    if tube is None:
        raise UsageError("[source] has no tube")
    if not str(port).isdigit():
        raise UsageError(f"[source] port: {port!r} is not a port")
    return PipelineConfig(
        tube=tube,
        host=take("host", "127.0.0.1") or "",
        port=int(port or 0),
        token=take("token"),
        options=source,
        database=url,
        table=_tables(enrich),
        id_column=enrich.get("id", "id"),
        columns=enrich.get("columns", ALL_COLUMNS),
        numeric=enrich.get("numeric", "text"),
        out_of_range=enrich.get("out_of_range", PARK),
        sink=_sink(sink, folder, url),
        checkpoint=folder / _required(run, "run", "checkpoint"),
        trigger=trigger or run.get("trigger", AVAILABLE_NOW),
        name=run.get("name", "pipeline"),
        tries=run.get("tries", 5),
        transform=load_object(str(run["transform"]), "[run] transform") if "transform" in run else None,
    )


def _section(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = found.get(name)
    if not isinstance(section, dict):
        raise UsageError(f"there is no section [{name}]")
    return dict(section)


def _known(where: str, section: Mapping[str, Any], keys: set[str]) -> None:
    unknown = section.keys() - keys
    if unknown:
        raise UsageError(f"{where} has an unknown key {min(unknown)!r}; there are {', '.join(sorted(keys))}")


def _required(section: Mapping[str, Any], name: str, key: str) -> Any:
    if key not in section:
        raise UsageError(f"[{name}] has no {key}")
    return section[key]


def _tables(enrich: Mapping[str, Any]) -> str | list[TableRule]:
    if ("table" in enrich) == ("tables" in enrich):
        raise UsageError('[enrich] needs either table = "..." or tables = [{shards = "0-9", table = "..."}, ...]')
    if "table" in enrich:
        return str(enrich["table"])
    rules = []
    for entry in enrich["tables"]:
        _known("[enrich] tables", entry, {"shards", "table", "database"})
        try:
            shards = ShardSet.parse(str(entry["shards"]))
            rules.append(TableRule(_required(entry, "enrich.tables", "table"), shards, entry.get("database")))
        except (KeyError, ValueError) as error:
            raise UsageError(f"[enrich] tables: shards is not valid; {error}") from None
    return rules


def _sink(section: dict[str, Any], folder: Path, database: str) -> Sink:
    kind = section.pop("kind", None)
    if kind not in (*_SINKS, "class"):
        raise UsageError(f"[downstream] kind: {kind!r} is not valid; give one of {', '.join((*_SINKS, 'class'))}")
    if kind == "class":
        made = load_object(str(_required(section, "downstream", "class")), "[downstream] class")
        section.pop("class")
        try:
            return CustomSink(made(**section))
        except TypeError as error:
            raise UsageError(f"[downstream] class: {error}") from error
    settable = [entry for entry in fields(_SINKS[kind]) if entry.name not in _NOT_IN_FILES]
    _known("[downstream]", section, {entry.name for entry in settable})
    if kind == "postgres":
        section.setdefault("url", database)
    for entry in settable:
        if entry.default is MISSING and entry.default_factory is MISSING:
            _required(section, "downstream", entry.name)
    if kind == "parquet":
        section["folder"] = folder / section["folder"]
    elif kind == "delta" and "://" not in section["uri"]:
        section["uri"] = str(folder / section["uri"])
    return _SINKS[kind](**section)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
