"""The TOML file of a pipeline. `SECTIONS` and `DOWNSTREAMS` declare its keys: type, default, use.

The check of a value and docs/pipeline-file.md come from the declaration. The keys of [source] are the options of the
source (`options.OPTIONS`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicad.config.declaring import load_object, read_toml, seconds
from replicad.errors import ReplicadError, UsageError
from replicad.spark.checkpoint import below
from replicad.spark.columns import DECIMAL, NUMERIC_FORMS, PARK, RANGE_FORMS
from replicad.spark.options import OPTIONS, USES, Use
from replicad.spark.pipeline_config import ALL_COLUMNS, AVAILABLE_NOW, IDS_OF_TASK, PipelineConfig
from replicad.spark.sinks.base import Sink
from replicad.spark.sinks.bulk import AS_TEXT, OBJECT, BulkSink
from replicad.spark.sinks.custom import CustomSink
from replicad.spark.sinks.delta import DeltaSink
from replicad.spark.sinks.parquet import KEEP, ROWS_PER_FILE, ParquetSink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.spark.tables import FOLLOW, NEW_COLUMN_FORMS, WIDER_TYPE_FORMS, TableRule
from replicad.tubes.shards import ShardSet

# --- types of values ---


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: object) -> bool:
    if isinstance(value, str):
        try:
            seconds(value)
        except ValueError:
            return False
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _is_trigger(value: object) -> bool:
    return _is_text(value) or _is_time(value)  # PipelineConfig says what is wrong with a text


def _is_scalar(value: object) -> bool:
    return isinstance(value, (str, bool, int, float))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_columns(value: object) -> bool:
    return _are_texts(value) or _is_text(value)  # PipelineConfig says what is wrong with a text


def _are_tables(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _is_table_of_texts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


_TYPES: dict[str, tuple[Callable[[object], bool], str]] = {
    "text": (_is_text, 'a text such as "abc"'),
    "number": (_is_number, "a whole number such as 100"),
    "seconds": (_is_time, 'seconds such as 30, 0.5, "500ms" or "10m"'),
    "interval": (_is_trigger, f'seconds such as 1 or "500ms", or "{AVAILABLE_NOW}"'),
    "text or number": (lambda value: _is_text(value) or _is_number(value), 'a text such as "0-9"'),
    "text, number or flag": (_is_scalar, "a text, a number, true or false"),
    "names": (_are_columns, 'a list of names such as ["id", "name"]'),
    "tables": (_are_tables, 'a list such as [{shards = "0-9", table = "shard_{shard:04d}.cities"}]'),
    "texts by name": (_is_table_of_texts, 'texts by name such as {region = "eu"}'),
}


@dataclass(frozen=True, slots=True)
class PipelineKey:
    """A key of the file. `type` is a name in `_TYPES`; `default` None: the key is required, or see `help`."""

    name: str
    type: str
    default: object
    help: str
    required: bool = False

    def check(self, value: object, where: str) -> None:
        """Raise UsageError if the value has another type. `where` is the section, such as `[run]`."""
        fits, example = _TYPES[self.type]
        if not fits(value):
            raise UsageError(f"{where} {self.name}: {_shown(value)} is not valid; give {example}")


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else f"{text[:57]}..."


OF_PIPELINES = {"maxIdsPerTask": IDS_OF_TASK}  # defaults that a query of your own does not have
SOURCE = tuple(
    PipelineKey(one.name, "text, number or flag", OF_PIPELINES.get(one.name, one.default), one.help, one.name == "tube")
    for one in OPTIONS
    if Use.TUBE_STREAM in USES[one.name] and one.name != "includePayload"  # the pipeline sets that one
)
ENRICH = (
    PipelineKey("database", "text", None, "URL of the Postgres with the rows; or --database, or REPLICAD_DATABASE"),
    PipelineKey("table", "text", None, "table of a shard; `{shard}` stands for its number. Give this or `tables`"),
    PipelineKey(
        "tables",
        "tables",
        None,
        "tables for sets of shards, with `shards`, `table` and perhaps `database`; the first with the shard counts",
    ),
    PipelineKey("id", "text", "id", "column with the ids that the tube has"),
    PipelineKey(
        "columns", "names", ALL_COLUMNS, "columns that go downstream, or `*` for all; the id is always among them"
    ),
    PipelineKey(
        "numeric",
        "text",
        DECIMAL,
        "how numeric is carried; " + "; ".join(f"`{name}`: {to}" for name, to in NUMERIC_FORMS.items()),
    ),
    PipelineKey(
        "out_of_range",
        "text",
        PARK,
        "dates and times beyond the years 1 to 9999; "
        + "; ".join(f"`{name}`: {to}" for name, to in RANGE_FORMS.items()),
    ),
    PipelineKey(
        "new_columns",
        "text",
        FOLLOW,
        "a column that a table gets while `columns` is `*`; "
        + "; ".join(f"`{name}`: {to}" for name, to in NEW_COLUMN_FORMS.items()),
    ),
    PipelineKey(
        "wider_types",
        "text",
        FOLLOW,
        "a column that gets a type with more values in some table, such as bigint for integer; "
        + "; ".join(f"`{name}`: {to}" for name, to in WIDER_TYPE_FORMS.items()),
    ),
    PipelineKey(
        "renamed",
        "texts by name",
        {},
        'columns that are renamed in one table after the other: `{old = "new"}`; downstream they keep the old name',
    ),
)
RUN = (
    PipelineKey(
        "checkpoint", "text", None, "folder, or URI for Hadoop, in which Spark keeps how far it is", required=True
    ),
    PipelineKey(
        "trigger", "interval", AVAILABLE_NOW, f"how often to look for changes; `{AVAILABLE_NOW}`: end without any"
    ),
    PipelineKey("name", "text", "pipeline", "name of the query, in `replicad top` and in the lease"),
    PipelineKey("transform", "text", None, "a function of yours, `module:name`, from DataFrame to DataFrame"),
    PipelineKey(
        "tries", "number", 5, "after so many failures of a batch the rows that cause them are looked for, and parked"
    ),
)
DOWNSTREAMS: dict[str, tuple[PipelineKey, ...]] = {
    "parquet": (
        PipelineKey("folder", "text", None, "where the table is; read it as `folder/current`", required=True),
        PipelineKey("rows_per_file", "number", ROWS_PER_FILE, "a changed row rewrites one file"),
        PipelineKey("keep", "seconds", KEEP, "how long replaced files stay, for readers that have begun"),
    ),
    "postgres": (
        PipelineKey("url", "text", None, "URL of the Postgres; default: that of [enrich]"),
        PipelineKey("table", "text", None, "`name` or `schema.name`; made if it is missing", required=True),
    ),
    "delta": (
        PipelineKey("uri", "text", None, "a path, or s3://, gs://, ...", required=True),
        PipelineKey("storage", "texts by name", {}, "storage options of deltalake"),
    ),
    "bulk": (
        PipelineKey(
            "url", "text", None, "of Elasticsearch or OpenSearch, perhaps with user and password", required=True
        ),
        PipelineKey("index", "text", None, "name of the index", required=True),
        PipelineKey("api_key", "text", None, "instead of user and password"),
        PipelineKey(
            "json",
            "text",
            OBJECT,
            f"columns of json and jsonb; `{OBJECT}`: a part of the document, for which one mapping must fit all rows; "
            f"`{AS_TEXT}`: their text",
        ),
        PipelineKey("document_id", "text", "{shard}:{id}", "id of a row's document"),
        PipelineKey("ca", "text", None, "PEM file of the authority that signed the server's certificate"),
    ),
    "class": (
        PipelineKey("class", "text", None, "`module:name` of your class; all other keys go to it", required=True),
    ),
}
KINDS: dict[str, type[ParquetSink | PostgresSink | DeltaSink | BulkSink]] = {
    "parquet": ParquetSink,
    "postgres": PostgresSink,
    "delta": DeltaSink,
    "bulk": BulkSink,
}
_TABLE = (
    PipelineKey("shards", "text or number", None, "", required=True),
    PipelineKey("table", "text", None, "", required=True),
    PipelineKey("database", "text", None, ""),
)
_SECTIONS = ("source", "enrich", "downstream", "run")
_OPTIONAL = ("spark",)


def load_config(path: Path, *, database: str | None = None, trigger: str | None = None) -> PipelineConfig:
    """Read a pipeline's TOML file. `database` and `trigger` override those of the file; paths are relative to it.

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
    source = _source(found["source"])
    spark = found.get("spark", {})
    for name, value in spark.items():
        if not name.startswith("spark."):
            raise UsageError(
                f'[spark] {name}: give names of Spark\'s settings in quotes, such as "spark.driver.memory"'
            )
        PipelineKey(name, "text, number or flag", None, "").check(value, "[spark]")
    enrich = _checked("[enrich]", found["enrich"], ENRICH)
    run = _checked("[run]", found["run"], RUN)
    url = database or enrich.get("database")
    if url is None:
        raise UsageError("[enrich] has no database, and neither --database nor REPLICAD_DATABASE is given")
    port = source.pop("port", "9009")
    if not port.isdigit():
        raise UsageError(f"[source] port: {port!r} is not a port")
    return PipelineConfig(
        tube=source.pop("tube"),
        host=source.pop("host", "127.0.0.1"),
        port=int(port),
        token=source.pop("token", None),
        options=source,
        database=url,
        table=_tables(enrich),
        id_column=enrich.get("id", "id"),
        columns=enrich.get("columns", ALL_COLUMNS),
        numeric=enrich.get("numeric", DECIMAL),
        out_of_range=enrich.get("out_of_range", PARK),
        new_columns=enrich.get("new_columns", FOLLOW),
        wider_types=enrich.get("wider_types", FOLLOW),
        renamed=enrich.get("renamed", {}),
        sink=_sink(dict(found["downstream"]), folder, url),
        checkpoint=below(folder, run["checkpoint"]),
        trigger=trigger or run.get("trigger", AVAILABLE_NOW),
        name=run.get("name", "pipeline"),
        tries=run.get("tries", 5),
        spark={name: _plain(value) for name, value in spark.items()},
        transform=load_object(run["transform"], "[run] transform") if "transform" in run else None,
    )


