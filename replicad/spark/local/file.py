"""The TOML file of a pipeline with `engine = "local"`, and `replicad pipeline init`, which writes one.

`[tables]` in place of `[enrich]` means a tube of many tables; `[downstream.NAME]` sections in place of `[downstream]`
mean several downstreams. All other keys are those of a pipeline of Spark (pipeline_file.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from replicad.config.declaring import SECONDS, WHOLE, Key, one_of, only_toml, read_toml, shown_value
from replicad.config.settings import DATABASE_URL
from replicad.errors import UsageError
from replicad.spark.checkpoint import below, local_path
from replicad.spark.local import LOCAL
from replicad.spark.local.config import (
    BACKLOG_AFTER,
    BACKLOG_IDS,
    CONSISTENCY,
    ROWS,
    LocalConfig,
    Selection,
    SinkMaker,
    TableOptions,
)
from replicad.spark.pipeline_config import ALL_COLUMNS, ENRICH, RUN
from replicad.spark.pipeline_file import DOWNSTREAMS, checked, own_class, rules_of, sink_of, source_of
from replicad.spark.sinks.base import Sink
from replicad.spark.sinks.postgres import PostgresSink
from replicad.spark.tables import TableRule

_NAMES = only_toml(
    "names", 'a list such as ["public.*"]', (list,), lambda names: all(isinstance(name, str) and name for name in names)
)
OF_TABLES = (
    Key("database", DATABASE_URL, None, "URL of the Postgres with the rows; or --database, or REPLICAD_DATABASE"),
    Key(
        "include",
        _NAMES,
        None,
        "patterns of the tables, such as `public.*`; new tables that match are attached",
        required=True,
    ),
    Key("exclude", _NAMES, [], "patterns of tables that are left out"),
    *(key for key in ENRICH if key.name in {"numeric", "out_of_range", "new_columns", "wider_types"}),
)
OF_TABLE = tuple(key for key in ENRICH if key.name in {"columns", "renamed"})
OF_LOCAL = (
    Key(
        "consistency",
        one_of(*CONSISTENCY),
        ROWS,
        "of several tables; " + "; ".join(f"`{name}`: {what}" for name, what in CONSISTENCY.items()),
    ),
    Key(
        "backlog_after",
        SECONDS,
        BACKLOG_AFTER,
        "how long one of several downstreams may fail before it gets a tube of its own",
    ),
    Key(
        "backlog_ids",
        WHOLE,
        BACKLOG_IDS,
        "ids in that tube, beyond which the other downstreams wait; each 100 bytes of long ids count as one",
        minimum=1,
    ),
)
_TRIGGER = next(key for key in RUN if key.name == "trigger")
_RUN = tuple(key for key in RUN if key.name != "transform")
_AS_THEY_ARE = {"name", "tries", "traceparent", "consistency", "backlog_after", "backlog_ids"}


def load_local(path: Path, *, database: str | None = None, trigger: str | None = None) -> LocalConfig:
    """Read the file of a local pipeline. `database` and `trigger` override the file; paths are relative to it.

    Raises:
        UsageError: the file cannot be read, or a value is not valid; the message names the key.
    """
    found = read_toml(path)
    try:
        return _from_sections(found, path.parent, database, trigger)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _from_sections(found: Mapping[str, Any], folder: Path, database: str | None, trigger: str | None) -> LocalConfig:
    known = {"source", "tables", "table", "enrich", "downstream", "run"}
    if unknown := found.keys() - known:
        raise UsageError(
            f"unknown section [{min(unknown)}]; there are {', '.join(f'[{name}]' for name in sorted(known))}"
        )
    for name in ("source", "downstream", "run"):
        if not isinstance(found.get(name), dict):
            raise UsageError(f"there is no section [{name}]")
    if ("tables" in found) == ("enrich" in found):
        raise UsageError(
            "give either [tables], for many tables in one tube, or [enrich], for one table or one for each shard"
        )
    run = checked("[run]", found["run"], (*_RUN, *OF_LOCAL))
    checkpoint = local_path(below(folder, run["checkpoint"]))
    if checkpoint is None:
        raise UsageError(f'[run] checkpoint must be a folder with engine = "{LOCAL}", got {run["checkpoint"]!r}')
    common: dict[str, Any] = {
        "options": source_of(found["source"]),
        "checkpoint": checkpoint,
        "trigger": _TRIGGER.take(trigger or run.get("trigger", "available_now"), "[run] trigger"),
        **{name: run[name] for name in run.keys() & _AS_THEY_ARE},
    }
    if "tables" in found:
        section = checked("[tables]", found["tables"], OF_TABLES)
        options = {name: _table_options(name, one) for name, one in _sections("table", found.get("table", {})).items()}
        common["tables"] = Selection(tuple(section["include"]), tuple(section.get("exclude", ())), options)
    else:
        section = checked("[enrich]", found["enrich"], ENRICH)
        table = rules_of(section)
        common["rules"] = tuple(_rules(table))
        common["key"] = tuple(name.strip() for name in section.get("id", "id").split(","))
        common["columns"] = section.get("columns", ALL_COLUMNS)
        common["renamed"] = section.get("renamed", {})
    url = database or section.get("database")
    if url is None:
        raise UsageError("there is no database in the file, and neither --database nor REPLICAD_DATABASE is given")
    common |= {
        name: section[name] for name in ("numeric", "out_of_range", "new_columns", "wider_types") if name in section
    }
    makers = {
        name: _maker(name, dict(one), folder, url, many="tables" in found)
        for name, one in _downstreams(found["downstream"]).items()
    }
    return LocalConfig(database=url, downstreams=makers, **common)


def _rules(table: Any) -> list[TableRule]:
    return [TableRule(table)] if isinstance(table, str) else list(table)


def _sections(name: str, found: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise UsageError(f'{name}: write sections such as [{name}."public.film"]')
    return found


def _table_options(name: str, section: Mapping[str, Any]) -> TableOptions:
    values = checked(f'[table."{name}"]', section, OF_TABLE)
    columns = values.get("columns")
    return TableOptions(None if columns in (None, ALL_COLUMNS) else columns, values.get("renamed", {}))


def _downstreams(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of the downstreams by name. `[downstream]` with a kind is one, whose name is its kind."""
    if isinstance(found.get("kind"), str):
        return {str(found["kind"]): dict(found)}
    return _sections("downstream", found)


