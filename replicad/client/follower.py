"""The state of a reader of streams: the position of every writer, and the rows of incomplete batches.

Takes blocks of received lines, yields events, and has the tokens from which to resume. Does no I/O; `follow_loop`
decides when to subscribe. A token moves only after the last row of a batch was yielded, and no row is yielded twice.

For rows there is a fast path: they are not parsed into commands, and their JSON is not read (about a million rows/s).
For readers that do not use the token of each row (`merged`) there is a faster path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import lt

from replicad.client.events import Gap, GenerationBegan, PositionMoved, Reset, RowBatch
from replicad.errors import RemoteProtocolError
from replicad.protocol.command import Command
from replicad.protocol.tokens import MAX_TOKEN, Vector
from replicad.streams.commands import BATCH, Position, Rdata, Writers, WriterSet

UNKNOWN = -(1 << 63) - 1  # below every bigint: a position that was not received yet
LINEAR = "*"  # the instance in POSITION that stands for all writers
WORDS = (None, "NOW", "EARLIEST")
MAX_UNLISTED = 100_000  # writers not named in WRITERS whose last token is kept, to discard repeated rows


Back = list[tuple[str | None, int]]  # whose rows above which position are void; None: the rows of all writers


class Mark:
    """One position, shared by the objects that move or read it."""

    __slots__ = ("at",)

    def __init__(self, at: int = UNKNOWN) -> None:
        self.at = at


class StreamProgress:
    """One stream of a reader: positions, the writers' numbers, the epoch.

    `answered`: the subscription was accepted on this connection. `live`: a POSITION was received, so rows count.
    """

    def __init__(self, name: str, token: str | None, *, linear: bool) -> None:
        """`token`: NOW (or None), EARLIEST, or a vector's text.

        Raises:
            BadToken: `token` is none of these.
        """
        self.name = name
        self.linear = linear
        self.answered = False
        self.live = False
        self._epoch: str | None = None
        self._writers = WriterSet()
        self._marks: dict[str, Mark] = {}
        self._all = Mark()  # the one position of a linear subscription
        self._handed_upto = UNKNOWN  # rows of writers without a mark may have been yielded up to here
        self._base: Vector | str | None  # the first token, or the one before the last change of writers
        if token in WORDS:
            self._base = token
        else:
            assert token is not None
            self._base = Vector.parse(token)
            self._epoch = self._base.epoch
            self._handed_upto = self._base.minimum

    def mark(self, instance: str) -> Mark:
        """The position that a row or a POSITION of `instance` moves."""
        if self.linear:
            return self._all
        found = self._marks.get(instance)
        if found is None:
            if len(self._marks) >= MAX_UNLISTED + len(self._writers.numbers):
                self._handed_upto = max([self._handed_upto, *(mark.at for mark in self._marks.values())])
                self._marks = {name: self._marks[name] for name in self._writers.numbers if name in self._marks}
            found = self._marks[instance] = Mark()
        return found

    def positions(self) -> dict[str, int]:
        """Every known position, by instance."""
        marks = {LINEAR: self._all} if self.linear else self._marks
        return {instance: mark.at for instance, mark in marks.items() if mark.at != UNKNOWN}

    @property
    def epoch(self) -> str | None:
        """The generation in which the positions are; None as long as it is not known."""
        return self._epoch

    @property
    def writers(self) -> Mapping[str, int]:
        """The small numbers of the listed writers, by name."""
        return self._writers.numbers

    def is_forked(self, epoch: str) -> bool:
        """Whether the token is of another generation than the server."""
        return self._epoch is not None and epoch != self._epoch

    def begin_generation(self, epoch: str) -> tuple[Back, bool]:
        """The server goes on in another generation, from the positions that it sent or accepted.

        True if rows that are now void will not come again on this connection.
        """
        at = self._vector()
        back: Back = []
        again = False
        if isinstance(at, Vector):
            at = at if self.answered else at.shortened()
            others = self._others_above(at.minimum)
            back = self._rewind(at)
            again = bool(back) and back[0][0] is None and (bool(at.ahead) or (self.answered and others))
        self._epoch = epoch
        self._writers.begin()  # the WRITERS line with the epoch begins a new set
        return back, again

    def rewind(self, token: Vector) -> Back:
        """Go back to a token of another generation, from which the next subscription begins."""
        back = self._rewind(token)
        self._epoch = token.epoch
        return back

    def move_back(self, instance: str, position: int) -> str | None:
        """A POSITION went back. Returns whose rows above it are void: the writer's, or all writers' (None)."""
        self._keep_minimum(self._vector())
        self.mark(instance).at = position
        if self._writers.numbers.keys() == {instance} and self._others_above(position):
            self._rewind(Vector(position))  # writers that are not listed have the position of the listed one
            return None
        return instance

    def set_writers(self, epoch: str, numbers: Mapping[str, int]) -> None:
        """Take a line of WRITERS; of another epoch after `begin_generation`."""
        if self.positions():
            self._keep_minimum(self._vector())
            self._base = self._vector()
        elif not numbers and not self.linear and self._base in (None, "NOW"):
            self._base = "EARLIEST"  # there is no writer yet, so NOW is the same as EARLIEST
        self._epoch = epoch
        had_writers = bool(self._writers.numbers)
        for name in self._writers.add(numbers):
            if had_writers and name in self._marks:
                self._marks[name].at = UNKNOWN  # POSITION sets it, whatever rows came before

    def position_received(self) -> None:
        """A POSITION was received: the set of writers before it is complete."""
        self._writers.close()

    def new_connection(self) -> None:
        """Keep only the positions in the token: the next connection begins there."""
        self.answered = self.live = False
        self._base = base = self._vector()
        if not self.linear:
            # Of writers that are not listed keep positions beyond the token: their rows may come again.
            known = self._writers.numbers
            self._marks = {
                instance: mark
                for instance, mark in self._marks.items()
                if isinstance(base, Vector) and (instance in known or mark.at > base.minimum)
            }
        self._writers.begin()

    def token(self, size: int = MAX_TOKEN) -> str | None:
        """The token to go on with, of at most `size` characters; None and NOW mean: from now on."""
        base = self._vector()
        return str(base.shortened(size)) if isinstance(base, Vector) else base

    def _vector(self) -> Vector | str | None:
        known = self.positions()
        if self.linear:
            return Vector(known[LINEAR], epoch=self._epoch) if known else self._base
        numbers = self._writers.numbers
        reported = {number: known[instance] for instance, number in numbers.items() if instance in known}
        if reported and len(reported) == len(numbers):
            return Vector(min(reported.values()), reported, self._epoch)
        if not isinstance(self._base, Vector):
            return self._base
        # Writers whose POSITION was not received keep their earlier position.
        stand = {number: reported.get(number, self._base.at(number)) for number in numbers.values()}
        return Vector(min([self._base.minimum, *stand.values()]), {**self._base.ahead, **stand}, self._epoch)

    def _keep_minimum(self, at: Vector | str | None) -> None:
        if isinstance(at, Vector):
            self._handed_upto = max(self._handed_upto, at.minimum)

    def _others_above(self, position: int) -> bool:
        """Whether rows above a position were yielded of writers that are not listed."""
        return not self.linear and any(
            mark.at > position for name, mark in self._marks.items() if name not in self._writers.numbers
        )

    def _rewind(self, to: Vector) -> Back:
        """Lower all positions to the positions of `to`."""
        base = self._vector()
        if not isinstance(base, Vector):
            return []
        if self.linear:
            if base.minimum <= to.minimum:
                return []
            if self._all.at != UNKNOWN:
                self._all.at = to.minimum
            self._base = Vector(to.minimum, epoch=to.epoch)
            return [(LINEAR, to.minimum)]
        positions = self.positions()
        known = {name: number for name, number in self._writers.numbers.items() if name in positions}
        nameless = base.ahead.keys() - known.values()
        if (
            max(self._handed_upto, base.minimum) > to.minimum
            or self._others_above(to.minimum)
            or any(base.ahead[number] > to.at(number) for number in nameless)
        ):
            for mark in self._marks.values():
                mark.at = min(mark.at, to.minimum)
            self._handed_upto = to.minimum
            self._base = Vector(to.minimum, epoch=to.epoch)
            return [(None, to.minimum)]
        back: Back = []
        for name, number in known.items():
            if self._marks[name].at > to.at(number):
                self._marks[name].at = to.at(number)
                back.append((name, to.at(number)))
        self._base = to
        return back


Understand = Callable[[bytes], Command | None]  # Connection.understand, or a wrapper of it

Received = RowBatch | PositionMoved | Reset | GenerationBegan | Gap | Command

MAX_LANES = 100_000  # writers of all streams together that are cached; others are looked up again when they write
FORKED = "forked"  # the reason of a Reset
_SHORT = 18  # digits; every number of at most that length is a bigint


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of the rows of one token, so that a peer that never ends a batch cannot fill our memory."""

    rows: int = 1_000_000
    characters: int = 1 << 28  # a quarter of a gigabyte: the rows of the largest sane transaction


