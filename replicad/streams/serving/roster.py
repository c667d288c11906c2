"""Which writers of a stream are listed to readers: new ones, those that are retired, and too many of them.

Whoever is not listed stands at the minimum of those that are, in every token and every lane. So a writer may be listed
late, or no more, and no row of it is passed over. A stream with more than `max_listed` writers is *crowded*: one name,
ALL, stands for all of them. The registry says who is retired and how many there are; so all daemons agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

import structlog
import trio

from replicad.daemon.troubles import Troubles
from replicad.streams.registry import Stream
from replicad.streams.rows import MASTER
from replicad.streams.store import Store

ALL = "+"  # the name that stands for all writers of a crowded stream
SHOWN = 20  # writers that one line of the log names

Relist = Callable[[Set[str], Set[str]], trio.Event]
log = structlog.get_logger()


class Roster:
    """The list of one stream. `numbers` are those of the writers that are listed, `every` of all that ever were."""

    def __init__(
        self, stream: Stream, store: Store, relist: Relist, troubles: Troubles | None, *, max_listed: int
    ) -> None:
        """`relist(joining, leaving)` is called when the list has changed; its event comes when readers were told."""
        self.every = dict(stream.writers)
        self.crowded = len(stream.writers.keys() - {ALL}) > max_listed
        self.numbers = {name: number for name, number in self.every.items() if (name == ALL) == self.crowded}
        self._stream = stream
        self._store = store
        self._max_listed = max_listed
        self._relist = relist
        self._troubles = troubles
        self._registered: Set[str] = stream.writers.keys() - {ALL}  # as the registry said, and we know
        self._news: Set[str] | None = None  # as it says now
        self._reported = False

    def on_registered(self, writers: Set[str]) -> bool:
        """The registry has these writers, those that are retired left out. True where that is news, for `look`."""
        registered = writers - {ALL}
        if registered == self._registered:
            return False
        self._news = registered
        return True

    async def look(self) -> None:
        """Take over what the registry says, and see that somebody is listed: a stream is told under a name always."""
        news, self._news = self._news, None
        if news is not None:
            before, self._registered = self._registered, news
            if len(news) <= self._max_listed and self.crowded:
                await self._end_crowd(news)
            elif len(news) > self._max_listed and not self.crowded:
                await self._crowd()
            elif gone := (before - news) & self.numbers.keys() - {ALL}:
                log.info("writers_retired", stream=self._stream.name, writers=sorted(gone)[:SHOWN], number=len(gone))
                self._list({name: number for name, number in self.numbers.items() if name not in gone})
        if self.crowded and not self._reported:
            await self._crowd()
        elif not self.numbers:
            await self.welcome({MASTER})

    async def welcome(self, names: Set[str]) -> None:
        """List writers, and wait until all readers were told of them."""
        names = names - self.numbers.keys() - {ALL}
        if not names or self.crowded:
            return
        room = (
            self._max_listed + 1 - len(self.numbers)
        )  # one too many says it to all daemons, also those that start later
        await self._register(sorted(names)[:room])
        if self.crowded:
            return
        if len(names) >= room:
            told = await self._crowd()
        else:
            log.info("writers_joined", stream=self._stream.name, writers=sorted(names)[:SHOWN], number=len(names))
            told = self._list({**self.numbers, **{name: self.every[name] for name in names}})
        await told.wait()

    async def know_numbers(self, wanted: Set[int]) -> Set[int]:
        """Which of these numbers no writer has. One that has one, and is neither retired nor listed, is listed: another
        daemon has seen it first.
        """
        missing = wanted - set(self.numbers.values())
        if not missing:
            return missing
        found = await self._store.named(self._stream, missing)
        await self.welcome({one.name for one in found if not one.retired})
        return missing - {one.number for one in found}

    async def _register(self, names: Iterable[str]) -> None:
        self.every |= await self._store.ensure_writers(self._stream, names)

    def _list(self, numbers: dict[str, int]) -> trio.Event:
        joining, leaving = numbers.keys() - self.numbers.keys(), self.numbers.keys() - numbers.keys()
        self.numbers = numbers
        return self._relist(joining, leaving)

    async def _crowd(self) -> trio.Event:
        """From now on one name stands for all."""
        if ALL not in self.every:
            await self._register([ALL])
        self.crowded = self._reported = True
        name = self._stream.name
        reason = (
            f"stream {name} has more than {self._max_listed} writers: one name, {ALL}, stands for all of them, and "
            f"rows come in the order of ids. Retire those that write no more: `replicad streams writers {name} "
            "--retire-idle-since TOKEN`; or add the stream anew without --instance-column."
        )
        if self._troubles is None:
            log.warning("stream_crowded", stream=name, reason=reason)
        else:
            self._troubles.begin("stream", name, "writers", reason, code="too_many_writers")
        return self._list({ALL: self.every[ALL]})

    async def _end_crowd(self, names: Set[str]) -> None:
        await self._register(names)
        self.crowded = self._reported = False
        if self._troubles is not None:
            self._troubles.end("stream", self._stream.name, "writers")
        self._list({name: self.every[name] for name in names})
