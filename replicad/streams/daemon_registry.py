"""The registry as a daemon uses it: read again and again, and with the pools on which rows are read.

A test gives an object in memory with the same methods (`tests/store_suite.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import trio

from replicad.postgres.bridge import Database
from replicad.postgres.statements import Queries, statement
from replicad.streams.queries import Impatient, installed
from replicad.streams.registry import Registry, Stream, row_source
from replicad.streams.table_rows import TableRows

CATALOGS = 16  # streams whose rows in the catalogs are looked at each time
LOOKS = 8  # so many looks, after a row of the catalogs was written, read the catalogs of all streams
IN_TURN = 5  # looks, of which one loads a stream for no other reason than that it is its turn
SUSPECTS = 32  # streams that are loaded each time because the caller suspects them


@dataclass(frozen=True, slots=True)
class _Marks:
    own: int | None = None
    catalogs: int | None = None


class RegistryView:
    """All streams by name, as of the last look. The cost of a look hardly grows with the number of streams.

    To load one stream takes Postgres some three milliseconds: it asks the catalogs for everything that serving the
    stream depends on. So a look loads only three kinds: streams whose rows in our tables or in the catalogs were
    written since (the query stream_marks), streams that the caller suspects, and one in turn, for changes that no mark
    shows. The rows in the catalogs are compared in turn as well, more at a time after the statistics have shown that
    any was written. No position depends on a look: polls and reads check the oids and files of tables and sequences
    themselves (docs/positions.md).
    """

    def __init__(self, registry: Registry, db: Queries) -> None:
        self._registry = registry
        self._db = db
        self._streams: dict[str, Stream] = {}
        self._marks: dict[str, _Marks] = {}
        self._whole: int | None = None  # the mark of our tables together
        self._written: int | None = None  # rows of the catalogs that were written, by the statistics
        self._sweeping = 0  # looks that look at the catalogs' rows of many streams
        self._catalogs_at = 0  # where the next look goes on in the order of the names
        self._looks = 0
        self._turn_at = 0
        self._suspects_at = 0
        self._looking = trio.Lock()  # results of an earlier look must not replace results of a later look

    async def look(self, suspects: Collection[str] = ()) -> dict[str, Stream]:
        """The streams. A stream that has not changed is the same object as before.

        `suspects`: streams that do not work, so that their entries may have changed in a way that no mark shows.

        Raises:
            SchemaMissing: streams are not installed in this database.
        """
        async with self._looking:
            await self._look(suspects)
        return dict(self._streams)

    async def _look(self, suspects: Collection[str]) -> None:
        if not self._streams:
            self._marks, self._whole = {}, None
            whole, marks = await self._find_changed([], None)
            self._streams = await self._registry.load_streams()
            self._marks = {name: mark for name, mark in marks.items() if name in self._streams}
            self._whole = whole
            return
        names = sorted(self._streams)
        share = -(-len(names) // LOOKS) if self._sweeping else 0
        self._sweeping = max(0, self._sweeping - 1)
        self._catalogs_at, some = _next(names, self._catalogs_at, max(CATALOGS, share))
        self._looks += 1
        self._turn_at, wanted = _next(names, self._turn_at, int(self._looks % IN_TURN == 0))
        self._suspects_at, doubtful = _next(sorted(self._streams.keys() & suspects), self._suspects_at, SUSPECTS)
        whole, marks = await self._find_changed(names, some)  # of before the streams are loaded
        chosen = {*wanted, *doubtful, *marks}
        loaded = await self._registry.load_streams(chosen) if chosen else {}
        for name in chosen - loaded.keys():  # removed
            self._streams.pop(name, None)
            self._marks.pop(name, None)
        self._streams |= self._same(loaded)
        self._marks |= {name: mark for name, mark in marks.items() if name in loaded}
        self._whole = whole  # last: where anything has failed, the next look compares all marks again

    async def _find_changed(
        self, names: list[str], some: Collection[str] | None
    ) -> tuple[int | None, dict[str, _Marks]]:
        """The mark of our tables together, and the streams of which a row was written, in the catalogs only of `some`
        (None: of all), with their marks. Takes over the noted positions of the others.
        """
        marks = [self._marks.get(name, _Marks()) for name in names]
        with installed(self._registry.schema):
            rows = await self._db.fetch(
                statement("stream_marks", self._registry.schema),
                names,
                [mark.own for mark in marks],
                [mark.catalogs for mark in marks],
                [self._streams[name].noted for name in names],
                None if some is None else list(some),
                self._whole,
            )
        whole, changed = None, {}
        for row in rows:
            if row["name"] is None:
                whole = row["own"]
                if row["catalogs"] != self._written:
                    self._written, self._sweeping = row["catalogs"], LOOKS + 1
                continue
            name, known = row["name"], self._marks.get(row["name"], _Marks())
            now = _Marks(row["own"], known.catalogs if row["catalogs"] is None else row["catalogs"])
            if now != known or name not in self._streams:
                changed[name] = now
            else:
                self._streams[name] = replace(self._streams[name], noted=row["noted"])
        return whole, changed

    def _same(self, loaded: dict[str, Stream]) -> dict[str, Stream]:
        """The loaded streams; the present object for each that has not changed."""
        known = self._streams
        return {name: known[name] if known.get(name) == stream else stream for name, stream in loaded.items()}


def _next(names: list[str], begin: int, count: int) -> tuple[int, list[str]]:
    """Where the next turn begins, and so many names in turn, from a place on."""
    begin %= max(1, len(names))
    return begin + count, [*names[begin:], *names[:begin]][:count]


class DaemonRegistry(Registry):
    """`db`: short statements, and new rows. `catchup_db`: old rows, for clients that catch up."""

    def __init__(self, db: Database, catchup_db: Database, schema: str) -> None:
        looks = Impatient(db)
        super().__init__(db, schema, looks=looks)
        self._catchup_db = catchup_db
        self._view = RegistryView(self, looks)

    async def look(self, suspects: Collection[str] = ()) -> dict[str, Stream]:
        """`RegistryView.look`."""
        return await self._view.look(suspects)

    def rows(self, stream: Stream) -> TableRows:
        """The rows for all readers: queries give up quickly if the table is locked. Raises StreamRefused."""
        return TableRows(row_source(stream, self.schema), self._db, self._looks)

    def catchup_rows(self, stream: Stream) -> TableRows:
        """The rows for clients that catch up, on connections of their own. Raises StreamRefused."""
        return TableRows(row_source(stream, self.schema), self._catchup_db, self._catchup_db)
