"""`replicad tubes pg-tube`: from pg-tube to replicad, beside programs that write (docs/pg-tube.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click

from replicad.errors import TubeRefused
from replicad.terminal.command import ReplicadGroup, json_option, option
from replicad.terminal.output import echo, print_rows
from replicad.tubes.cli.islands import Tubes, island_options, on_islands, with_island

_schema = option(
    "--pg-schema", metavar="SCHEMA", default="tube", show_default=True, help="Schema in which pg-tube is installed."
)
_names = click.argument("names", metavar="[TUBE...]", nargs=-1)


@click.group("pg-tube", cls=ReplicadGroup, short_help="Come from pg-tube, beside programs that write.")
def group() -> None:
    """Come from pg-tube, beside programs that write.

    \b
      replicad tubes pg-tube mirror     records in tubes here what pg-tube records
      replicad tubes pg-tube check      what is mirrored, and the next step
      replicad tubes pg-tube move       attaches the tables here, not there

    replicad needs a schema of its own, for example --tube-schema replicad_tube.
    """


@group.command("check")
@_names
@_schema
@json_option
@island_options
def check(names: tuple[str, ...], pg_schema: str, as_json: bool, **options: Any) -> None:
    """Show each tube of pg-tube: its tables there, whether it is mirrored here, and the next step."""

    async def work(tubes: Tubes) -> list[dict[str, Any]]:
        here = {row["tube"]: row for row in await tubes.rows("tube_list")}
        return [
            {
                "tube": name,
                "tables": sum(row["tbl"] is not None for row in rows),
                "mirror": state,
                "differs": _difference(rows[0], here.get(name)),
                "next": _next_step(name, rows, state),
            }
            for name, rows, state in await _of_pg_tube(tubes, pg_schema, names)
        ]

    rows = with_island(on_islands(options, work))
    columns = [*(["island"] if rows and "island" in rows[0] else []), "tube", "tables", "mirror", "differs", "next"]
    print_rows(columns, rows, as_json=as_json, nothing=f"pg-tube in schema {pg_schema} has no tubes")


@group.command("mirror")
@_names
@_schema
@option("--end", is_flag=True, help="End the mirror. The tube and its pods stay.")
@island_options
def mirror(names: tuple[str, ...], pg_schema: str, end: bool, **options: Any) -> None:
    """Record in a tube here what pg-tube records in its TUBE (default: in each of its tubes), touches by hand included.

    A tube of the same name, partitions and predicate is created if there is none. The pods that wait in TUBE are
    copied. Writers wait for a moment, as for `attach`. Nothing changes for the workers of pg-tube.
    """

    async def work(tubes: Tubes) -> list[str]:
        said = []
        here = {row["tube"] for row in await tubes.rows("tube_list")}
        for name, rows, state in await _of_pg_tube(tubes, pg_schema, names):
            source = rows[0]["source"]
            if end:
                await tubes.change(f"end the mirror of {source}", "tube_mirror_end", name, source)
                said.append(f"{source} is mirrored no more")
            elif state == "complete":
                said.append(f"{source} is mirrored already")
            else:
                if name not in here:
                    shape = rows[0]["partitions"], rows[0]["predicate"]
                    await tubes.change(f"tube {name}", "tube_ensure_exists", name, *shape)
                upto = await tubes.change(f"mirror {source}", "tube_mirror", name, source)
                copied = await tubes.value("tube_mirror_copy", name, source, upto)
                said.append(
                    f"{source} is mirrored in {tubes.schema}.{name}; {copied:,} pods that waited there were copied"
                )
        return said

    for _, said in on_islands(options, work, statement_timeout=None):
        for line in said:
            echo(line)


@group.command("move")
@_names
@_schema
@island_options
def move(names: tuple[str, ...], pg_schema: str, **options: Any) -> None:
    """Attach the tables of TUBE (default: of all tubes) here, and detach them from pg-tube.

    Each table is moved in one transaction, with all tubes that it is attached to, so no write is missed or recorded
    twice. Its function {table}_touch is replaced by the one of replicad.
    """

    async def work(tubes: Tubes) -> list[str]:
        found = await _of_pg_tube(tubes, pg_schema, names)
        tables = dict.fromkeys(str(row["tbl"]) for _, rows, _ in found for row in rows if row["tbl"] is not None)
        for table in tables:
            await tubes.change(f"move {table}", "tube_move", pg_schema, table)
        return list(tables)

    for _, moved in on_islands(options, work):
        for table in moved:
            echo(f"{table} is attached here, and no more to pg-tube")
        if not moved:
            echo("no table is attached to pg-tube")


async def _of_pg_tube(
    tubes: Tubes, pg_schema: str, names: Iterable[str]
) -> list[tuple[str, list[Mapping[str, Any]], str | None]]:
    """The tubes of pg-tube, each with a row for each table, and the state of its mirror. Raises TubeRefused."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in await tubes.rows("tube_pg_tube", pg_schema):
        found.setdefault(row["tube"], []).append(row)
    absent = [name for name in names if name not in found]
    if absent:
        raise TubeRefused(
            f"pg-tube in schema {pg_schema} has no tube {absent[0]}; it has: {', '.join(found) or 'none'}"
        )
    chosen = list(names) or list(found)
    return [
        (name, found[name], await tubes.value("tube_mirror_state", name, found[name][0]["source"])) for name in chosen
    ]


def _difference(there: Mapping[str, Any], here: Mapping[str, Any] | None) -> str | None:
    if here is None:
        return None
    differs = [
        f"{what} {here[what]!r} here, {there[what]!r} there"
        for what in ("partitions", "predicate")
        if here[what] != there[what]
    ]
    return "; ".join(differs) or None


def _next_step(name: str, rows: list[Mapping[str, Any]], state: str | None) -> str:
    if state != "complete":
        return f"replicad tubes pg-tube mirror {name}"
    if any(row["tbl"] is not None for row in rows):
        return f"stop its workers there, start workers here, then: replicad tubes pg-tube move {name}"
    return f"let programs touch by the functions here, then: replicad tubes pg-tube mirror --end {name}"
