"""A recording of the polls of a daemon, and a checker that replays it.

    python -m tests.recording FILE serve ...

runs the program `replicad` and records in FILE what each poll reads and publishes. The checker compares the published
positions with the rules of docs/positions.md. It does not use `lockwatch`, so a mistake there is not made here again.

A recording has one JSON object on each line:

    {"stream", "begin", "position", "per_writer"}
        `begin` is "watch": the stream is watched from here on, and these positions were published before; or
        "connection": readings that were not published are void
    {"stream", "poll", "last_value", "inserted", "flushed", "holders", "writers", "position", "per_writer"}
        one poll of the stream, in this order: the last value of its sequence, the end of the WAL read after it, the
        flushed end of the WAL (-1: beyond all readings), the holders (as of `lockwatch.Hold`); then the writers of the
        stream, and the positions that may be published from now on
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from replicad.cli import main
from replicad.daemon import daemon
from replicad.positions.horizon import Horizon
from replicad.positions.lockwatch import Hold, LockWatch
from replicad.positions.watched import Watched
from replicad.postgres.bridge import Connection

ALL = -1  # the WAL was flushed beyond all that was read


@dataclass(frozen=True, slots=True)
class PollRecord:
    """What one poll has read of one stream."""

    last_value: int
    inserted: int
    holders: tuple[Hold, ...]


class Recorder:
    """Writes a recording. A context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)  # a line at a time: the process may be killed
        self._last: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self, stream: str, what: str, position: int | None, per_writer: Mapping[str, int]) -> None:
        """A watch begins (`watch`), or goes on over a new connection (`connection`)."""
        self._write(stream, {"begin": what, "position": position, "per_writer": dict(per_writer)})

    def poll(
        self,
        stream: str,
        seen: PollRecord,
        flushed: int,
        *,
        writers: Collection[str],
        position: int | None,
        per_writer: Mapping[str, int],
    ) -> None:
        """Record what a poll has read of a stream, and what may be published; only if it has changed."""
        self._write(
            stream,
            {
                "last_value": seen.last_value,
                "inserted": seen.inserted,
                "flushed": flushed,
                "holders": [asdict(hold) for hold in seen.holders],
                "writers": sorted(writers),
                "position": position,
                "per_writer": dict(per_writer),
            },
        )

    def _write(self, stream: str, values: dict[str, Any]) -> None:
        line = json.dumps({"stream": stream, **values}) + "\n"
        if self._last.get(stream) != line:
            self._last[stream] = line
            self._file.write(line)


class RecordedWatch(LockWatch):
    """A `LockWatch` that remembers what it was fed, until that is recorded."""

    seen: PollRecord | None = None
    flushed = 0  # how far the WAL was on disk then

    def feed(self, last_value: int, inserted: int, holds: Iterable[Hold], writers: Collection[str] = ()) -> None:
        holds = tuple(holds)
        self.seen = PollRecord(last_value, inserted, holds)
        super().feed(last_value, inserted, holds, writers)

    def flushed_upto(self, flushed: int) -> None:
        super().flushed_upto(flushed)
        self.flushed = flushed

    def all_flushed(self) -> None:
        super().all_flushed()
        self.flushed = ALL


class RecordedHorizon(Horizon):
    """A `Horizon` that records all polls of sequences."""

    def __init__(self, *args: Any, recorder: Recorder, **named: Any) -> None:
        super().__init__(*args, **named)
        self._recorder = recorder

    def watch(self, name: str, *args: Any, **named: Any) -> None:
        super().watch(name, *args, **named)
        watched = self._watched[name]
        if watched.locks is not None:
            watched.locks = RecordedWatch(watched.locks.position, watched.locks.per_writer)
            self._record_begin("watch", watched)

    async def _pinned(self) -> Connection:
        before = self._connection
        connection = await super()._pinned()
        if connection is not before:
            for watched in self._watched.values():
                self._record_begin("connection", watched)
        return connection

    async def _poll_on(self, connection: Connection) -> Any:
        try:
            return await super()._poll_on(connection)
        finally:
            self._record()  # also readings before a step failed: the next poll may build on it

    async def _feed(self, *args: Any) -> int:
        self._record()  # a poll may read twice
        return await super()._feed(*args)

    def _record_begin(self, what: str, watched: Watched) -> None:
        if watched.locks is not None:
            self._recorder.begin(watched.name, what, watched.locks.position, watched.locks.per_writer)

    def _record(self) -> None:
        for watched in self._watched.values():
            locks = watched.locks
            if isinstance(locks, RecordedWatch) and locks.seen is not None:
                seen, locks.seen = locks.seen, None
                if watched.fork is None:
                    self._recorder.poll(
                        watched.name,
                        seen,
                        locks.flushed,
                        writers=watched.writers,
                        position=locks.position,
                        per_writer=locks.per_writer,
                    )