def _source(section: Mapping[str, Any]) -> dict[str, str]:
    """The options by their Spark names, as texts. They may be written in any case, as for Spark."""
    names = {key.name.lower(): key.name for key in SOURCE}
    given = {names.get(name.lower(), name): value for name, value in section.items()}
    for key in SOURCE:
        if key.name in given:
            key.check(given[key.name], "[source]")
    if "tube" not in given:
        raise UsageError("[source] has no tube")
    return {name: _plain(value) for name, value in given.items()}


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _checked(where: str, section: Mapping[str, Any], keys: Sequence[PipelineKey]) -> dict[str, Any]:
    """The section. Raises UsageError: a key is unknown, missing or of another type."""
    known = {key.name: key for key in keys}
    for name, value in section.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? there are" if near else "there are"
            raise UsageError(f"{where} has an unknown key {name!r}; {hint} {', '.join(known)}")
        known[name].check(value, where)
    missing = [key.name for key in keys if key.required and key.name not in section]
    if missing:
        raise UsageError(f"{where} has no {missing[0]}")
    return dict(section)


def _tables(enrich: Mapping[str, Any]) -> str | list[TableRule]:
    if ("table" in enrich) == ("tables" in enrich):
        raise UsageError('[enrich] needs either table = "..." or tables = [{shards = "0-9", table = "..."}, ...]')
    if "table" in enrich:
        return str(enrich["table"])
    rules = []
    for entry in enrich["tables"]:
        rule = _checked("[enrich] tables", entry, _TABLE)
        try:
            rules.append(TableRule(rule["table"], ShardSet.parse(str(rule["shards"])), rule.get("database")))
        except ValueError as error:
            raise UsageError(f"[enrich] tables: shards is not valid; {error}") from None
    return rules


def _sink(section: dict[str, Any], folder: Path, database: str) -> Sink:
    kind = section.pop("kind", None)
    if not isinstance(kind, str) or kind not in DOWNSTREAMS:
        raise UsageError(f"[downstream] kind: {_shown(kind)} is not valid; give one of {', '.join(DOWNSTREAMS)}")
    if kind == "class":
        return _own_class(section)
    section = _checked("[downstream]", section, DOWNSTREAMS[kind])
    if kind == "postgres":
        section.setdefault("url", database)
    for name in ("folder", "uri"):
        if name in section:
            section[name] = below(folder, section[name])
    if "keep" in section:
        section["keep"] = seconds(str(section["keep"]))
    return KINDS[kind](**section)


def _own_class(section: dict[str, Any]) -> Sink:
    _checked("[downstream]", {name: value for name, value in section.items() if name == "class"}, DOWNSTREAMS["class"])
    made = load_object(section.pop("class"), "[downstream] class")
    try:
        return CustomSink(made(**section))
    except ReplicadError:
        raise
    except Exception as error:
        raise UsageError(f"[downstream] class: {type(error).__name__}: {error}") from error
