"""The writers of a stream that are listed to readers: adds new ones, removes retired ones, bounds their number.

In every token and lane, a writer that is not listed has the minimum position of the listed ones. So a writer can be
listed late, or be removed, and none of its rows is skipped. A stream with more than `max_listed` writers is *crowded*:
one name, ALL, stands for all of them. All daemons take retirement and number from the registry, so they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from shlex import quote

import structlog
import trio

from replicad.daemon.troubles import Troubles
from replicad.errors import StreamRefused
from replicad.streams.commands import writers_lines
from replicad.streams.daemon_registry import DaemonRegistry
from replicad.streams.registry import Stream
from replicad.streams.row_text import MASTER

ALL = "+"  # the name that stands for all writers of a crowded stream
SHOWN = 20  # writers that one line of the log names

ChangeWriters = Callable[[Set[str], Set[str]], trio.Event]
log = structlog.get_logger()


class WriterList:
    """The list of one stream. `numbers`: of the listed writers. `every`: of all writers that were ever listed."""

    def __init__(
        self,
        stream: Stream,
        registry: DaemonRegistry,
        change_writers: ChangeWriters,
        troubles: Troubles | None,
        *,
        max_listed: int,
    ) -> None:
        """`change_writers(joining, leaving)` is called for each change; its event is set when readers were sent it."""
        self.every = dict(stream.writers)
        self.crowded = len(stream.writers.keys() - {ALL}) > max_listed
        self.numbers = {name: number for name, number in self.every.items() if (name == ALL) == self.crowded}
        self._stream = stream
        self._registry = registry
        self._max_listed = max_listed
        self._change_writers = change_writers
        self._troubles = troubles
        self._registered: Set[str] = stream.writers.keys() - {ALL}  # as of the last update
        self._news: Set[str] | None = None  # a newer state of the registry, for the next update
        self._reported = False
        self._forks = 0

    def on_registered(self, writers: Set[str]) -> bool:
        """Take the names of the registered writers that are not retired. True if they have changed."""
        registered = writers - {ALL}
        if registered == self._registered:
            return False
        self._news = registered
        return True

    async def look(self) -> None:
        """Update the list from the registry. At least one writer is always listed, since POSITION needs a name."""
        news, self._news = self._news, None
        if news is not None:
            before, self._registered = self._registered, news
            if len(news) <= self._max_listed and self.crowded:
                await self._end_crowd(news)
            elif len(news) > self._max_listed and not self.crowded:
                await self._begin_crowd()
            elif retired := (before - news) & self.numbers.keys() - {ALL}:
                log.info(
                    "writers_retired", stream=self._stream.name, writers=sorted(retired)[:SHOWN], number=len(retired)
                )
                self._list({name: number for name, number in self.numbers.items() if name not in retired})
        if self.crowded and not self._reported:
            await self._begin_crowd()
        elif not self.numbers:
            await self.add({MASTER})

    async def add(self, names: Set[str]) -> None:
        """List writers, and wait until they have been sent to all readers."""
        names = names - self.numbers.keys() - {ALL}
        if not names or self.crowded:
            return
        room = self._max_listed + 1 - len(self.numbers)  # one above the limit: so all daemons see a crowded stream
        await self._register(sorted(names)[:room])
        if self.crowded:
            return
        if len(names) >= room:
            sent = await self._begin_crowd()
        else:
            log.info("writers_joined", stream=self._stream.name, writers=sorted(names)[:SHOWN], number=len(names))
            sent = self._list({**self.numbers, **{name: self.every[name] for name in names}})
        await sent.wait()

    async def add_numbered(self, wanted: Set[int]) -> Set[int]:
        """List the writers with these numbers, unless retired: another daemon may have found them first. Returns the
        numbers that no writer has.
        """
        missing = wanted - set(self.numbers.values())
        if not missing:
            return missing
        found = await self._registry.writers_numbered(self._stream, missing)
        await self.add({one.name for one in found if not one.retired})
        return missing - {one.number for one in found}

    def lines(self, epoch: str, names: Iterable[str]) -> bytes:
        """The lines of WRITERS for these writers: vector tokens use their numbers."""
        return writers_lines(self._stream.name, epoch, {name: self.every[name] for name in names})

    def forked(self) -> None:
        """Another generation is taken over: a registration that was asked for before may be of a database that was
        replaced since.
        """
        self._forks += 1

    async def _register(self, names: Iterable[str]) -> None:
        """Raises StreamRefused where the database has given a number to another writer than we: it was restored, and
        which generation it is in is not known yet.
        """
        names, found, forks = list(names), dict[str, int](), -1
        while forks != self._forks:
            forks = self._forks
            found = await self._registry.ensure_writers(self._stream, names)
        taken = {number: name for name, number in self.every.items()}
        for name, number in found.items():
            if taken.get(number, name) != name or self.every.get(name, number) != number:
                raise StreamRefused(
                    f"writers of stream {self._stream.name} have other numbers in the database than readers were sent "
                    f"({name} is {number}): it was restored; try again"
                )
        self.every |= found

    def _list(self, numbers: dict[str, int]) -> trio.Event:
        joining, leaving = numbers.keys() - self.numbers.keys(), self.numbers.keys() - numbers.keys()
        self.numbers = numbers
        return self._change_writers(joining, leaving)

    async def _begin_crowd(self) -> trio.Event:
        """List ALL in place of the writers."""
        if ALL not in self.every:
            await self._register([ALL])
        self.crowded = self._reported = True
        name = self._stream.name
        reason = (
            f"stream {name} has more than {self._max_listed} writers: they are listed under one name, {ALL}, and rows "
            f"are sent in the order of ids. Retire writers that no longer write: `replicad streams writers "
            f"{quote(name)} --retire-idle-since TOKEN`; or add the stream again without --instance-column."
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
