"""SQL for a range of ids for each writer. Its cost per row does not grow with the number of writers.

Few ranges are compared with lists of names, which Postgres hashes; many are looked up in an object of jsonb.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping

from replicad.postgres.literals import quote_literal

MAX_GROUPS = 4  # different ranges that are compared one after another

Range = tuple[int, int]  # (after, upto]: ids above the first, up to the second


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
