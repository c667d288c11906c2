"""The known tubes, the generation of their history, their positions, and the reason why a tube cannot be served.

They are read every second, again whenever a request names a tube that is unknown or not served, and on each new
connection before a position is read from it. When another generation is found, all positions are forgotten and all
waiting requests are woken: their statements then show them that their leases are void. What was served in the earlier
generation is reported to Postgres, which knows how much of it the present history still has.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import structlog
import trio

from replicad.daemon.poller import Poller
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseUnavailable, LeaseLost, TubeRefused, UnknownTube
from replicad.positions.horizon import LockSource, Reading
from replicad.protocol.tokens import Cursor
from replicad.tubes.history import HistoryBook, TubeGeneration
from replicad.tubes.pods import PodBook, TubeInfo
from replicad.tubes.serving.waiting import ClaimWaiters, PodWaiters

ASK_AGAIN = 10.0  # seconds before it is asked again whether unknown touches are mended
LAST_NOTE = 1.0  # seconds at the end of the daemon to note the last positions
TUBE = "tube"  # the kind of the troubles of one tube; a trouble of all tubes has the kind "service"

log = structlog.get_logger()


class KnownTubes:
    """The tubes of one schema. A fault of a tube is a trouble of that tube, and the answer to requests for it."""

    def __init__(
        self,
        pods: PodBook,
        history: HistoryBook,
        poller: Poller,
        waiters: PodWaiters,
        claim_waiters: ClaimWaiters,
        *,
        troubles: Troubles,
    ) -> None:
        self.tubes: dict[str, TubeInfo] = {}
        self.generation: TubeGeneration | None = None  # in which all positions here were read
        self.readings: dict[str, Reading] = {}  # the last reading of each tube
        self._pods = pods
        self._history = history
        self._poller = poller
        self._waiters = waiters
        self._claim_waiters = claim_waiters
        self._troubles = troubles
        self._watched: dict[str, LockSource] = {}
        self._refused: dict[str, str] = {}  # tube: why it has no position
        self._looks = self._newest_look = 0
        self._following = trio.Lock()  # so that generations are adopted in their order
        self._fork: str | None = None  # a reading has shown that history has forked, and why
        self._fork_found = trio.Event()
        self._served: dict[str, int] = {}  # tube: the highest seq that was sent to a client in this generation
        self._unmended: dict[tuple[str, str], int] = {}  # the same by tube and generation, of earlier generations
        self._ask_at = 0.0  # when to ask again what is left of these
        self._noted: dict[str, int] = {}
        poller.before_polling(self._look_on_new_connection)

    def fault(self, tube: str) -> str | None:
        """Why a tube cannot be served; None if it can."""
        info = self.tubes.get(tube)
        return (info.fault if info is not None else None) or self._refused.get(tube)

    def partitions(self, tube: str) -> int | None:
        """The number of partitions at the last look."""
        info = self.tubes.get(tube)
        return None if info is None else info.partitions

    async def find(self, tube: str, lists: Callable[[str], bool] = lambda _: True) -> TubeInfo:
        """The tube. Raises UnknownTube, also if the client may not know the name (`lists`)."""
        hidden = not lists(tube)
        if hidden or tube not in self.tubes or self.fault(tube) is not None:  # made, made again or mended just now?
            await self.look()
        found = None if hidden else self.tubes.get(tube)
        if found is None:
            known = ", ".join(sorted(filter(lists, self.tubes))) or "none yet; make one with `replicad tubes create`"
            raise UnknownTube(f"there is no tube {tube[:80]!r}; the tubes are: {known}")
        return found

    async def served(self, tube: str) -> TubeInfo:
        """The tube. Raises UnknownTube, or TubeRefused with the reason if it cannot be served."""
        info = await self.find(tube)
        fault = self.fault(tube)
        if fault is not None:
            raise _broken(tube, fault)
        return info

    async def refuse_broken(self, tube: str) -> None:
        """As `served`, but accepts an unknown tube: the SQL statement checks the lease first and then refuses it."""
        if tube in self.tubes:
            await self.served(tube)

    async def why_broken(self, tube: str) -> TubeRefused | None:
        """The fault of a tube, looked at now; None if it has none."""
        await self.look()
        info = self.tubes.get(tube)
        return None if info is None or info.fault is None else _broken(tube, info.fault)

    # --- history ---

    @property
    def generation_id(self) -> str | None:
        """The id of the generation in which the positions were read."""
        return None if self.generation is None else self.generation.id

    def note_served(self, tube: str, cursor: Cursor) -> None:
        """Pods up to this cursor go to a client."""
        self._served[tube] = max(self._served.get(tube, 0), cursor.regular, cursor.backfill)

    async def follow_history(self) -> None:
        """Adopt the present generation when a reading shows a fork, until cancelled. Then note the last positions."""
        try:
            while True:
                await self._fork_found.wait()
                self._fork_found = trio.Event()
                with self._troubles.contain("service", "tubes", "history"):
                    await self.look()
        finally:
            with trio.move_on_after(LAST_NOTE, shield=True), self._troubles.contain("service", "tubes", "note"):
                await self.note_positions()  # so that a restart of Postgres until the next start makes no touch unknown

    async def note_positions(self) -> None:
        """Note the positions in Postgres, if they have moved."""
        positions = {name: at for name in self.tubes if (at := self._waiters.known_position(name)) is not None}
        if self.generation is None or not positions or positions == self._noted:
            return
        try:
            await self._history.note(self.generation.id, positions)
        except LeaseLost:  # history has forked: the next look shows it
            return
        self._noted = positions

    async def report_served(self) -> None:
        """Report what was served in earlier generations, again until it is mended: a later fork may lose the note."""
        if trio.current_time() < self._ask_at or not self._unmended:
            return
        self._ask_at = trio.current_time() + ASK_AGAIN
        for (tube, generation), seq in list(self._unmended.items()):
            if tube in self.tubes:
                found = await self._history.seen(tube, generation, seq)
                if found.mended is None:
                    log.warning("touches_unknown", tube=tube, after=found.shared, upto=seq, state=found.state)
                    continue
                if found.generation != self.generation_id:
                    continue  # the next look adopts it, and asks again
                self.note_served(tube, Cursor(found.mended, 0))
            self._unmended.pop((tube, generation), None)

    async def _follow(self) -> None:
        """Adopt the present generation of Postgres. Raises DatabaseError."""
        async with self._following:
            fork, self._fork = self._fork, None
            try:
                present = await self._history.present(fork)
            except BaseException:
                self._fork = self._fork or fork
                raise
            before, self.generation = self.generation, present
            if before is None or before.id == present.id:
                return
            log.warning("tubes_forked", generation=present.id, before=before.id, reason=present.reason)
            for tube, seq in self._served.items():
                self._unmended[tube, before.id] = seq
            self._ask_at = 0.0
            self._served.clear()
            self._noted.clear()
            for name in list(self._watched):
                self._unwatch(name)  # the next look watches it again

    async def _look_on_new_connection(self) -> None:
        """Adopt the generation before a position is read: the connection may lead to another server or an old copy."""
        if self.generation is None:
            return
        try:
            await self.look()
        except DatabaseUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - reported; the next look tries again
            self._troubles.fail("service", "tubes", "tubes", error)
            for name in list(self._watched):
                self._unwatch(name)

    # --- looking ---

    async def look(self) -> None:
        """Read which tubes there are, and the generation of their history. Raises DatabaseError."""
        known = bool(self.tubes)
        if known:
            await self._follow()
        self._looks += 1
        number = self._looks
        found = {info.name: info for info in await self._pods.tubes()}
        if found and not known:
            await self._follow()
        if number < self._newest_look:
            return  # a look that began later has already finished
        self._newest_look = number
        before, self.tubes = self.tubes, found
        for name in before.keys() - found.keys():
            self._unwatch(name)
            self._waiters.pause(name, paused=False)
        troubled = {trouble.place.name for trouble in self._troubles.current() if trouble.place.kind == TUBE}
        for name in troubled - found.keys():
            self._troubles.forget(TUBE, name)
        for name, info in found.items():
            with self._troubles.contain(TUBE, name, "look"):
                self._watch(info, before.get(name))

    def _watch(self, info: TubeInfo, before: TubeInfo | None) -> None:
        """Watch the tube's table, which may have been replaced, and report its fault."""
        wanted = None
        if info.table_oid is not None and info.sequence_oid is not None:
            wanted = LockSource(info.table_oid, info.sequence_oid, own_deletes=True, id_column="seq")
        if wanted != self._watched.get(info.name):
            self._unwatch(info.name)
            if wanted is not None:
                self._poller.watch(f"tube:{info.name}", wanted, self._on_reading)
                self._watched[info.name] = wanted
        if info.fault is None:
            self._troubles.end(TUBE, info.name, "table")
        else:
            self._troubles.begin(TUBE, info.name, "table", info.fault, code=TubeRefused.code)
        self._waiters.pause(info.name, paused=info.paused is not None)
        if before is not None and info.fault != before.fault:
            self._wake(info.name)
        elif before is not None and info.partitions != before.partitions:
            self._wake(info.name, but={1, info.partitions})

    def _wake(self, tube: str, but: Container[int] = ()) -> None:
        """Wake the waiting requests: their own statements show the change. `but`: as in `PodWaiters.wake`."""
        self._waiters.wake(tube, but)
        self._claim_waiters.wake(tube, but)

    def _unwatch(self, name: str) -> None:
        self._poller.unwatch(f"tube:{name}")
        self._watched.pop(name, None)
        self._refused.pop(name, None)
        self.readings.pop(name, None)
        self._troubles.end(TUBE, name, "position")
        self._waiters.forget(name)
        self._claim_waiters.wake(name)

    def _on_reading(self, name: str, reading: Reading) -> None:
        tube = name.removeprefix("tube:")
        self.readings[tube] = reading
        if reading.refused is None:
            if self._refused.pop(tube, None) is not None:
                self._troubles.end(TUBE, tube, "position")
        elif self._refused.get(tube) != str(reading.refused):
            self._refused[tube] = str(reading.refused)
            self._troubles.begin(TUBE, tube, "position", str(reading.refused), code=TubeRefused.code)
            self._wake(tube)
        if reading.fork is not None:
            self._waiters.forget(tube)  # its position is of a history that is over
            self._fork = reading.fork.reason
            self._fork_found.set()
        elif reading.position is not None:
            self._waiters.note_position(tube, reading.position, reading.last_value)
        elif reading.refused is None and tube not in self._refused:
            self._waiters.note_unknown(tube, reading.last_value)


def _broken(tube: str, fault: str) -> TubeRefused:
    return TubeRefused(f"tube {tube} cannot be served: {fault}")
