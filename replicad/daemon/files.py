"""How many clients the limit of open files allows, computed at the start.

Clients get what the limit leaves beside the connections to Postgres and the daemon's own files.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from replicad.config.limits import Limits
from replicad.errors import EnvironmentRefused

EXTRA_CLIENTS = 32  # clients beyond the cap: in their TLS handshake, or being sent too_many_connections
SPARE = 16  # the programs that start Postgres, source files read for a traceback, the ready file
DATABASE_SHARE = 2  # for each connection to Postgres: itself, and another that cancels its statement
MAX_RAISED = 1 << 20  # the limit is raised to this even if less is needed; some systems allow a thousand times more
UNKNOWN_OPEN = 64  # assumed number of open files at the start, where the system does not report it


def guest_files(limits: Limits) -> int:
    """How many connections HTTP may have that are neither sessions nor in their TLS handshakes."""
    return min(limits.max_newcomers, limits.max_connections) + limits.http_connections + EXTRA_CLIENTS


@dataclass(frozen=True, slots=True)
class FileBudget:
    """`limit`: open files that are allowed. `needed`: those not for clients. `connections`: possible clients."""

    limit: int
    needed: int
    connections: int


def plan_files(wanted: int, database_connections: int, others: int = 0) -> FileBudget:
    """Raise this process's soft limit as far as its hard limit allows; returns the resulting budget.

    Raises:
        EnvironmentRefused: not even one client could connect.
    """
    needed = _open_now() + DATABASE_SHARE * database_connections + EXTRA_CLIENTS + others + SPARE
    limit = _raise_limit(needed + wanted)
    if limit <= needed:
        raise EnvironmentRefused(
            f"this process may open {limit} files and needs {needed} before the first client connects: raise the hard "
            "limit (ulimit -Hn, or LimitNOFILE= of systemd), or lower --database-connections, --catchup-connections "
            "and --tube-connections"
        )
    return FileBudget(limit, needed, min(wanted, limit - needed))


def _raise_limit(total: int) -> int:
    soft, hard = (_finite(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    goal = min(hard, max(total, MAX_RAISED))
    if goal <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    except (OSError, ValueError):  # macOS has another limit behind this one
        return soft
    return goal


def _finite(limit: int) -> int:
    return 1 << 31 if limit == resource.RLIM_INFINITY else limit


def _open_now() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return UNKNOWN_OPEN
