"""The figures of senders for operators. A sender is another process; the daemon reads them from Postgres."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replicad.daemon.figures import GAUGE, Detail, Family, FigureQuery, Obstacle, Sample
from replicad.daemon.service import Answers, Feature, Host, Job
from replicad.daemon.session import Session
from replicad.errors import SchemaMissing
from replicad.postgres import schema as schemas
from replicad.postgres.bridge import Database
from replicad.postgres.statements import statement

MOST = 10_000  # parked items that are counted
_OF = ("stream",)

RUNNING = Family("replicad_sender_running", GAUGE, "1 if the sender is running, 0 if not.", ("stream", "sender"))
DESTINATIONS = Family("replicad_sender_destinations", GAUGE, "Destinations that were ever written to.", _OF)
FAILING = Family(
    "replicad_sender_failing_destinations",
    GAUGE,
    "Those whose last request failed and that have yet to take something.",
    _OF,
)
FAILING_FOR = Family(
    "replicad_sender_failing_seconds", GAUGE, "For how long the first of them has failed; 0 if there is none.", _OF
)
PARKED = Family(
    "replicad_sender_parked_items",
    GAUGE,
    f"Facts and updates that are parked (`replicad sender parked list`); of all streams {MOST:,} are counted.",
    ("stream", "kind"),
)
FAMILIES = (RUNNING, DESTINATIONS, FAILING, FAILING_FOR, PARKED)


class SenderFigures:
    """`Source` for the senders of the daemon's database. The label `stream` is the stream of facts, or what stands for
    it (`replicad.sender.store.SenderStore`).
    """

    def __init__(self, db: Database, schema: str) -> None:
        self._db = db
        self._schema = schema
        self._of_streams: Sequence[Mapping[str, Any]] = ()
        self._senders: Sequence[Mapping[str, Any]] = ()

    @property
    def families(self) -> Sequence[Family]:
        """`Source.families`."""
        return FAMILIES

    def samples(self) -> Iterable[Sample]:
        """`Source.samples`."""
        for row in self._senders:
            yield RUNNING(float(row["running"]), row["source"], row["name"])
        for row in self._of_streams:
            stream = row["source"]
            yield DESTINATIONS(row["known"], stream)
            yield FAILING(row["failing"], stream)
            yield FAILING_FOR(row["failing_s"], stream)
            yield PARKED(row["facts"], stream, "fact")
            yield PARKED(row["updates"], stream, "update")

    def obstacles(self) -> Iterable[Obstacle]:
        """`Source.obstacles`: none, since a daemon serves without senders."""
        return ()

    def details(self) -> Iterable[Detail]:
        """`Source.details`."""
        return ()

    def looks(self) -> Sequence[FigureQuery]:
        """`Source.looks`."""
        return (FigureQuery("senders", self._look, self._forget),)

    async def _look(self) -> None:
        try:
            await schemas.require(self._db, "federation", self._schema)
        except SchemaMissing:  # the daemon's role may not install it
            self._forget()
            return
        self._of_streams = await self._db.fetch(statement("federation_figures", self._schema), MOST)
        self._senders = await self._db.fetch(statement("federation_running", self._schema))

    def _forget(self) -> None:
        self._of_streams = self._senders = ()


class SenderService:
    """The service: no jobs and no commands."""

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return ()

    def answers(self, peer: Session) -> Answers:  # noqa: ARG002
        """`Service.answers`."""
        return Answers()

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {}


def open_service(host: Host) -> SenderService:
    """The service; adds the figures of senders to the daemon's figures."""
    host.figures.add(SenderFigures(host.pools.housekeeping, host.settings.database.stream_schema))
    return SenderService()


FEATURE = Feature("sender", (), open_service)
