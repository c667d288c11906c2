"""The rounds of a sharded writer: look, send a beat, expel expired writers, take slots, give slots, leave.

The logic is shared by trio and threads: a generator yields queries, and a driver of a few lines runs them and sends the
rows back. Any query may fail and end the round; the next round begins with a new look. No I/O and no sleeping here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

from replicad.beats import BeatWatch
from replicad.errors import InstanceTaken
from replicad.eventlog import get_logger
from replicad.postgres.statements import rows_call
from replicad.sharding.holdings import Holdings, Slot, View, WriterMember

log = get_logger(__name__)

TTL: Final = 10.0  # seconds without a beat, after which other writers take a writer's slots
LOOK: Final = 0.25  # seconds between two looks, or a quarter of a short time to live; a look is one cheap query
LONGEST_GAP: Final = 1.0  # seconds between two looks that count as watched, at most
BEATS: Final = 4  # in a time to live
PATIENCE: Final = 0.25  # seconds, per look, to wait for writes of the earlier owner of a slot that we take
_LOOK_COLUMNS: Final = "to_json(writer_look)::text"  # all in one text; drivers differ in what they make of arrays
_SIGNS: Final = 2  # new beats that prove that a namesake runs; the last beat of a killed process may arrive late
LEAVE: Final = 5.0  # seconds to give all slots back; the others take the rest after the time to live


class Ask(NamedTuple):
    """A call of an SQL function in a transaction of its own; the answer is its rows. `columns`: as for `rows_call`."""

    function: str
    args: tuple[object, ...]
    columns: str = "*"

    def sql(self, schema: str) -> str:
        """The statement, with parameters, where the function is installed in that schema."""
        return rows_call(schema, self.function, len(self.args), self.columns)


Asks = Generator[Ask, Sequence[Sequence[Any]], None]


class MembershipKeeper:
    """The keeper of one writer. `ttl` in seconds; `now` is a monotonic clock."""

    def __init__(self, holdings: Holdings, address: str | None, ttl: float, now: Callable[[], float]) -> None:
        self.pause = min(LOOK, ttl / BEATS)
        self.has_left = False
        self._holdings = holdings
        self._who = (holdings.stream, holdings.instance)
        self._address = address
        self._ttl = ttl
        self._now = now
        self._watch = BeatWatch[int](LONGEST_GAP)
        self._beat_due = now()
        self._namesake: set[int] = set()  # beats of another process that has our name
        self._leave_by: float | None = None
        self._retired = False
        self._contested: dict[int, float] = {}  # free slots with a write still in flight: since when

    def leave(self) -> None:
        """From the next round on: give everything back and leave."""
        self._leave_by = self._now() + LEAVE

    def round(self) -> Asks:
        """One look, and the steps that follow from it.

        Raises:
            InstanceTaken: another process has the name and is alive.
        """
        expired = yield from self._look()
        holdings = self._holdings
        if holdings.term is None:
            if self._leave_by is None:
                yield from self._join(expired)
            self.has_left = self._leave_by is not None and holdings.term is None  # it may have joined just now
            return
        if self._now() >= self._beat_due:
            yield from self._beat()
        others = [beat for beat in expired if beat != self._own_beat()]
        if others:
            expelled = yield Ask("writer_expel", (self._who[0], others), "unnest(writer_expel)")
            names = [str(name) for (name,) in expelled]
            holdings.counts["expelled"] += len(names)
            log.info("writers_expelled", stream=self._who[0], by=self._who[1], writers=names)
            yield from self._look()
        if self._leave_by is None:
            yield from self._take()
        elif not self._retired:
            yield Ask("writer_retire", (*self._who, holdings.term))
            self._retired = True
            yield from self._look()
        yield from self._give()
        if self._leave_by is not None and (not holdings.plan().give or self._now() > self._leave_by):
            yield from self._end()

    def _look(self) -> Generator[Ask, Sequence[Sequence[Any]], list[int]]:
        """Read the changes since the last look. Returns the beats of expired writers."""
        view = self._holdings.view
        ((text,),) = yield Ask("writer_look", (self._who[0], view.version), _LOOK_COLUMNS)
        found = json.loads(text)
        if found["version"] < view.version:  # installed again, or restored from a backup: drop the old view
            view = View()
            ((text,),) = yield Ask("writer_look", (self._who[0], 0), _LOOK_COLUMNS)
            found = json.loads(text)
        members = _members(found)
        changed = _slots(found)
        if found["slots"] == len(view.slots):
            slots = view.replaced(changed)
        else:  # the first look, or another number of slots: the answer has all slots
            slots = tuple(sorted(changed, key=lambda slot: slot.number))
        was_member = self._holdings.term is not None
        self._holdings.saw(View({member.instance: member for member in members}, slots, found["version"]))
        if was_member and self._holdings.term is None:
            log.warning("writer_expelled", stream=self._who[0], writer=self._who[1])
        silent = self._watch.observe((member.beat for member in members), self._now())
        return [member.beat for member in members if silent[member.beat] >= member.ttl]

    def _join(self, expired: list[int]) -> Asks:
        """Join. If another process has our name, wait until its beat has expired or has shown that it is alive."""
        namesake = self._holdings.view.members.get(self._who[1])
        replaced = [beat for beat in expired if namesake is not None and namesake.beat == beat]
        if namesake is not None and not replaced:
            self._namesake.add(namesake.beat)
            if len(self._namesake) > _SIGNS and not namesake.leaving:
                self._namesake.clear()
                raise InstanceTaken(
                    f"another process shares stream {self._who[0]} under the name {self._who[1]} and is alive: "
                    "give every process a name of its own."
                )
            return
        sent = self._now()
        ((term, _),) = yield Ask("writer_join", (*self._who, timedelta(seconds=self._ttl), self._address, replaced))
        self._beat_due = sent + self._ttl / BEATS
        self._namesake.clear()
        self._retired = False
        self._holdings.joined(term, sent)
        log.info("writer_joined", stream=self._who[0], writer=self._who[1], term=term)
        yield from self._look()
        yield from self._take()

    def _beat(self) -> Asks:
        sent = self._now()
        yield Ask("writer_beat", (*self._who, self._holdings.term))
        self._holdings.alive(sent)
        self._beat_due = sent + self._ttl / BEATS

    def _take(self) -> Asks:
        """Take the free slots that the plan gives to this writer. With a write in flight, wait for one slot."""
        wanted = self._holdings.plan().take
        if wanted:
            yield from self._take_these(wanted, 0.0)
            wanted = self._holdings.plan().take
        self._contested = {slot.number: self._contested.get(slot.number, self._now()) for slot in wanted}
        if wanted:
            longest = min(wanted, key=lambda slot: self._contested[slot.number])
            yield from self._take_these((longest,), min(PATIENCE, self._ttl / 8))

    def _take_these(self, wanted: Sequence[Slot], patience: float) -> Asks:
        numbers, terms = [slot.number for slot in wanted], [slot.term for slot in wanted]
        longest = timedelta(seconds=patience)
        rows = yield Ask("writer_take", (*self._who, self._holdings.term, numbers, terms, longest))
        self._holdings.moved((Slot(number, self._who[1], term) for number, term in rows), "taken")
        if rows:
            log.info("slots_taken", stream=self._who[0], writer=self._who[1], slots=len(rows))

    def _give(self) -> Asks:
        ready = self._holdings.drained(self._now())
        if not ready:
            return
        numbers, terms = [slot.number for slot, _ in ready], [slot.term for slot, _ in ready]
        receivers = {slot.number: receiver for slot, receiver in ready}
        rows = yield Ask("writer_give", (*self._who, numbers, terms, list(receivers.values())))
        self._holdings.moved((Slot(number, receivers[number], term) for number, term in rows), "given")
        if rows:
            log.info("slots_given", stream=self._who[0], writer=self._who[1], slots=len(rows))

    def _end(self) -> Asks:
        yield Ask("writer_leave", (*self._who, self._holdings.term))
        self._holdings.lost()
        self.has_left = True
        log.info("writer_left", stream=self._who[0], writer=self._who[1])

    def _own_beat(self) -> int | None:
        mine = self._holdings.view.members.get(self._who[1])
        return None if mine is None else mine.beat


def _members(found: dict[str, Any]) -> list[WriterMember]:
    columns = ("instances", "member_terms", "beats", "ttls", "addresses", "leaving")
    return [WriterMember(*values) for values in zip(*(found[name] or () for name in columns), strict=True)]


def _slots(found: dict[str, Any]) -> list[Slot]:
    columns = ("changed", "owners", "terms")
    return [Slot(*values) for values in zip(*(found[name] or () for name in columns), strict=True)]
