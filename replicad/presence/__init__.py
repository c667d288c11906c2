"""Presence: workers report which users are online, daemons write this as one stream.

`reporter` is the worker's side; `roster`, `user_ips` and `service` are the daemon's; `repository` reads and writes
Postgres.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported

if TYPE_CHECKING:
    from replicad.presence.commands import ClearUserSync, UserIp, UserSync
    from replicad.presence.reporter import PresenceReporter, ReporterStatistics, open_presence

__all__ = [
    "ClearUserSync",
    "PresenceReporter",
    "ReporterStatistics",
    "UserIp",
    "UserSync",
    "open_presence",
]

__getattr__ = exported(
    __name__,
    {
        **dict.fromkeys(("ClearUserSync", "UserIp", "UserSync"), "commands"),
        **dict.fromkeys(("PresenceReporter", "ReporterStatistics", "open_presence"), "reporter"),
    },
)
