"""Redis as a service of the daemon: a task that publishes and hears, where `--redis` is given."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from replicad.daemon.service import Answers, Feature, Host, Job, Peer
from replicad.errors import EnvironmentRefused
from replicad.redis.figures import RedisFigures
from replicad.redis.intervals import RedisIntervals

if TYPE_CHECKING:
    from replicad.redis.work import RedisWork


class RedisService:
    """The service. `work`: None where no Redis is given."""

    def __init__(self, work: RedisWork | None) -> None:
        self.work = work

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return [] if self.work is None else [Job("redis", self.work.run)]

    def answers(self, peer: Peer) -> Answers:  # noqa: ARG002 - it has no commands
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
