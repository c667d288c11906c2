"""Computes positions from last values and lists of locks. No clock and no connection.

The argument (docs/positions.md): a writer locks its table before it takes an id, and releases the lock after its
transaction has ended. Poll k reads the last value L_k of the sequence first, the holders of the lock afterwards. A
transaction that is not listed at poll k takes its ids after L_k was read. So they are above L_k. Hence a transaction
that is listed for the first time at poll k + 1 has the lower bound L_k. It keeps this bound as long as it is listed.
The smallest bound is the position.

Two events break the argument between two polls: a crash, and a sequence that is set back. Because of the first, nothing
is published that is not flushed, and all bounds begin again at the published position. After the second there is no
position: `went_back` stays set until the watch begins again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

_PENDING_MAX = 256  # unflushed readings that are remembered; forgetting one only makes publishing wait for the next


@dataclass(frozen=True, slots=True)
class Hold:
    """A transaction that may still write rows, as listed at one poll.

    `key` names it as long as it lasts (its virtual transaction, or a reservation); a prepared transaction may change
    it. `writer` is its application_name. `bound`: of a reservation, whose ids are all above it.
    """

    key: str
    writer: str | None = None
    prepared: bool = False
    bound: int | None = None


@dataclass(slots=True)
class _Held:
    bound: int | None  # None: held since before the first poll, nothing is known of its ids
    writer: str | None  # None: may write as any writer


class _FlushGate:
    """Which last values are on disk: after a crash, a sequence may give out ids again whose WAL was not flushed."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self._pending: deque[tuple[int, int]] = deque()

    def saw(self, last_value: int, inserted: int) -> None:
        """`last_value` was read before the WAL ended at `inserted`; the earliest such place counts."""
        newest = self._pending[-1][0] if self._pending else self.limit
        if newest is None or last_value > newest:
            if len(self._pending) == _PENDING_MAX:
                self._pending.pop()
            self._pending.append((last_value, inserted))

    def flushed_upto(self, flushed: int) -> None:
        """The WAL is on disk up to `flushed`."""
        while self._pending and self._pending[0][1] <= flushed:
            self.limit = self._pending.popleft()[0]

    def all_flushed(self) -> None:
        """Everything that was seen is on disk."""
        if self._pending:
            self.limit = self._pending[-1][0]
            self._pending.clear()

    def restart(self, limit: int | None) -> None:
        """Drop the readings that were not flushed: the crash may have undone them."""
        self.limit = limit
        self._pending.clear()


