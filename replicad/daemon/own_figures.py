"""The figures of the daemon itself: the database, its connections to it, clients, troubles, failures."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from replicad.config.limits import Limits
from replicad.daemon.figures import COUNTER, GAUGE, Detail, Family, FigureQuery, Obstacle, Sample
from replicad.daemon.hub import Hub
from replicad.daemon.poller import Poller
from replicad.daemon.pools import Pools
from replicad.daemon.relay import Relay
from replicad.daemon.troubles import DATABASE, Troubles
from replicad.errors import DatabaseUnavailable
from replicad.postgres.bridge import Database
from replicad.postgres.wal import WalListener
from replicad.protocol.connection import CloseReason

LATELY = 10.0  # seconds; a poll is made every two seconds at least

DATABASE_UP = Family("replicad_database_up", GAUGE, "1 if Postgres answered a poll lately, else 0.")
OUTAGE = Family("replicad_database_outage_seconds", GAUGE, "Seconds since Postgres answered last; 0 while it answers.")
POLLS = Family("replicad_database_polls_total", COUNTER, "Polls of positions that Postgres answered.")
POLL_FAILURES = Family("replicad_database_poll_failures_total", COUNTER, "Polls of positions that failed.")
POOL_SIZE = Family("replicad_pool_size", GAUGE, "The most connections of a pool to Postgres.", ("pool",))
POOL = Family("replicad_pool_connections", GAUGE, "Connections of a pool: state busy or idle.", ("pool", "state"))
POOL_WAITING = Family("replicad_pool_waiting", GAUGE, "Tasks that wait for a connection of a pool.", ("pool",))
POOL_LOST = Family("replicad_pool_connections_lost_total", COUNTER, "Connections that were lost.", ("pool",))
POOL_STATEMENTS = Family("replicad_pool_statements_total", COUNTER, "Statements that were sent.", ("pool",))
CONNECTIONS = Family(
    "replicad_connections",
    GAUGE,
    "Connections of clients: state known, newcomer (no valid command yet) or handshake (TLS under way).",
    ("state",),
)
CONNECTIONS_LIMIT = Family("replicad_connections_limit", GAUGE, "The most connections of clients.")
ACCEPTED = Family("replicad_connections_accepted_total", COUNTER, "Connections of clients that were accepted.")
REFUSED = Family("replicad_connections_refused_total", COUNTER, "Connections that were refused: the limit was reached.")
CLOSED = Family("replicad_connections_closed_total", COUNTER, "Connections that ended, by reason.", ("reason",))
SENT = Family("replicad_sent_bytes_total", COUNTER, "Bytes that the sockets of clients have taken.")
UNFINISHED = Family("replicad_unfinished_line_bytes", GAUGE, "Memory for unfinished lines of all clients.")
TROUBLES = Family("replicad_troubles", GAUGE, "Present troubles, by the kind of the faulty part.", ("kind",))
FAILURES = Family(
    "replicad_failures_total", COUNTER, "Failures, by the kind of what failed, the work and the error.",
    ("kind", "cause", "code"),
)  # fmt: skip
RELAY_REFUSED = Family(
    "replicad_relay_refused_total", COUNTER,
    "Refused on the daemons' channel: messages that are unsigned, forged (not by our key), repeated or old, and lines.",
    ("reason",),
)  # fmt: skip
SERVICE_FAILURES = Family("replicad_service_failures_total", COUNTER, "Failures of each service.", ("service",))
FOLDER_SIZE = Family("replicad_data_folder_size_bytes", GAUGE, "Size of the disk below the embedded Postgres.")
FOLDER_FREE = Family("replicad_data_folder_free_bytes", GAUGE, "Bytes of it that are free.")

KINDS = ("stream", "tube", "service", "session", DATABASE)  # of troubles that are always shown, with 0
OF_ONE = {
    kind: Family(
        f"replicad_{kind}_trouble",
        GAUGE,
        f"1 for each kind of present troubles of a {kind}, also where it is served; missing without one.",
        (kind, "code"),
    )
    for kind in ("stream", "tube")
}
FAMILIES = (
    DATABASE_UP, OUTAGE, POLLS, POLL_FAILURES, POOL_SIZE, POOL, POOL_WAITING, POOL_LOST, POOL_STATEMENTS,
    CONNECTIONS, CONNECTIONS_LIMIT, ACCEPTED, REFUSED, CLOSED, SENT, UNFINISHED, TROUBLES, *OF_ONE.values(), FAILURES,
    RELAY_REFUSED, SERVICE_FAILURES, FOLDER_SIZE, FOLDER_FREE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OwnFigures:
    """`Source` of the figures that do not depend on the services. `folder`: of the embedded Postgres, if there is
    one.
    """

    hub: Hub
    poller: Poller
    pools: Pools
    troubles: Troubles
    limits: Limits
    relay: Relay
    wal: WalListener
    folder: Path | None = None

    @property
    def families(self) -> Sequence[Family]:
        """`Source.families`."""
        return FAMILIES

    @property
    def silent_s(self) -> float:
        """Seconds for which Postgres has not answered; 0 if it answered lately, and no failure came after it."""
        polls = self.poller.statistics()
        lately = max(LATELY, 3 * self.limits.poll_max)
        return polls.silent_s if polls.outage_s or polls.silent_s > lately else 0.0

    def samples(self) -> Iterable[Sample]:
        """`Source.samples`."""
        yield from self._database()
        yield from self._clients()
        present = dict.fromkeys(KINDS, 0)
        of_one = set()
        for trouble in self.troubles.current():
            kind = trouble.place.kind
            present[kind] = present.get(kind, 0) + 1
            if kind in OF_ONE:
                of_one.add((kind, trouble.place.name, trouble.code))
        for kind, name, code in sorted(of_one):
            yield OF_ONE[kind](1, name, code)
        for kind, number in present.items():
            yield TROUBLES(number, kind)
        for labels, number in list(self.troubles.counts.items()):
            yield FAILURES(number, *labels)
        for reason, number in self.relay.statistics().reasons.items():
            yield RELAY_REFUSED(number, reason)
        for service, number in list(self.troubles.by_service.items()):
            yield SERVICE_FAILURES(number, service)
        if self.folder is not None and self.folder.exists():
            disk = shutil.disk_usage(self.folder)
            yield FOLDER_SIZE(disk.total)
            yield FOLDER_FREE(disk.free)

    def _database(self) -> Iterable[Sample]:
        polls, silent = self.poller.statistics(), self.silent_s
        yield DATABASE_UP(float(not silent))
        yield OUTAGE(silent)
        yield POLLS(polls.polls)
        yield POLL_FAILURES(polls.failures)
        for field in fields(self.pools):
            pool: Database = getattr(self.pools, field.name)
            found = pool.statistics()
            yield POOL_SIZE(found.size, field.name)
            yield POOL(found.open - found.idle, field.name, "busy")
            yield POOL(found.idle, field.name, "idle")
            yield POOL_WAITING(found.waiting, field.name)
            yield POOL_LOST(found.lost, field.name)
            yield POOL_STATEMENTS(found.statements, field.name)

    def _clients(self) -> Iterable[Sample]:
        found = self.hub.statistics()
        yield CONNECTIONS(max(0, found.connected - found.newcomers), "known")
        yield CONNECTIONS(found.newcomers, "newcomer")
        yield CONNECTIONS(found.handshakes, "handshake")
        yield CONNECTIONS_LIMIT(self.hub.limit)
        yield ACCEPTED(found.accepted)
        yield REFUSED(found.refused)
        yield SENT(self.hub.sent_bytes())
        yield UNFINISHED(found.unfinished)
        for reason in CloseReason:  # also with 0: Prometheus does not notice that a counter begins at 1
            yield CLOSED(found.closed.get(reason.value, 0), reason.value)

    def obstacles(self) -> Iterable[Obstacle]:
        """`Source.obstacles`."""
        whole = self.troubles.of(DATABASE, DATABASE)
        if self.silent_s and not whole:
            yield Obstacle(DATABASE, DATABASE, f"Postgres has not answered for {self.silent_s:.0f} s")
        for trouble in whole:
            away = f" (for {self.silent_s:.0f} s)" if trouble.code == DatabaseUnavailable.code and self.silent_s else ""
            yield Obstacle(DATABASE, DATABASE, f"{trouble.reason}{away}")

    def details(self) -> Iterable[Detail]:
        """`Source.details`."""
        yield Detail(
            DATABASE,
            self.pools.positions.target.host,
            {
                "up": not self.silent_s,
                "outage_seconds": self.silent_s,
                "bell": "wal" if self.wal.hears else "looks",
                "bell_reason": self.wal.why,
            },
        )
        now = self.troubles.now()
        for trouble in self.troubles.current():
            yield Detail(
                "trouble",
                trouble.place.name,
                {
                    "kind": trouble.place.kind,
                    "cause": trouble.place.cause,
                    "code": trouble.code,
                    "reason": trouble.reason,
                    "lasting_seconds": round(now - trouble.since, 1),
                },
            )

    def looks(self) -> Sequence[FigureQuery]:
        """`Source.looks`."""
        return ()
