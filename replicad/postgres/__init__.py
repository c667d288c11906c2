"""Postgres: the bridge to the driver, the embedded server, the installer of SQL parts, and positions.

Nothing here knows clients, commands on the wire or Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database, open_database
    from replicad.postgres.embedded import embedded_postgres

__all__ = [
    "Database",
    "embedded_postgres",
    "open_database",
]

__getattr__ = exported(
    __name__,
    {
        **dict.fromkeys(("Database", "open_database"), "bridge"),
        "embedded_postgres": "embedded",
    },
)
