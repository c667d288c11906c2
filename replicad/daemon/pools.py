"""The daemon's connections to Postgres: one pool for each purpose, so that slow work in one delays no other.

The limit of open files allows so many clients beside them (`plan_files`).
"""

from __future__ import annotations

import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import structlog

from replicad.config.limits import WAIT_MAX, Limits
from replicad.errors import EnvironmentRefused
from replicad.postgres.bridge import Database, Fence, open_database

# How many clients the limit of open files allows, computed at the start.
#
# Clients get what the limit leaves beside the connections to Postgres and the daemon's own files.

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


CONNECT_TIMEOUT = 10.0  # seconds; a server that is there answers in tenths of a second
POSITION_CONNECTIONS = 2  # held by the poller and the bell
STREAM_CONNECTIONS = 4  # of all streams: to read the registry, to copy new rows, to note positions
STREAM_LOCK_TIMEOUT = 0.7  # seconds; below `deadlock_timeout` (1 s), so that who restores a dump is not the victim
HOUSEKEEPING_CONNECTIONS = 6  # two for each of two backfills, looks at triggers and for late rows, notes
OWN_CONNECTIONS = 3  # presence, renewals of leases, the role of the publisher to Redis: short statements
RELAY_CONNECTIONS = 2  # one listens, the other sends
ACK_CONNECTIONS = 4  # they only delete from tubes; their locks on tubes do not hold the positions of tubes back

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Pools:
    """`short`: short requests of clients. `streams`: new rows and the registry. `catchups`: old rows of streams.
    `tubes`: pods for clients. `housekeeping`: what can wait. `own`: what must not wait, not even for a standby.

    In `short`, `tubes` and `acks` a commit waits for what Postgres is set to wait for: a client acts on the answer. In
    all others it waits for the local disk, and for no standby.
    """

    positions: Database
    short: Database
    streams: Database
    catchups: Database
    tubes: Database
    acks: Database
    housekeeping: Database
    own: Database
    relays: Database


@asynccontextmanager
async def open_pools(url: str, limits: Limits) -> AsyncIterator[Pools]:
    """Open all pools. Raises what `open_database` raises."""
    usual = partial(
        open_database,
        url,
        statement_timeout=limits.statement_timeout,
        connect_timeout=CONNECT_TIMEOUT,
        fence=Fence(),
    )
    local = partial(usual, local_commits=True)
    async with (
        local(size=POSITION_CONNECTIONS, application_name="replicad positions") as positions,
        usual(size=limits.database_connections, application_name="replicad") as short,
        local(
            size=STREAM_CONNECTIONS, application_name="replicad streams", lock_timeout=STREAM_LOCK_TIMEOUT
        ) as streams,
        local(size=limits.catchup_connections, application_name="replicad catch-up") as catchups,
        usual(
            size=limits.tube_connections,
            application_name="replicad tubes",
            wait_timeout=WAIT_MAX,
            by_index=True,
        ) as tubes,
        usual(size=ACK_CONNECTIONS, application_name="replicad ack", identify=True) as acks,
        local(size=HOUSEKEEPING_CONNECTIONS, application_name="replicad housekeeping") as housekeeping,
        local(size=OWN_CONNECTIONS, application_name="replicad own") as own,
        local(size=RELAY_CONNECTIONS, application_name="replicad relay") as relays,
    ):
        yield Pools(positions, short, streams, catchups, tubes, acks, housekeeping, own, relays)


def most_connections(limits: Limits) -> int:
    """How many connections to Postgres all pools may have together."""
    own = POSITION_CONNECTIONS + STREAM_CONNECTIONS + HOUSEKEEPING_CONNECTIONS + ACK_CONNECTIONS
    own += OWN_CONNECTIONS + RELAY_CONNECTIONS
    return own + limits.database_connections + limits.catchup_connections + limits.tube_connections


def plan_connections(limits: Limits, others: int = 0) -> FileBudget:
    """How many clients the limit of open files allows; a warning is logged if that is below `max_connections`.

    `others`: connections that are no clients and none to Postgres.
    """
    budget = plan_files(limits.max_connections, most_connections(limits), others)
    if budget.connections < limits.max_connections:
        log.warning(
            "connections_limited",
            open_files=budget.limit,
            needed=budget.needed,
            max_connections=limits.max_connections,
            possible=budget.connections,
            remedy="raise the hard limit of open files (ulimit -Hn, LimitNOFILE=), or lower --max-connections",
        )
    return budget
