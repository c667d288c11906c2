"""The daemon's connections to Postgres: one pool for each purpose, so that slow work in one delays no other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import structlog

from replicad.config.limits import WAIT_MAX, Limits
from replicad.daemon.files import FileBudget, plan_files
from replicad.postgres.bridge import Database, Fence, open_database

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
