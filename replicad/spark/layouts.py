"""Find the tables of a pipeline and what their columns are. Runs on the driver, before a query starts.

A migration goes from shard to shard. So all tables are looked at: of the types of a column the widest counts, a column
that was renamed in some tables is read under both names, and a new one is NULL where it is not yet.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from replicad.errors import UsageError
from replicad.spark.database import patiently
from replicad.spark.reading_columns import Column, Reading, read_types
from replicad.spark.survey import Known, survey_tables
from replicad.spark.tables import Layout, Source, TableForm, TableRule

RESERVED = "_"  # the first character of replicad's own columns: _shard, _seq
_LIST_TABLES = """
SELECT format('%I.%I', n.nspname, c.relname), format('%I', c.relname), pg_catalog.pg_table_is_visible(c.oid)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a pipeline wants of its tables: the id column, and `columns` (None: all of any table).

    `reading` has the rules for values. `known` is what the checkpoint knows of the columns. `renamed` has the new names
    of columns that are being renamed in the tables, by the names that they keep downstream. `following`: a column that
    a table gets later must be noticed.
    """

    id: str
    columns: Sequence[str] | None = None
    reading: Reading = field(default_factory=Reading)
    known: Known = field(default_factory=Known)
    renamed: Mapping[str, str] = field(default_factory=dict)
    following: bool = False


@dataclass(frozen=True, slots=True)
class _Form:
    """Tables of one rule that have the same columns: `names` has those in the tables by those downstream."""

    tables: tuple[str, ...]
    names: Mapping[str, str]
    types: Mapping[str, str]  # by the names in the tables


def find_layout(url: str, rules: Sequence[TableRule], wanted: Wanted) -> Layout:
    """Look up the tables and choose the columns. `url` is the database of the rules without one.

    Raises:
        UsageError: a table or column is missing or cannot be used; the message lists those that exist.
        DatabaseError: Postgres cannot be used.
    """
    looked = [(rule, *_look(rule.database or url, rule, wanted)) for rule in rules]
    forms = [form for _, _, found in looked for form in found]
    there = list(dict.fromkeys(name for form in forms for name in form.names))
    _check_columns(wanted.columns, there, rules)
    before = [name for name in wanted.known.columns if name in there]  # columns keep their places downstream
    order = list(dict.fromkeys([wanted.id, *before, *(there if wanted.columns is None else wanted.columns)]))
    by_rule = [(rule, found) for rule, _, found in looked]
    widest = {name: _widest(name, by_rule, wanted.reading, wanted.known.types.get(name)) for name in order}
    schema = pa.schema([(name, pa.int64() if name == wanted.id else widest[name][1].kind) for name in order])
    sources, whole = [], set(wanted.known.whole)
    for rule, first, found in looked:
        strict = wanted.known.whole if wanted.known.columns else first | set(wanted.columns or ())
        whole |= strict | frozenset(there).intersection(*(form.names for form in found))
        sources.append(_source(rule, found, order, {name: type for name, (type, _) in widest.items()}, strict, wanted))
    known = Known(tuple(order), frozenset(whole), {name: type for name, (type, _) in widest.items()})
    types = {name: column.type for name, (_, column) in widest.items() if column.type is not None and name != wanted.id}
    return Layout(wanted.id, schema, tuple(sources), types, known)


def _look(url: str, rule: TableRule, wanted: Wanted) -> tuple[frozenset[str], list[_Form]]:
    """The columns of the first table of a rule, and the forms that its tables have."""
    tables = _tables_of(rule, patiently(url, list_tables, patience=10))
    found = []
    for alike in patiently(url, functools.partial(survey_tables, tables=tables), patience=10):
        types = patiently(url, functools.partial(read_types, table=alike[0]), patience=10)
        names = _named(types, wanted.renamed)
        _check_id(types, names, wanted.id, alike[0])
        found.append(_Form(alike, names, types))
    return frozenset(found[0].names) if found else frozenset(), found


def _named(types: Iterable[str], renamed: Mapping[str, str]) -> dict[str, str]:
    """The names in a table by those downstream. Of a column that is there under both its names, the old one counts."""
    found = {name: name for name in types}
    for name, newer in renamed.items():
        if newer in found:
            del found[newer]
            found.setdefault(name, newer)
    return found


def _widest(
    name: str, looked: Iterable[tuple[TableRule, Sequence[_Form]]], reading: Reading, known: str | None
) -> tuple[str, Column]:
    """Of the types that a column has, and the one that is `known` of it, that which holds the values of all; and how it
    is read.

    If none does, the first of a rule counts: values that fit are converted. Two rules must agree.
    """
    found: tuple[str, Column] | None = None
    for rule, forms in looked:
        types = [form.types[form.names[name]] for form in forms if name in form.names]
        of_rule: tuple[str, Column] | None = None
        for type in types:
            column = reading.column(name, type)
            if of_rule is None or column.is_wider(of_rule[1]):
                of_rule = type, column
        if found is None or of_rule is None:
            found = found or of_rule
        elif of_rule[1].is_wider(found[1]):
            found = of_rule
        elif of_rule[1].kind != found[1].kind and not found[1].is_wider(of_rule[1]):
            raise UsageError(
                f"column {name} is {found[0]} in one table and {of_rule[0]} in {rule.table}; "
                "list the columns that you need, or cast it in a view"
            )
    assert found is not None
    if known is not None:
        before = reading.column(name, known)
        if before.is_wider(found[1]) and not found[1].is_wider(before):
            return known, before
    return found


def _source(  # noqa: PLR0917 - all of it is known to the caller alone
    rule: TableRule,
    forms: Sequence[_Form],
    order: Sequence[str],
    types: Mapping[str, str],
    strict: Collection[str],
    wanted: Wanted,
) -> Source:
    """How each table of a rule is read. A table that lacks a column of `strict` must not give NULL for it."""

    every = dict(item for form in reversed(forms) for item in form.types.items())
    of_rule = _named(every, wanted.renamed)

    def read(form: _Form) -> TableForm:
        must = {name for name in strict if name in of_rule}
        names = {name: form.names.get(name, name) for name in order if name in form.names or name in must}
        columns = {name: wanted.reading.column(in_table, types[name]) for name, in_table in names.items()}
        known = frozenset(form.types) | set(names.values()) if wanted.following else frozenset()
        return TableForm(names[wanted.id], columns, known)

    whole = read(_Form((), of_rule, every))
    others = {}
    for form in forms:
        made = read(form)
        if (made.id, made.columns, made.known) != (whole.id, whole.columns, whole.known):
            others.update({shard: made for shard in map(rule.shard_of, form.tables) if shard is not None})
    examples = [shard for form in forms if (shard := rule.shard_of(form.tables[0])) is not None]
    return Source(rule, whole, others, tuple(examples))


def _check_id(types: Mapping[str, str], names: Mapping[str, str], id_column: str, table: str) -> None:
    if id_column not in names:
        raise UsageError(f"table {table} has no column {id_column!r}; its columns are {', '.join(types)}")
    if not pa.types.is_integer(Reading().column(id_column, types[names[id_column]]).kind):
        raise UsageError(f"column {id_column} of {table} is not an integer; ids of a tube are bigint")


def _check_columns(columns: Sequence[str] | None, there: Collection[str], rules: Sequence[TableRule]) -> None:
    missing = [name for name in columns or () if name not in there]
    if missing:
        tables = ", ".join(rule.table for rule in rules)
        raise UsageError(f"no column {missing[0]!r} in {tables}; there are {', '.join(sorted(there))}")
    ours = [name for name in (there if columns is None else columns) if name.startswith(RESERVED)]
    if ours:
        raise UsageError(
            f"column {ours[0]!r}: names that begin with {RESERVED!r} are reserved for replicad's own columns; "
            "list the columns that you need without it, or rename it in a view"
        )


def _tables_of(rule: TableRule, listed: Sequence[tuple[str, str, bool]]) -> list[str]:
    """The rule's tables, in the order of their shards."""
    names = {full for full, _, _ in listed} | {short for _, short, visible in listed if visible}
    if "{" not in rule.table and rule.table in names:
        return [rule.table]
    shards = [shard for shard in map(rule.shard_of, names) if shard is not None]
    if shards:
        return [rule.of(shard) for shard in sorted(shards)]
    base = rule.table.rpartition(".")[2].strip('"')
    near = sorted(full for full, _, _ in listed if base in full)[:5]
    raise UsageError(
        f"no table matches {rule.table} for shards {rule.shards.text}; "
        + (f"there are {', '.join(near)}" if near else "is it the right database, and may this user see it?")
    )


def list_tables(driver: Any) -> list[tuple[str, str, bool]]:
    """The tables and views of a database: name with schema, name alone, and whether that is enough to find it."""
    with driver.cursor() as cursor:
        cursor.execute(_LIST_TABLES)
        return list(cursor.fetchall())
