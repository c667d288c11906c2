"""docs/types.md is true: every type and its extreme values arrive as the page says, and nothing is changed silently."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import types_sent as sent
from helpers import psql

from replicad.spark.columns import LIMITS, NULL, PARK, ColumnType
from replicad.spark.database import forget

NUMBERS = {
    "date": "{v} - '1970-01-01'::date",
    "timestamp without time zone": "(extract(epoch from {v}) * 1000000)::bigint",
    "timestamp with time zone": "(extract(epoch from {v}) * 1000000)::bigint",
    "bytea": "encode({v}, 'hex')",
    "real": "{v}::text",
    "double precision": "{v}::text",
    "oid": "{v}::bigint",
    "money": "{v}::numeric::text",
    **dict.fromkeys(("boolean", "smallint", "integer", "bigint", "text", "character"), "{v}"),
}  # what Arrow stores, calculated by Postgres; of all others it is the text


@pytest.fixture
def url(database_url: str) -> Iterator[str]:
    yield database_url
    forget(database_url)


def stored_by_rights(url: str, cases: list[sent.Case]) -> dict[int, Any]:
    parts = []
    for case in cases:
        kind = ColumnType.parse(case.type)
        form = NUMBERS.get(kind.name, "{v}::text")
        one = form.format(v=case.column)
        if kind.is_list and kind.name in NUMBERS and kind.name != "money":
            each = form.format(v="e")
            elements = f"unnest({case.column}) WITH ORDINALITY u(e, n)"
            one = f"coalesce((SELECT json_agg({each} ORDER BY n) FROM {elements}), '[]')"
        elif kind.is_list:
            one = f"{case.column}::text"
        parts.append(f"SELECT id, to_json({one}) FROM every WHERE id = {case.id}")
    lines = psql(url, "SET timezone = 'UTC';" + ";".join(parts)).splitlines()
    return {int(number): json.loads(text) for number, _, text in (line.partition("|") for line in lines)}


def same(kind: str, stored: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(stored) == len(expected) and all(map(same, [kind] * len(stored), stored, expected))
    if isinstance(stored, bytes):
        return stored.hex() == expected
    if isinstance(stored, float):
        wanted = float(expected)
        if kind == "real" and math.isfinite(wanted):
            return math.isclose(stored, wanted, rel_tol=1e-7) or abs(stored - wanted) < 1e-45
        return repr(stored) == repr(wanted)
    return bool(stored == expected)


def test_every_value_of_every_type_arrives_as_the_page_says(url: str, tmp_path: Path) -> None:
    cases = sent.make_table(url)
    lake = sent.into_parquet(url, cases, tmp_path / "lake", PARK)
    delta = sent.into_delta(url, cases, tmp_path / "delta", PARK)
    warehouse = sent.into_postgres(url, cases, PARK)
    index = sent.into_index(url, cases, PARK)
    assert (delta.types, delta.parked) == (lake.types, lake.parked)
    held = [case for case in cases if case.id not in lake.parked]
    rights = stored_by_rights(url, held)
    changed = [
        (case, arrived.values[case.id], rights[case.id])
        for case in held
        for arrived in (lake, delta)
        if not same(case.type, arrived.values[case.id], rights[case.id])
    ]
    assert changed == []
    assert warehouse.parked == {}
    texts = {case.id: case.text for case in cases if case.type != "money"}
    assert {id_: warehouse.values[id_] for id_ in texts} == texts
    shown = [json.dumps(case.text) for case in cases]
    finite = {how: sent.into_index(url, cases, how) for how in (NULL, LIMITS)}
    rows = [
        "| type | Parquet, Delta, a class | Postgres | index, JSON |",
        "|---|---|---|---|",
        *(f"| {kind} | {lake.types[kind]} | {warehouse.types[kind]} | {index.types[kind]} |" for kind in sent.VALUES),
        "",
        "| value | Parquet, Delta, a class | Postgres | index, JSON |",
        "|---|---|---|---|",
    ]
    for case, text in zip(cases, shown, strict=True):
        if is_special(case, index):
            to_lake = sent.PARKED if case.id in lake.parked else "unchanged"
            to_index = sent.PARKED if case.id in index.parked else f"`{json.dumps(index.values[case.id])}`"
            rows.append(f"| {case.type} `{text}` | {to_lake} | unchanged | {to_index} |")
    rows += ["", '| value | `out_of_range = "null"` | `out_of_range = "limits"` |', "|---|---|---|"]
    for case, text in zip(cases, shown, strict=True):
        if case.id in index.parked and case.id in finite[NULL].values:
            forms = [f"`{json.dumps(finite[how].values[case.id])}`" for how in (NULL, LIMITS)]
            rows.append(f"| {case.type} `{text}` | {' | '.join(forms)} |")
    head, begin, rest = sent.PAGE.read_text(encoding="utf-8").partition("<!-- table -->\n")
    page = f"{head}{begin}\n{chr(10).join(rows)}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    if sent.WRITE:
        sent.PAGE.write_text(page, encoding="utf-8")
    assert sent.PAGE.read_text(encoding="utf-8") == page, "make docs/types.md anew, see types_sent.py"


def is_special(case: sent.Case, index: sent.Arrived) -> bool:
    if case.id in index.parked:
        return True
    found = index.values[case.id]
    return found is None or (isinstance(found, list) and "NaN" in case.text)