class LockWatch:
    """The persisted-up-to position of one sequence-fed table.

    `published` is the position that readers got before (from any daemon), `per_writer` the positions of single writers.
    They count as safe, and so does every position that this object has returned. `position` is None until a position is
    known.
    """

    def __init__(self, published: int | None = None, per_writer: Mapping[str, int] | None = None) -> None:
        self.position: int | None = published
        self.per_writer: dict[str, int] = dict(per_writer or {})
        self.went_back = False  # the sequence fell below a published position
        self.last_value: int | None = None
        self.lowest: str | None = None  # key of the hold that keeps the position below last_value, if one does
        self.held_newly = False  # the last list was the first with that hold
        self._held: dict[str, _Held] = {}
        self._safe: int | None = None  # what the holds allow, flushed or not
        self._safe_for: dict[str, int] = {}
        self._gate = _FlushGate()
        self._gate.restart(published)

    @property
    def someone_holds(self) -> bool:
        """Whether the last poll listed a holder. Then the next one must list again, even if the sequence has not
        moved.
        """
        return bool(self._held)

    @property
    def waits_for_flush(self) -> bool:
        """Whether a higher position could be published after a flush of the WAL."""
        limit = self._gate.limit
        wanted = [safe for safe in (self._safe, *self._safe_for.values()) if safe is not None]
        return bool(wanted) and (limit is None or limit < max(wanted))

    def restart(self) -> None:
        """The connection was lost and Postgres may have crashed: drop readings that were not published."""
        self.last_value = None
        self.held_newly = False
        self._held = {}
        self._safe = None
        self._safe_for = {}
        self._gate.restart(self.position)

    def feed(self, last_value: int, inserted: int, holds: Iterable[Hold], writers: Collection[str] = ()) -> None:
        """One poll: the sequence's last value, the end of the WAL read after it, then the holds listed after that.

        `writers` are the writers of this table: a hold by such a writer holds back that writer only. A poll may list
        again: it feeds the same last value with the later list, and a hold that is new in it has that value as bound.
        """
        published = [value for value in (self.position, *self.per_writer.values()) if value is not None]
        if self.went_back or (published and last_value < max(published)):
            self.went_back = True
            self.restart()
            return
        if self.last_value is not None and last_value < self.last_value:
            self.restart()
        before, self._held = self._held, self._bounds(holds)
        self.last_value = last_value
        self._gate.saw(last_value, inserted)
        self.lowest = min(self._held, key=self._rank, default=None)
        lowest = self._held[self.lowest].bound if self.lowest is not None else last_value
        if lowest is not None and lowest >= last_value:
            lowest, self.lowest = last_value, None
        self.held_newly = self.lowest is not None and self.lowest not in before
        self._safe = lowest
        self._safe_for = self._safe_positions(last_value, writers)
        self.per_writer = {writer: value for writer, value in self.per_writer.items() if writer in writers}
        self._show()

    def flushed_upto(self, flushed: int) -> None:
        """The WAL is on disk up to there; may raise the position."""
        self._gate.flushed_upto(flushed)
        self._show()

    def all_flushed(self) -> None:
        """The WAL is on disk beyond everything that was fed; may raise the position."""
        self._gate.all_flushed()
        self._show()

    def _bounds(self, holds: Iterable[Hold]) -> dict[str, _Held]:
        """The holds of this poll with the bound that each had, or gets now."""
        # Without an earlier reading only the published position is known to be below every id in flight.
        fresh = self.position if self.last_value is None else self.last_value
        # A prepared transaction may have had another name before: any of the old bounds may be its own.
        inherited = min(self._held.values(), key=_bound_rank).bound if self._held else fresh
        found: dict[str, _Held] = {}
        for hold in holds:
            known = self._held.get(hold.key)
            if known is None and hold.bound is not None:
                # Taken as it is, even if older than the last poll: ids can pass to another session under their bound.
                found[hold.key] = _Held(hold.bound, hold.writer)
            elif known is None:
                found[hold.key] = _Held(inherited if hold.prepared else fresh, hold.writer)
            elif hold.prepared or hold.writer == known.writer:
                # A prepared transaction has no application_name any more, but it cannot write more rows.
                found[hold.key] = known
            else:
                # If the name changes within a transaction, the writer of its rows is unknown.
                found[hold.key] = _Held(known.bound, None)
        return found

    def _safe_positions(self, last_value: int, writers: Collection[str]) -> dict[str, int]:
        """The safe position of each writer. A writer whose position is unknown is left out.

        The time grows with the sum of writers and holders, not with their product.
        """
        lowest: dict[str | None, int | None] = {None: last_value}  # by the writer held back; key None: all writers
        for held in self._held.values():
            writer = held.writer if held.writer in writers else None
            known = lowest.get(writer, last_value)
            lowest[writer] = None if held.bound is None or known is None else min(held.bound, known)
        common = lowest.pop(None)
        if common is None:
            return {}
        safe = dict.fromkeys(writers, common)
        for writer, bound in lowest.items():
            if bound is None:
                del safe[writer or ""]
            else:
                safe[writer or ""] = min(bound, common)
        return safe

    def _show(self) -> None:
        """Raise the positions to the highest ids that are both safe and flushed. They never fall here."""
        limit = self._gate.limit
        if limit is None:
            return
        if self._safe is not None and (self.position is None or self.position < min(self._safe, limit)):
            self.position = min(self._safe, limit)
        if self.position is None:
            return
        position, shown = self.position, self.per_writer
        for writer, safe in self._safe_for.items():
            at = limit if safe > limit else safe
            if at > shown.get(writer, position) or writer not in shown:
                shown[writer] = at if at > position else position
            elif shown[writer] < position:
                shown[writer] = position

    def _rank(self, key: str) -> tuple[int, int]:
        return _bound_rank(self._held[key])


def _bound_rank(held: _Held) -> tuple[int, int]:
    return (0, 0) if held.bound is None else (1, held.bound)


class TableWatch:
    """The positions of writers that publish their own. They are passed on when they are flushed.

    The linear position is the lowest one. A writer that appears late does not lower it. Where a writer's position
    falls, `went_back` is set, and no position is shown until the watch begins again.
    """

    def __init__(self, published: int | None = None, per_writer: Mapping[str, int] | None = None) -> None:
        self.position: int | None = published
        self.per_writer: dict[str, int] = dict(per_writer or {})
        self.went_back = False
        self.lowest: str | None = None  # the writer that is behind the others
        self._shown: dict[str, int] = {}  # the rows of the table, before late writers were raised to the position
        self._pending: deque[tuple[dict[str, int], int]] = deque()

    @property
    def waits_for_flush(self) -> bool:
        """Whether a flush of the WAL would allow a higher position."""
        return bool(self._pending)

    def restart(self) -> None:
        """The connection was lost: drop readings that were not published."""
        self._pending.clear()

    def feed(self, per_writer: Mapping[str, int], inserted: int) -> None:
        """The table's rows for this stream, and an end of the WAL read after them."""
        rows = dict(per_writer)
        if rows and rows != (self._pending[-1][0] if self._pending else self._shown):
            if len(self._pending) == _PENDING_MAX:
                self._pending.pop()
            self._pending.append((rows, inserted))

    def flushed_upto(self, flushed: int) -> None:
        """The WAL is on disk up to there; may raise the positions."""
        while self._pending and self._pending[0][1] <= flushed:
            self._show(self._pending.popleft()[0])

    def all_flushed(self) -> None:
        """The WAL is on disk beyond everything that was fed; may raise the positions."""
        if self._pending:
            self._show(self._pending[-1][0])
            self._pending.clear()

    def _show(self, rows: dict[str, int]) -> None:
        fell = any(rows.get(writer, value) < value for writer, value in (self._shown or self.per_writer).items())
        if fell or self.went_back:
            self.went_back = True
            return
        lowest = min(rows.values())
        self.position = lowest if self.position is None else max(self.position, lowest)
        self.per_writer = {writer: max(value, self.position) for writer, value in rows.items()}
        self.lowest = min(rows, key=lambda writer: rows[writer]) if lowest < max(rows.values()) else None
        self._shown = rows
