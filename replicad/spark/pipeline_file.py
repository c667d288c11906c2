"""The TOML file of a pipeline. `SECTIONS` and `DOWNSTREAMS` declare its keys: type, default, use.

The check of a value and docs/pipeline-file.md come from the declaration. The keys of [source] are the options of the
source (`options.OPTIONS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from replicad.config.declaring import (
    SECONDS,
    TABLE_OF_TEXTS,
    TEXT,
    WHOLE,
    Key,
    ValueKind,
    load_object,
    one_of,
    read_table,
    read_toml,
    refuse,
    shown_value,
)
from replicad.config.settings import DATABASE_URL
from replicad.errors import ReplicadError, UsageError
from replicad.spark.checkpoint import below
from replicad.spark.columns import DECIMAL, PARK
from replicad.spark.options import OPTIONS, USES, Use
from replicad.spark.pipeline_config import ALL_COLUMNS, AVAILABLE_NOW, ENRICH, IDS_OF_TASK, RUN, PipelineConfig
from replicad.spark.sinks.base import Sink
from replicad.spark.sinks.bulk import AS_TEXT, OBJECT, BulkSink
from replicad.spark.sinks.custom import CustomSink
from replicad.spark.sinks.delta import BASE_ROWS_PER_FILE, MODES, ROWS, DeltaSink
from replicad.spark.sinks.delta import KEEP as DELTA_KEEP
from replicad.spark.sinks.delta import ROWS_PER_FILE as DELTA_ROWS_PER_FILE
from replicad.spark.sinks.parquet import KEEP, ROWS_PER_FILE, ParquetSink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.spark.tables import FOLLOW, TableRule
from replicad.tubes.shards import ShardSet


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


OF_PIPELINES = {"maxIdsPerTask": IDS_OF_TASK}  # defaults that a query of your own does not have
SOURCE = tuple(
    replace(one, default=OF_PIPELINES.get(one.name, one.default), required=one.name == "tube")
    for one in OPTIONS
    if Use.TUBE_STREAM in USES[one.name] and one.name != "includePayload"  # the pipeline sets that one
)
DOWNSTREAMS: dict[str, tuple[Key, ...]] = {
    "parquet": (
        Key("folder", TEXT, None, "where the table is; read it as `folder/current`", required=True),
        Key("rows_per_file", WHOLE, ROWS_PER_FILE, "a changed row rewrites one file"),
        Key("keep", SECONDS, KEEP, "how long replaced files stay, for readers that have begun"),
    ),
    "postgres": (
        Key("url", TEXT, None, "URL of the Postgres; default: that of [enrich]"),
        Key("table", TEXT, None, "`name` or `schema.name`; made if it is missing", required=True),
    ),
    "delta": (
        Key("uri", TEXT, None, "a path, or s3://, gs://, ...", required=True),
        Key("storage", TABLE_OF_TEXTS, {}, "storage options of deltalake"),
        Key("mode", one_of(*MODES), ROWS, "; ".join(f"`{name}`: {what}" for name, what in MODES.items())),
        Key(
            "rows_per_file",
            WHOLE,
            None,
            f"in the order of the key; default: {DELTA_ROWS_PER_FILE:,}, with changes {BASE_ROWS_PER_FILE:,}",
            minimum=1,
        ),
        Key("keep", SECONDS, DELTA_KEEP, "how long replaced files stay, for readers that have begun"),
    ),
    "bulk": (
        Key("url", TEXT, None, "of Elasticsearch or OpenSearch, perhaps with user and password", required=True),
        Key("index", TEXT, None, "name of the index", required=True),
        Key("api_key", TEXT, None, "instead of user and password"),
        Key(
            "json",
            TEXT,
            OBJECT,
            f"columns of json and jsonb; `{OBJECT}`: a part of the document, for which one mapping must fit all rows; "
            f"`{AS_TEXT}`: their text",
        ),
        Key("document_id", TEXT, "{shard}:{id}", "id of a row's document"),
        Key("ca", TEXT, None, "PEM file of the authority that signed the server's certificate"),
    ),
    "class": (Key("class", TEXT, None, "`module:name` of your class; all other keys go to it", required=True),),
}
KINDS: dict[str, type[ParquetSink | PostgresSink | DeltaSink | BulkSink]] = {
    "parquet": ParquetSink,
    "postgres": PostgresSink,
    "delta": DeltaSink,
    "bulk": BulkSink,
}
_SHARDS = ValueKind(
    "shards", 'shards such as "0-9"', ShardSet.parse, (str, int), lambda number: ShardSet.parse(str(number))
)
_SCALAR = ValueKind("text, number or flag", "a text, a number, true or false", str, (str, int, float, bool), _plain)
_TABLE = (
    Key("shards", _SHARDS, required=True),
    Key("table", TEXT, required=True),
    Key("database", DATABASE_URL, secret=True),
)
_SECTIONS = ("source", "enrich", "downstream", "run")
_OPTIONAL = ("spark",)


def load_config(path: Path, *, database: str | None = None, trigger: str | None = None) -> PipelineConfig:
    """Read a pipeline's TOML file. `database` and `trigger` override the file; paths are relative to it.

    Raises:
        UsageError: the file cannot be read, or a value is not valid; the message names the key.
    """
    found = read_toml(path)
    try:
        return _from_sections(found, path.parent, database, trigger)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _from_sections(found: Mapping[str, Any], folder: Path, database: str | None, trigger: str | None) -> PipelineConfig:
    unknown = found.keys() - {*_SECTIONS, *_OPTIONAL}
    if unknown:
        listed = ", ".join(f"[{name}]" for name in (*_SECTIONS, *_OPTIONAL))
        raise UsageError(f"unknown section [{min(unknown)}]; there are {listed}")
    for name in (*_SECTIONS, *_OPTIONAL):
        if not isinstance(found.get(name), dict) and (name in found or name in _SECTIONS):
            raise UsageError(
                f"{name} is not a section; write [{name}]" if name in found else f"there is no section [{name}]"
            )
    source = source_of(found["source"])
    spark = {}
    for name, value in found.get("spark", {}).items():
        if not name.startswith("spark."):
            raise UsageError(
                f'[spark] {name}: give names of Spark\'s settings in quotes, such as "spark.driver.memory"'
            )
        spark[name] = Key(name, _SCALAR).take(value, f"[spark] {name}")
    enrich = checked("[enrich]", found["enrich"], ENRICH)
    run = checked("[run]", found["run"], RUN)
    url = database or enrich.get("database")
    if url is None:
        raise UsageError("[enrich] has no database, and neither --database nor REPLICAD_DATABASE is given")
    return PipelineConfig(
        tube=source.pop("tube"),
        host=source.pop("host", "127.0.0.1"),
        port=int(source.pop("port", "9009")),
        token=source.pop("token", None),
        options=source,
        database=url,
        table=rules_of(enrich),
        id_column=enrich.get("id", "id"),
        columns=enrich.get("columns", ALL_COLUMNS),
        numeric=enrich.get("numeric", DECIMAL),
        out_of_range=enrich.get("out_of_range", PARK),
        new_columns=enrich.get("new_columns", FOLLOW),
        wider_types=enrich.get("wider_types", FOLLOW),
        renamed=enrich.get("renamed", {}),
        sink=sink_of(dict(found["downstream"]), folder, url),
        checkpoint=below(folder, run["checkpoint"]),
        trigger=trigger or run.get("trigger", AVAILABLE_NOW),
        name=run.get("name", "pipeline"),
        tries=run.get("tries", 5),
        traceparent=run.get("traceparent"),
        spark=spark,
        transform=load_object(run["transform"], "[run] transform") if "transform" in run else None,
    )


def source_of(section: Mapping[str, Any]) -> dict[str, str]:
    """The options by their Spark names, as texts. They may be written in any case, as for Spark."""
    names = {key.name.lower(): key.name for key in SOURCE}
    given = {names.get(name.lower(), name): value for name, value in section.items()}
    for key in SOURCE:  # as texts they may be written too, since Spark's options are texts
        if key.name in given:
            value, place = given[key.name], f"[source] {key.name}"
            key.read(value, place) if isinstance(value, str) else key.take(value, place)
    if "tube" not in given:
        raise UsageError("[source] has no tube")
    return {name: _plain(value) for name, value in given.items()}


def checked(where: str, section: Mapping[str, Any], keys: Sequence[Key]) -> dict[str, Any]:
    """The values of the section. Raises UsageError: a key is unknown or missing, or a value is not valid."""
    return read_table(section, keys, lambda name: f"{where} {name}", refuse)


def rules_of(enrich: Mapping[str, Any]) -> str | list[TableRule]:
    """The table, or the rules for tables, of [enrich]."""
    if ("table" in enrich) == ("tables" in enrich):
        raise UsageError('[enrich] needs either table = "..." or tables = [{shards = "0-9", table = "..."}, ...]')
    if "table" in enrich:
        return str(enrich["table"])
    rules = [checked("[enrich] tables", entry, _TABLE) for entry in enrich["tables"]]
    return [TableRule(rule["table"], rule["shards"], rule.get("database")) for rule in rules]


def sink_of(section: dict[str, Any], folder: Path, database: str) -> Sink:
    """The sink of a section [downstream]."""
    kind = section.pop("kind", None)
    if not isinstance(kind, str) or kind not in DOWNSTREAMS:
        raise UsageError(f"[downstream] kind: {shown_value(kind)} is not valid; give one of {', '.join(DOWNSTREAMS)}")
    if kind == "class":
        return own_class(section)
    section = checked("[downstream]", section, DOWNSTREAMS[kind])
    if kind == "postgres":
        section.setdefault("url", database)
    for name in ("folder", "uri"):
        if name in section:
            section[name] = below(folder, section[name])
    return KINDS[kind](**section)


def own_class(section: dict[str, Any]) -> Sink:
    """The sink of a section with the class of a user."""
    checked("[downstream]", {name: value for name, value in section.items() if name == "class"}, DOWNSTREAMS["class"])
    made = load_object(section.pop("class"), "[downstream] class")
    try:
        return CustomSink(made(**section))
    except ReplicadError:
        raise
    except Exception as error:
        raise UsageError(f"[downstream] class: {type(error).__name__}: {error}") from error
