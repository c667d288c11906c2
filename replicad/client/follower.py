"""The state of a reader of streams: the position of every writer, and the rows of incomplete batches.

Takes blocks of received lines, yields events, and has the tokens from which to resume. Does no I/O; `pursuit` decides
when to subscribe. A token moves only after the last row of a batch was yielded, and no row is yielded twice.

For rows there is a fast path: they are not parsed into commands, and their JSON is not read (about a million rows/s).
For readers to whom the token of each row says nothing (`merged`) there is a faster one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import lt

from replicad.client.events import Gap, GenerationBegan, PositionMoved, Reset, RowBatch
from replicad.client.progress import LINEAR, UNKNOWN, Mark, StreamProgress
from replicad.errors import RemoteProtocolError
from replicad.protocol.command import Command
from replicad.protocol.tokens import Vector
from replicad.streams.commands import BATCH, Position, Rdata, Writers

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
        """Tokens and rows of the lines; nothing if one of them is something else than a row with its token."""
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

    `gap` is the gap that ended this connection's use, if any. `repeats` counts rows that came again and were not
    handed over, `dropped` those of unwanted streams, or received before their POSITION.
    """

    def __init__(self, limits: BatchLimits | None = None, *, merged: bool = False) -> None:
        self._limits = limits or BatchLimits()
        self._merged = merged
        self._streams: dict[str, StreamProgress] = {}
        self._lanes: dict[str, _Lane] = {}  # by prefix; only of streams whose rows are wanted now
        self.gap: Gap | None = None
        self.repeats = 0
        self.dropped = 0

    # --- what is wanted ---

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
        """The subscription has ended on this connection: rows count only after the next one is accepted."""
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
