"""Redis as a service of the daemon: a task that publishes and hears, where `--redis` is given, and its figures."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicad.daemon.figures import COUNTER, GAUGE, Detail, Family, FigureQuery, Obstacle, Sample
from replicad.daemon.service import Answers, Feature, Host, Job
from replicad.daemon.session import Session
from replicad.errors import EnvironmentRefused

if TYPE_CHECKING:
    from replicad.redis.work import RedisWork

# The intervals of what a daemon does for Redis, and the bounds of what it keeps for it.


@dataclass(frozen=True, slots=True)
class RedisIntervals:
    """Seconds, where nothing else is said."""

    ttl: float = 10.0  # the role of the publisher passes on when its beat has not changed for so long
    look: float = 1.0  # between two looks at the role, and at the list of streams
    renew: float = 2.5  # between two beats of the publisher
    sync: float = 2.0  # between two messages with all positions of a stream; followers give up after ten seconds
    answers: float = 0.1  # between two answers to REPLICATE: one answer is for all requests meanwhile
    snapshot: float = 1.0  # between two notes of published positions; a take-over repeats at least so much
    give_up: float = 10.0  # for which publishing fails before another daemon may try
    retry: float = 0.2  # before the second try to connect; doubles up to `longest_retry`
    longest_retry: float = 5.0
    answer: float = 5.0  # for an answer of Redis
    silence: float = 15.0  # without any message or PONG, after which a subscription counts as lost
    waiting_bytes: int = 32 << 20  # of rows that wait for Redis; if more do, they are read again when it takes them


PUBLISHER = Family("replicad_redis_publisher", GAUGE, "1 if this daemon has the role of the publisher, 0 if not.")
CONNECTED = Family(
    "replicad_redis_connected",
    GAUGE,
    "1 if the connection works, 0 if not; publishing only where the role is.",
    ("use",),
)
LINES = Family("replicad_redis_published_lines_total", COUNTER, "Lines published to Redis.")
WAITING = Family("replicad_redis_waiting_bytes", GAUGE, "Bytes of rows that wait for Redis.")
BEHIND = Family(
    "replicad_redis_overflows_total",
    COUNTER,
    "How often so much waited that rows were put aside, to be read from Postgres again.",
)
HEARD = Family("replicad_redis_heard_commands_total", COUNTER, "Commands of other processes, received over Redis.")
REFUSED = Family("replicad_redis_refused_lines_total", COUNTER, "Received lines that are no commands, or were refused.")
FAMILIES = (PUBLISHER, CONNECTED, LINES, WAITING, BEHIND, HEARD, REFUSED)


class RedisService:
    """The service. `work`: None where no Redis is given."""

    def __init__(self, work: RedisWork | None) -> None:
        self.work = work

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return [] if self.work is None else [Job("redis", self.work.run)]

    def answers(self, peer: Session) -> Answers:  # noqa: ARG002 - it has no commands
        """`Service.answers`."""
        return Answers()

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {} if self.work is None else {"redis": str(self.work.address)}


def feature(pace: RedisIntervals = RedisIntervals()) -> Feature:
    """The feature `redis`."""

    def open_service(host: Host) -> RedisService:
        if host.settings.redis is None:
            host.figures.add(RedisFigures(None))
            return RedisService(None)
        if importlib.util.find_spec("hiredis") is None:
            raise EnvironmentRefused("--redis needs the extra `redis`: pip install 'replicad[redis]'")
        from replicad.redis.work import RedisWork  # noqa: PLC0415 - it needs the extra

        work = RedisWork(host, host.settings.redis, pace)
        host.figures.add(RedisFigures(work))
        return RedisService(work)

    return Feature("redis", (), open_service)


FEATURE = feature()


class RedisFigures:
    """`Source`; without `--redis` it has no values."""

    def __init__(self, work: RedisWork | None) -> None:
        self._work = work

    @property
    def families(self) -> Sequence[Family]:
        """`Source.families`."""
        return FAMILIES

    def samples(self) -> Iterable[Sample]:
        """`Source.samples`."""
        if self._work is None:
            return
        turns, hearing = self._work.turns, self._work.hearing
        publisher = turns.publisher
        yield PUBLISHER(0 if publisher is None else 1)
        yield CONNECTED(float(hearing.connected), "hearing")
        yield CONNECTED(float(publisher is not None and publisher.connected), "publishing")
        yield LINES(turns.lines)
        yield WAITING(0 if publisher is None else publisher.intake.bytes)
        yield BEHIND(turns.overflows)
        yield HEARD(hearing.heard)
        yield REFUSED(hearing.refused)

    def obstacles(self) -> Iterable[Obstacle]:
        """`Source.obstacles`: none, since clients are served by TCP without Redis."""
        return ()

    def details(self) -> Iterable[Detail]:
        """`Source.details`."""
        return ()

    def looks(self) -> Sequence[FigureQuery]:
        """`Source.looks`."""
        return ()
