"""The SQL text that makes lines of a stream's rows. Knows no connection.

Each statement checks that the table is still the table that the stream was loaded with. Why the name and the check
cannot lead to different tables: Postgres resolves the name in FROM first and locks that table (ACCESS SHARE) until the
statement ends. Then it resolves the same name for the check. To rename, move or drop a table needs a lock that
conflicts with ours, so the second resolution finds the locked table, or the check fails. Renaming a schema locks no
table: the two could differ unnoticed only if the schema is renamed and renamed back in the microseconds between.
Postgres analyses a cached statement again after each of these commands.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from replicad.postgres.literals import quote_ident, quote_literal
from replicad.postgres.statements import load_sql
from replicad.streams.chunks import MAX_ROW

MASTER: Final = "master"  # the writer of rows that name none, as in Synapse
MAX_INSTANCE: Final = 200  # characters of a writer's name
_CASES: Final = 16  # writers distinguished by comparison; beyond that the general form is cheaper
_VARHDRSZ: Final = 4  # Postgres adds it to the length of a varchar to get the type's modifier
_BLANKS: Final = str.maketrans(dict.fromkeys([*range(1, 33), 127], "_"))

Range = tuple[int, int]  # (after, upto]: ids above the first, up to the second


def wire_instance(name: str | None) -> str:
    """A writer's name as one word, as SQL's stream_instance() writes it.

    NULL and '' are `master`; white space and control characters become `_`, since they would break the line; the rest
    is cut at 200 characters. Names that become the same word are the same writer.
    """
    return (name or "").translate(_BLANKS)[:MAX_INSTANCE] or MASTER


@dataclass(frozen=True, slots=True)
class RowText:
    """The table of one stream and how its rows become lines. Names are unquoted, except `table`.

    `row`: the row expression, of `row_type` json, jsonb or text; None for the whole row as an object. `unique_ids`: no
    two rows have the same id, so `batch` need not be computed. `writers`: names that are likely to occur; they make
    lines cheaper and may be wrong. `table_oid`: the table that the name must lead to (None: not checked).
    `sequence_oid`: the sequence whose file must be `sequence_file` (None: not checked). `skipped`: ascending ids that
    are left out. `max_row`: bound of a line in bytes. `reader`: the function that runs statements as the owner of the
    table (postgres/owners.py); None if they run as our own role. `plain`: our role may lock the whole table, and the
    table has no partitions. `only`: a condition on the rows, called t.
    """

    number: int
    stream: str
    table: str
    id_column: str
    instance_column: str | None = None
    row: str | None = None
    row_type: str = "json"
    unique_ids: bool = False
    writers: tuple[str, ...] = ()
    schema: str = "replicad"
    table_oid: int | None = None
    sequence_oid: int | None = None
    sequence_file: int | None = None
    skipped: tuple[int, ...] = ()
    max_row: int = MAX_ROW
    reader: str | None = None
    plain: bool = False
    only: str | None = None

    @property
    def lock(self) -> str | None:
        """The statement that locks all that rows are read from, before their snapshot is taken; see
        `Connection.copy_out`. None: only the query itself does. LOCK TABLE costs nothing beside a read; but it needs
        SELECT on all columns, locks partitions that the query does not read, and leaves out what an expression reads.
        """
        expression = (self.row or "").lower()
        if not self.plain or "select" in expression or "table" in expression:
            return None
        return f"LOCK TABLE {self.table} IN ACCESS SHARE MODE"

    def range_sql(self, after: int, upto: int, limit: int | None = None) -> str:
        """The query for the first `limit` rows of (after, upto] of all writers, ascending by id: one linear stream."""
        return self._lines(after, upto, "true", limit)

    def vector_sql(self, ranges: Mapping[str, Range], others: Range | None = None, limit: int | None = None) -> str:
        """The query for a range per writer, ascending by id over all.

        Writers that are not named have the range `others`, or send nothing. `ranges` must not be empty, unless there
        are others.
        """
        spans = [*ranges.values(), *([] if others is None else [others])]
        after = min(low for low, _ in spans)
        upto = max(high for _, high in spans)
        if self.instance_column is None:
            after, upto = ranges.get(MASTER, (upto, upto))
            return self._lines(after, upto, "true", limit)
        return self._lines(after, upto, self._within(ranges, others), limit)

    def count_above(self, after: int, limit: int) -> str:
        """The query that counts the rows above an id, at most `limit`: to be a part of another statement."""
        return (
            self._look("rows_count")
            .replace("$1", str(int(after)))
            .replace("$2", str((1 << 63) - 1))
            .replace("$3", str(int(limit)))
        )

    def blocks_sql(self, after: int, upto: int, step: int, max_line: int) -> str:
        """The query for the rows of (after, upto] of all writers, ascending by id, in blocks of `step` ids.

        A block is the number of its rows, an end of line, and their lines (`chunks.lines_of_block`). Lines of more than
        `max_line` bytes may be cut off. Only if ids are unique.
        """
        assert self.unique_ids
        return self._filled(
            "rows_blocks", after, upto, max_line=max_line, row=self._row(one_line=False), step=int(step)
        )

    def _lines(self, after: int | str, upto: int | str, writers: str, limit: int | None) -> str:
        """The query; a bound that is no number is an expression, and no id is left out then."""
        return self._filled("rows_copy", after, upto, writers, limit="" if limit is None else f" LIMIT {int(limit)}")

    def _filled(
        self,
        name: str,
        after: int | str,
        upto: int | str,
        writers: str = "true",
        *,
        max_line: int | None = None,
        row: str | None = None,
        **others: object,
    ) -> str:
        return load_sql(name).format(
            head=self._head(),
            token=self._token(),
            row=row or self._row(),
            table=self.table,
            id=quote_ident(self.id_column),
            after=after,
            upto=upto,
            writers=writers if self.only is None else f"{self.only} AND {writers}",
            skip=self._skip(after, upto) if isinstance(after, int) and isinstance(upto, int) else "",
            same=self._same(),
            # One more than allowed, so that its reader finds it too long.
            cut=(self.max_row if max_line is None else min(max_line, self.max_row)) + 1 + _VARHDRSZ,
            retained=f"{quote_ident(self.schema)}.stream_retained({self.number}, {after})",
            **others,
        )

    def _look(self, name: str, skip: str = "") -> str:
        return load_sql(name).format(
            table=self.table,
            same=self._same(),
            skip=skip,
            id=quote_ident(self.id_column),
            instance=self._instance(),
            schema=quote_ident(self.schema),
        )

    def _same(self) -> str:
        """The condition that the name leads to the right table and that its ids still belong to the same rows.

        It is constant, so Postgres evaluates it once for each statement. By then the table is locked against TRUNCATE,
        and later commits are not visible. So all rows of a statement are of one generation.
        """
        if self.table_oid is None:
            return "true"
        found = f"{quote_literal(self.table)}::regclass::oid"
        same = f"{found} = {self.table_oid}::oid"
        if self.sequence_file is not None:
            same += f" AND pg_relation_filenode({self.sequence_oid}::oid) = {self.sequence_file}::oid"
        fails = f"{quote_ident(self.schema)}.stream_is_same({self.number}, {found}, {self.table_oid}::oid)"
        return f"CASE WHEN {same} THEN true ELSE {fails} END"

    def _skip(self, after: int, upto: int) -> str:
        """The condition that leaves out the skipped ids in the range; empty if there are none."""
        low, high = bisect_right(self.skipped, after), bisect_right(self.skipped, upto)
        if low >= high:
            return ""
        ids = ",".join(str(int(skipped)) for skipped in self.skipped[low:high])
        return f" AND t.{quote_ident(self.id_column)} <> ALL ('{{{ids}}}'::bigint[])"

    def _head(self) -> str:
        """The line before the token. A comparison with a known name costs a tenth of stream_instance()."""
        start = f"RDATA {self.stream} "
        if self.instance_column is None:
            return quote_literal(f"{start}{MASTER} ")
        general = f"{quote_literal(start)} || {self._instance()} || ' '"
        plain = list(islice((name for name in self.writers if wire_instance(name) == name), _CASES))
        cases = "".join(f" WHEN {quote_literal(name)} THEN {quote_literal(f'{start}{name} ')}" for name in plain)
        return f"CASE {self._raw_instance()}{cases} ELSE {general} END" if cases else f"({general})"

    def _token(self) -> str:
        column = f"t.{quote_ident(self.id_column)}"
        if self.unique_ids:
            return f"{column}::text"
        # A batch is consecutive and of one writer: it ends where the next row has another id or writer.
        line = f"OVER (ORDER BY {column})"
        same = f"lead({column}) {line} = {column}"
        if self.instance_column is not None:
            same += f" AND lead({self._instance()}) {line} = {self._instance()}"
        return f"CASE WHEN {same} THEN 'batch' ELSE {column}::text END"

    def _row(self, *, one_line: bool = True) -> str:
        """The row as JSON. Values of type json may contain ends of lines, which are replaced for `one_line`."""
        # The newline ends a comment at the end of the expression.
        text = "row_to_json(t.*)::text" if self.row is None else f"({self.row}\n)::text"
        if self.row is not None and self.row_type == "text":
            text = f"{quote_ident(self.schema)}.stream_json({text})"
        if one_line and (self.row is None or self.row_type != "jsonb"):
            text = rf"replace(replace({text}, E'\n', ' '), E'\r', ' ')"
        return text if self.row is None else f"coalesce({text}, 'null')"

    def _within(self, ranges: Mapping[str, Range], others: Range | None) -> str:
        column = f"t.{quote_ident(self.id_column)}"
        if is_one(ranges, others):
            return "true"
        if len(ranges) > _CASES:
            return condition(ranges, others, column, self._instance())
        cases = {name: f" WHEN {quote_literal(name)} THEN {within(column, span)}" for name, span in ranges.items()}
        rest = "false" if others is None else within(column, others)
        general = f"CASE {self._instance()}{''.join(cases.values())} ELSE {rest} END" if cases else rest
        plain = "".join(case for name, case in cases.items() if wire_instance(name) == name)
        return f"CASE {self._raw_instance()}{plain} ELSE {general} END" if plain else general

    def _raw_instance(self) -> str:
        """The unchanged column, compared byte by byte instead of by its collation."""
        return f't.{quote_ident(self.instance_column or "")}::text COLLATE "C"'

    def _instance(self) -> str:
        if self.instance_column is None:
            return quote_literal(MASTER)
        return f"{quote_ident(self.schema)}.stream_instance({self._raw_instance()})"


# SQL for a range of ids for each writer. Its cost per row does not grow with the number of writers.
#
# Few ranges are compared with lists of names, which Postgres hashes; many are looked up in an object of jsonb.

MAX_GROUPS = 4  # different ranges that are compared one after another


def within(column: str, span: Range) -> str:
    """The id is in the range; `column` is SQL."""
    return f"{column} > {int(span[0])} AND {column} <= {int(span[1])}"


def is_one(ranges: Mapping[str, Range], others: Range | None) -> bool:
    """Whether all writers, named or not, have the same range."""
    return all(span == others for span in ranges.values())


def condition(ranges: Mapping[str, Range], others: Range | None, column: str, instance: str) -> str:
    """The row's id is in the range of its writer; writers that are not named have the range `others`, or no rows.

    `column` is SQL for the id, `instance` for the writer's name.
    """
    groups: defaultdict[Range, list[str]] = defaultdict(list)
    for name, span in ranges.items():
        groups[span].append(name)
    if len(groups) > MAX_GROUPS:
        return _looked_up(ranges, others, column, instance)
    cases = "".join(
        f" WHEN {instance} = ANY ({_array(names)}) THEN {within(column, span)}" for span, names in groups.items()
    )
    return f"CASE{cases} ELSE {'false' if others is None else within(column, others)} END"


def _array(names: list[str]) -> str:
    quoted = ",".join('"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"' for name in names)
    return quote_literal("{" + quoted + "}") + "::text[]"


def _looked_up(ranges: Mapping[str, Range], others: Range | None, column: str, instance: str) -> str:
    bounds = []
    for at, compare in enumerate((">", "<=")):
        known = quote_literal(json.dumps({name: span[at] for name, span in ranges.items()}, ensure_ascii=False))
        rest = "NULL" if others is None else str(int(others[at]))
        bounds.append(f"{column} {compare} coalesce(({known}::jsonb -> {instance})::bigint, {rest})")
    return " AND ".join(bounds)