@dataclass(slots=True)
class _RecordedHold:
    bound: int | None  # None: not known
    writer: str | None  # None: may write as any writer


@dataclass(slots=True)
class _CheckedStream:
    """The checker's state of one stream."""

    position: int | None = None
    per_writer: dict[str, int] = field(default_factory=dict)
    last_value: int | None = None
    held: dict[str, _RecordedHold] = field(default_factory=dict)
    durable: int | None = None  # the highest last value that is known to be on disk
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (inserted, last value) that are not known to be


def check(lines: Iterable[str]) -> Iterator[str]:
    """The violations of the rules in a recording, one sentence for each."""
    streams: dict[str, _CheckedStream] = {}
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            name = entry["stream"]
        except (ValueError, KeyError, TypeError):
            yield f"line {number} is not of a recording"
            continue
        stream = streams.setdefault(name, _CheckedStream())
        problems = _begin(stream, entry) if "begin" in entry else _poll(stream, entry)
        yield from (f"line {number}: stream {name}: {problem}" for problem in problems)


def _begin(stream: _CheckedStream, entry: Mapping[str, Any]) -> list[str]:
    if entry["begin"] == "watch":
        stream.position, stream.per_writer = entry["position"], dict(entry["per_writer"])
    stream.last_value, stream.held, stream.durable = None, {}, stream.position
    stream.waiting.clear()
    return []


def _poll(stream: _CheckedStream, entry: Mapping[str, Any]) -> list[str]:
    last_value, writers = entry["last_value"], set(entry["writers"])
    stream.held = _bounds(stream, [Hold(**hold) for hold in entry["holders"]])
    stream.waiting.append((entry["inserted"], last_value))
    flushed = entry["flushed"]
    on_disk = [value for inserted, value in stream.waiting if flushed == ALL or inserted <= flushed]
    stream.waiting = [one for one in stream.waiting if flushed != ALL and one[0] > flushed]
    stream.durable = max([*on_disk, *([] if stream.durable is None else [stream.durable])], default=None)
    stream.last_value = last_value

    problems = []
    position, per_writer = entry["position"], entry["per_writer"]
    allowed = _allowed(stream, stream.held.values())
    if position is not None:
        if stream.position is not None and position < stream.position:
            problems.append(f"the position fell from {stream.position} to {position}")
        elif position != stream.position and (allowed is None or position > allowed):
            problems.append(f"position {position} was published, where {allowed} was safe: {_why(stream)}")
    for writer, at in per_writer.items():
        before = max(stream.per_writer.get(writer, stream.position or at), stream.position or at)
        allowed = _allowed(stream, [h for h in stream.held.values() if h.writer not in writers - {writer}])
        if at > max(before, position) and (allowed is None or at > allowed):
            problems.append(f"position {at} of {writer} was published, where {allowed} was safe: {_why(stream)}")
    stream.position, stream.per_writer = position, dict(per_writer)
    return problems


def _bounds(stream: _CheckedStream, holders: Iterable[Hold]) -> dict[str, _RecordedHold]:
    """The id below which no holder can write: the bound that it names itself; else the last value of the poll before
    the first that listed it; else, at the first poll, the published position.
    """
    before = stream.position if stream.last_value is None else stream.last_value
    found = {}
    for hold in holders:
        known = stream.held.get(hold.key)
        if known is not None:
            same = hold.prepared or hold.writer == known.writer
            found[hold.key] = _RecordedHold(known.bound, known.writer if same else None)
        elif hold.bound is not None:
            found[hold.key] = _RecordedHold(hold.bound, hold.writer)
        elif hold.prepared and stream.held:  # it may be any listed transaction, under another name
            bounds = [held.bound for held in stream.held.values()]
            found[hold.key] = _RecordedHold(None if None in bounds else min(b for b in bounds if b is not None), None)
        else:
            found[hold.key] = _RecordedHold(before, hold.writer)
    return found


def _allowed(stream: _CheckedStream, held: Iterable[_RecordedHold]) -> int | None:
    bounds = [stream.last_value, stream.durable, *(one.bound for one in held)]
    return None if None in bounds else min(bound for bound in bounds if bound is not None)


def _why(stream: _CheckedStream) -> str:
    held = ", ".join(f"{key} above {one.bound}" for key, one in sorted(stream.held.items()))
    return f"last value {stream.last_value}, on disk {stream.durable}, held by {held or 'no transaction'}"


def _main(path: str, *arguments: str) -> None:

    sys.argv = ["replicad", *arguments]
    with Recorder(Path(path)) as recorder:
        daemon.Horizon = partial(RecordedHorizon, recorder=recorder)  # type: ignore[assignment, misc]
        main(arguments)


if __name__ == "__main__":
    _main(*sys.argv[1:])