class _Lane:
    """The rows of one writer of one stream, on this connection."""

    __slots__ = ("_lines", "batch", "characters", "instance", "mark", "prefix", "stream")

    def __init__(self, stream: str, instance: str, mark: Mark) -> None:
        self.stream = stream
        self.instance = instance
        self.mark = mark
        self.prefix = f"RDATA {stream} {instance} "
        self.batch: list[str] | None = None  # rows whose token was not received yet
        self.characters = 0  # of those rows
        self._lines: re.Pattern[str] | None = None

    def all_of(self, text: str) -> list[tuple[str, str]]:
        """Tokens and rows of the lines; nothing if any line is not a row with its token."""
        if self._lines is None:
            self._lines = re.compile(f"^{re.escape(self.prefix)}([0-9]{{1,{_SHORT}}}) (.+)$", re.MULTILINE)
        found: list[tuple[str, str]] = self._lines.findall(text)
        return found if len(found) == text.count("\n") else []

    def end_batch(self, last: str) -> list[str]:
        """End the batch with `last` and return its rows."""
        rows = [*(self.batch or ()), last]
        self.batch, self.characters = None, 0
        return rows


_NO_LANE = _Lane("", "", Mark())
_NO_LANE.prefix = "\n"  # no line begins so


class Follower:
    """Follows some streams over any number of connections, one after another. Not for two threads at once.

    `merged`: rows of one writer that came together may be one RowBatch, with the token of the last.

    `gap` is the gap that ended this connection's use, if any. `repeats` counts rows that came again and were not handed
    over, `dropped` rows of unwanted streams, or rows received before their POSITION.
    """

    def __init__(self, limits: BatchLimits | None = None, *, merged: bool = False) -> None:
        self._limits = limits or BatchLimits()
        self._merged = merged
        self._streams: dict[str, StreamProgress] = {}
        self._lanes: dict[str, _Lane] = {}  # by prefix; only of streams whose rows are wanted now
        self.gap: Gap | None = None
        self.repeats = 0
        self.dropped = 0

    # --- subscriptions ---

    def want(self, stream: str, token: str | None = None, *, linear: bool = False) -> None:
        """Follow a stream from `token`: NOW (or None), EARLIEST, or a vector's text. Earlier state is dropped.

        Raises:
            BadToken: the token is none of these.
        """
        self.drop(stream)
        self._streams[stream] = StreamProgress(stream, token, linear=linear)

    def drop(self, stream: str) -> None:
        """Stop following a stream; rows of it that are still received are discarded."""
        self._streams.pop(stream, None)
        self._forget_lanes(stream)

    def suspend(self, stream: str) -> None:
        """The subscription has ended on this connection: rows count only after the next subscription is accepted."""
        self._forget_lanes(stream)
        self._streams[stream].new_connection()

    def rewind(self, stream: str, token: str) -> list[Reset]:
        """History forked: go back to the server's `token`. Returns what to discard; empty if nothing is above it.

        Raises:
            BadToken: the token is no vector.
        """
        return [
            Reset(stream, instance, position, FORKED)
            for instance, position in self._streams[stream].rewind(Vector.parse(token))
        ]

    def streams(self) -> list[str]:
        """The wanted streams, in the order of `want`."""
        return list(self._streams)

    def token(self, stream: str) -> str | None:
        """The token to subscribe with: yielded rows do not come again, and no others are missed."""
        return self._streams[stream].token()

    def epoch(self, stream: str) -> str | None:
        """The generation of the stream in which the rows are; None as long as it is not known."""
        return self._streams[stream].epoch

    def positions(self, stream: str) -> Mapping[str, int]:
        """The position of each known writer; in a linear subscription only of `*`."""
        return self._streams[stream].positions()

    def writers(self, stream: str) -> Mapping[str, int]:
        """The small numbers of the listed writers, by name; empty in a linear subscription."""
        return self._streams[stream].writers

    def answered(self, stream: str) -> bool:
        """Whether the subscription to the stream was accepted on this connection."""
        return self._streams[stream].answered

    def new_connection(self) -> None:
        """On a new connection rows count only after a POSITION; rows of incomplete batches are dropped."""
        self._lanes.clear()
        self.gap = None
        for progress in self._streams.values():
            progress.new_connection()

    # --- received lines ---

    def feed(self, block: bytes, understand: Understand) -> Iterator[Received]:
        """Take whole lines, newlines included; yields events, and every command that is not about a stream.

        Lazy: positions advance as the events are taken. After a Gap, lines are ignored until `new_connection`.

        Raises:
            RemoteProtocolError: from `understand`, or the peer exceeds a bound.
        """
        if self.gap is not None:
            return
        if b"\r" not in block and b"\0" not in block:
            try:
                text = block.decode()
            except UnicodeDecodeError:
                pass  # `understand` raises for the line, after the lines before it
            else:
                yield from self._feed_text(text, understand)
                return
        for line in block.split(b"\n"):
            yield from self._line(line, understand)
            if self.gap is not None:
                return

    def _feed_text(self, text: str, understand: Understand) -> Iterator[Received]:
        if self._merged and text.startswith("RDATA "):
            merged, text = self._merge(text)
            if merged is not None:
                yield merged
        new = tuple.__new__  # what RowBatch() does, without a Python function in between
        prefix, lane, mark, end = _NO_LANE.prefix, _NO_LANE, _NO_LANE.mark, 0
        for line in text.split("\n"):
            if not line.startswith(prefix):
                end = line.find(" ", line.find(" ", 6) + 1) + 1  # behind `RDATA stream instance `
                lane = self._lanes.get(line[:end], _NO_LANE)
                prefix, mark = lane.prefix, lane.mark
            token, _, row = line[end:].partition(" ")
            if lane is _NO_LANE or not row:
                yield from self._line(line.encode(), understand)
                if self.gap is not None:
                    return
                prefix = _NO_LANE.prefix  # the line may have changed the lanes
            elif token == BATCH:
                self._hold(lane, row)
            elif len(token) <= _SHORT and token.isdigit() and token.isascii():
                position = int(token)
                rows = [row] if lane.batch is None else lane.end_batch(row)
                if position > mark.at:
                    mark.at = position
                    yield new(RowBatch, (lane.stream, lane.instance, position, rows))
                else:
                    self.repeats += len(rows)
            else:
                yield from self._line(line.encode(), understand)

    def _merge(self, text: str) -> tuple[RowBatch | None, str]:
        """The rows with which a block begins, and the lines behind them; None if they are not of one writer alone, in
        order, and new.
        """
        words = text.split(" ", 3)
        lane = self._lane(words[1], words[2]) if len(words) == 4 else None
        if lane is None or lane.batch is not None:
            return None, text
        end = text.find("\n", text.rfind(f"\n{lane.prefix}") + 1) + 1
        found = lane.all_of(text[:end])
        tokens = [int(token) for token, _ in found]
        if not found or tokens[0] <= lane.mark.at or not all(map(lt, tokens, islice(tokens, 1, None))):
            return None, text
        lane.mark.at = tokens[-1]
        return RowBatch(lane.stream, lane.instance, tokens[-1], [row for _, row in found]), text[end:]

    def _line(self, line: bytes, understand: Understand) -> Iterator[Received]:
        """The slow path: commands other than RDATA, and rows that the fast path cannot handle."""
        command = understand(line)
        match command:
            case None:
                pass
            case Rdata():
                yield from self._row(command)
            case Position():
                yield from self._position(command)
            case Writers():
                yield from self._writers(command)
            case _:
                yield command

    def _row(self, row: Rdata) -> Iterator[RowBatch]:
        lane = self._lane(row.stream, row.instance)
        if lane is None:
            self.dropped += 1
            return
        if row.token is None:
            self._hold(lane, row.row)
            return
        rows = lane.end_batch(row.row)
        if row.token > lane.mark.at:
            lane.mark.at = row.token
            yield RowBatch(row.stream, row.instance, row.token, rows)
        else:
            self.repeats += len(rows)

    def _hold(self, lane: _Lane, row: str) -> None:
        """Keep a row until its token is received."""
        if lane.batch is None:
            lane.batch = []
        lane.batch.append(row)
        lane.characters += len(row)
        if len(lane.batch) > self._limits.rows or lane.characters > self._limits.characters:
            raise RemoteProtocolError(
                f"a batch of {lane.stream} {lane.instance} goes beyond {self._limits.rows} rows or "
                f"{self._limits.characters} characters"
            )

    def _lane(self, stream: str, instance: str) -> _Lane | None:
        """The lane for rows of that writer; None if they are not wanted, or not yet."""
        progress = self._streams.get(stream)
        if progress is None or not progress.live:
            return None
        prefix = f"RDATA {stream} {instance} "
        found = self._lanes.get(prefix)
        if found is None:
            if len(self._lanes) >= MAX_LANES:
                self._lanes = {prefix: lane for prefix, lane in self._lanes.items() if lane.batch is not None}
            if len(self._lanes) >= MAX_LANES:
                raise RemoteProtocolError(f"more than {MAX_LANES} writers have each begun a batch and not ended it")
            found = self._lanes[prefix] = _Lane(stream, instance, progress.mark(instance))
        return found

    def _position(self, received: Position) -> Iterator[PositionMoved | Reset | Gap]:
        progress = self._streams.get(received.stream)
        if progress is None or progress.linear != (received.instance == LINEAR):
            return
        progress.position_received()
        if progress.linear:
            progress.answered = True
        mark = progress.mark(received.instance)
        have = mark.at
        if received.new < have:
            # Incomplete batches belong to the earlier history; rows after the new position come again.
            instance = progress.move_back(received.instance, received.new)
            self._drop_batches(received.stream, instance or LINEAR)
            if instance is None:
                self._forget_lanes(received.stream)
            progress.live = True
            yield Reset(received.stream, instance, received.new, "moved_back")
        elif have != UNKNOWN and (received.prev > have or self._drop_batches(received.stream, received.instance)):
            # Or an incomplete batch that will not be completed: its rows must come again.
            progress.live = False
            self.gap = Gap(received.stream, received.instance, have, received.prev)
            yield self.gap
        else:
            progress.live = True
            mark.at = received.new
            if received.new != have:
                yield PositionMoved(received.stream, received.instance, received.new)

    def _drop_batches(self, stream: str, instance: str) -> list[_Lane]:
        """Drop incomplete batches of a writer (`*`: of all writers of the stream); returns their lanes."""
        if instance == LINEAR:
            lanes = [lane for lane in self._lanes.values() if lane.stream == stream]
        else:
            found = self._lanes.get(f"RDATA {stream} {instance} ")
            lanes = [found] if found else []
        unfinished = [lane for lane in lanes if lane.batch is not None]
        for lane in unfinished:
            lane.end_batch("")
        return unfinished

    def _writers(self, received: Writers) -> Iterator[Reset | GenerationBegan | Gap]:
        progress = self._streams.get(received.stream)
        if progress is None:
            return
        if progress.is_forked(received.epoch):
            yield from self._begin_generation(progress, received.epoch)
        if self.gap is None:
            progress.answered = True
            progress.set_writers(received.epoch, dict(received.numbers))

    def _begin_generation(self, progress: StreamProgress, epoch: str) -> Iterator[Reset | GenerationBegan | Gap]:
        """The server is in another generation. The POSITIONs before have lowered the positions beyond the fork."""
        unfinished = self._drop_batches(progress.name, LINEAR)
        self._forget_lanes(progress.name)
        back, again = progress.begin_generation(epoch)
        gaps = [(lane.instance, lane.mark.at) for lane in unfinished] + ([(LINEAR, back[0][1])] if again else [])
        if gaps:
            # Missing rows are not sent on this connection, but after the next subscription.
            progress.live = False
            self.gap = Gap(progress.name, *gaps[0], gaps[0][1])
        for instance, position in back:
            yield Reset(progress.name, instance, position, FORKED)
        yield GenerationBegan(progress.name, epoch)
        if self.gap is not None:
            yield self.gap

    def _forget_lanes(self, stream: str) -> None:
        self._lanes = {prefix: lane for prefix, lane in self._lanes.items() if lane.stream != stream}
