"""The SQL that makes the roles which replicad needs, with the least rights: `replicad sql roles` prints it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from replicad.postgres.literals import quote_ident, quote_literal
from replicad.postgres.statements import load_sql


@dataclass(frozen=True, slots=True)
class Roles:
    """Names of roles. `daemon` installs and serves; `owners` own the tables of streams and tubes; `writers` write them;
    `operators` look at what replicad knows. `replication`: the daemon hears of commits by the server's WAL.
    """

    daemon: str = "replicad"
    owners: Sequence[str] = ()
    writers: Sequence[str] = ()
    operators: Sequence[str] = ()
    replication: bool = False


def script(roles: Roles, stream_schema: str = "replicad", tube_schema: str = "tube") -> str:
    """The SQL for psql or any other client, in one transaction. It may be repeated.

    Raises ValueError for a name that is empty or has a NUL.
    """
    home = quote_ident(stream_schema)
    everybody = list(dict.fromkeys([roles.daemon, *roles.owners, *roles.writers, *roles.operators]))
    for name in (*everybody, tube_schema):
        quote_ident(name)
    values = {
        "daemon": quote_literal(roles.daemon),
        "all": _array(everybody),
        "owners": _array(roles.owners),
        "writers": _array(roles.writers),
        "operators": _array(roles.operators),
        "schemas": _array([stream_schema, tube_schema]),
        "reports": _array([f"{home}.{name}(timestamptz)" for name in ("stream_troubles", "stream_daemons")]),
        "stream_table": quote_literal(f"{home}.stream"),
        "cache_write": quote_literal(f"{home}.cache_write(text, jsonb)"),
    }
    wanted = {
        "roles_replication": roles.replication,
        "roles_writers": bool(roles.writers),
        "roles_operators": bool(roles.operators),
    }
    names = ["roles", *(name for name, is_wanted in wanted.items() if is_wanted)]
    parts = [re.sub(r"\{(\w+)\}", lambda found: values[found[1]], load_sql(name)) for name in names]
    return "BEGIN;\n" + "\n".join(parts) + "COMMIT;\n"


def _array(names: Sequence[str]) -> str:
    return f"ARRAY[{', '.join(map(quote_literal, names))}]::text[]"