_PLACES = {"postgres": "table", "delta": "uri", "parquet": "folder", "bulk": "index"}
_PLACE_OF_MANY = {"postgres": "{schema}.{table}"}


def _maker(name: str, section: dict[str, Any], folder: Path, database: str, *, many: bool) -> SinkMaker:
    """What makes the sinks of a downstream. With many tables the place has `{schema}` and `{table}`."""
    kind = section.get("kind")
    where = f"[downstream.{name}]"
    if not isinstance(kind, str) or kind not in DOWNSTREAMS:
        raise UsageError(f"{where} kind: {shown_value(kind)} is not valid; give one of {', '.join(DOWNSTREAMS)}")
    if not many:
        made = own_class({**section}) if kind == "class" else sink_of({**section}, folder, database)
        return SinkMaker(kind, lambda _schema, _table: made)
    if kind == "class":
        raise UsageError(f'{where} kind = "class" cannot be used with [tables]; use [enrich]')
    place = _PLACES[kind]
    if kind in _PLACE_OF_MANY:
        section.setdefault(place, _PLACE_OF_MANY[kind])
    text = section.get(place)
    if not isinstance(text, str) or "{table}" not in text:
        raise UsageError(f"{where} {place}: write {{schema}} and {{table}} in it, such as {_example(kind)}")

    def make(schema: str, table: str) -> Sink:
        quoted = kind == "postgres"
        names = {"schema": _quoted(schema) if quoted else schema, "table": _quoted(table) if quoted else table}
        filled = text
        for part, value in names.items():
            filled = filled.replace("{" + part + "}", value)
        return sink_of({**section, place: filled}, folder, database)

    tried = make("schema", "table")  # the other keys are checked
    return SinkMaker(kind, make, tried.url if isinstance(tried, PostgresSink) else None)


def _example(kind: str) -> str:
    return {"postgres": "{schema}.{table}", "bulk": "shop-{table}"}.get(kind, "lake/{schema}.{table}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def render(
    database: str,
    targets: Mapping[str, str],
    *,
    tube: str,
    host: str,
    port: int,
    include: Sequence[str],
    exclude: Sequence[str],
) -> str:
    """The text of a new file. `targets`: the URLs or folders of the downstreams, by name."""
    lines = ["[source]", f"tube = {json.dumps(tube)}", f"host = {json.dumps(host)}", f"port = {port}", "", "[tables]"]
    lines += [f"database = {json.dumps(database)}", f"include = {json.dumps(list(include))}"]
    lines += [f"exclude = {json.dumps(list(exclude))}"] if exclude else []
    for name, target in targets.items():
        lines += ["", f"[downstream.{name}]", *_target(target)]
    checkpoint = json.dumps(f"{tube}-checkpoint")
    return "\n".join([*lines, "", "[run]", 'engine = "local"', f"checkpoint = {checkpoint}", "trigger = 0", ""])


def named_targets(targets: Sequence[str]) -> dict[str, str]:
    """The targets of `--to` by name: the one that is given (`NAME=TARGET`), or else that of its kind."""
    found: dict[str, str] = {}
    for text in targets:
        given, _, rest = text.partition("=")
        name, target = (given, rest) if re.fullmatch(r"[A-Za-z0-9_]{1,20}", given) and rest else ("", text)
        name = name or _name_of(target, found)
        if name in found:
            raise UsageError(f"--to: two downstreams are called {name}; give them names: --to NAME=TARGET")
        found[name] = target
    return found


@contextmanager
def write_new(path: Path, text: str) -> Iterator[LocalConfig]:
    """Write a new file, and keep it if the block succeeds. Yields what it says.

    Raises:
        UsageError: there is a file of that name, or it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists; give another name, or remove it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    try:
        yield load_local(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _target(target: str) -> list[str]:
    scheme = urlsplit(target).scheme
    if scheme in ("postgresql", "postgres"):
        return ['kind = "postgres"', f"url = {json.dumps(target)}"]
    if scheme in ("http", "https"):
        return ['kind = "bulk"', f"url = {json.dumps(target)}", 'index = "{schema}.{table}"']
    kind, _, rest = target.partition(":")
    if kind in ("delta", "parquet") and rest:
        place = "uri" if kind == "delta" else "folder"
        return [f'kind = "{kind}"', f"{place} = {json.dumps(rest.rstrip('/') + '/{schema}.{table}')}"]
    raise UsageError(
        f"--to {target!r} is not a downstream; give postgresql://..., delta:FOLDER or delta:s3://..., parquet:FOLDER, "
        "or https://... of an index"
    )


def _name_of(target: str, taken: Mapping[str, str]) -> str:
    """A name for a downstream that has none."""
    scheme = urlsplit(target).scheme
    base = {"postgresql": "postgres", "http": "bulk", "https": "bulk"}.get(scheme, target.partition(":")[0])
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}{number}"
    return name
