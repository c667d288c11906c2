"""Readers of streams that use no raw socket: pages, server-sent events, Redis, `replicad tail`, and Spark's source.

Each keeps what it was sent, discards what it is told to discard, and goes on by the rules of docs/transports.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import trio

from replicad.client.async_client import open_client
from replicad.client.events import Connected, Disconnected, Reset, RowBatch
from replicad.config.settings import Address
from replicad.errors import DataLoss, ReplicadError
from tests.sse import event_source

from .ledger import Difference, Row

AGAIN = 0.1  # seconds between two tries
BETWEEN = 0.6  # seconds between two pages, and between two micro-batches
REMEMBERED = 2000  # lines
EARLIEST = "EARLIEST"
_REFUSED = re.compile(r"^replicad: .*\bstream (\S+) (?:cannot be served|is locked)", re.MULTILINE)
VOID = ("bad_token", "token_expired", "token_ahead")
BROKEN = (OSError, EOFError, AssertionError, trio.BrokenResourceError, trio.TooSlowError, ReplicadError)

Place = tuple[str, int]


class Kept:
    """The rows of one stream, by writer and token."""

    def __init__(self) -> None:
        self.rows: defaultdict[str, dict[int, list[str]]] = defaultdict(dict)
        self._batch: list[str] = []

    def connected(self) -> None:
        """Rows of a batch that did not come whole come again."""
        self._batch.clear()

    def row(self, writer: str, token: int | None, fields: Sequence[Any]) -> None:
        """One row; without a token more rows of the same token follow."""
        self._batch.append(str(fields[-1]))
        if token is not None:
            self.batch(writer, token, self._batch)
            self._batch = []

    def batch(self, writer: str, token: int, bodies: list[str]) -> None:
        """All rows of a token."""
        self.rows[writer][token] = bodies

    def more(self, writer: str, token: int, body: str) -> None:
        """One more row of a token."""
        self.rows[writer].setdefault(token, []).append(body)

    def discard(self, writer: str | None, above: int | None) -> None:
        """The rows above a token are void: those of one writer, or of all."""
        for name in [*self.rows] if writer in (None, "*") else [writer]:
            kept = self.rows[str(name)]
            self.rows[str(name)] = {} if above is None else {at: rows for at, rows in kept.items() if at <= above}
        self._batch.clear()

    def compare(self, table: Iterable[Row]) -> Difference:
        """What differs from the rows of the table."""
        there = set(table)
        have = {(w, at, body) for w, kept in self.rows.items() for at, bodies in kept.items() for body in bodies}
        return Difference(tuple(sorted(there - have)), tuple(sorted(have - there)))


class Reader(ABC):
    """One program that follows streams. `places`: where the daemons are for it."""

    def __init__(self, name: str, streams: Sequence[str], places: Sequence[Place]) -> None:
        self.name = name
        self.kept = {stream: Kept() for stream in streams}
        self.places = list(places)
        self.place = 0
        self.lines: deque[tuple[float, str, str]] = deque(maxlen=REMEMBERED)
        self._counts: Counter[str] = Counter()
        self._found: list[str] = []

    @abstractmethod
    async def run(self) -> None:
        """Follow until cancelled."""

    @property
    def address(self) -> Place:
        """The daemon of now."""
        return self.places[self.place]

    def discard(self, stream: str, writer: str | None, above: int | None, why: str) -> None:
        """Rows are void."""
        self.note(stream, f"-- discard {writer or 'all'} above {above}: {why}")
        self._counts[f"{self.name}: {why}"] += 1
        self.kept[stream].discard(writer, above)

    def note(self, stream: str, line: str) -> None:
        """Remember for the report."""
        self.lines.append((time.time(), stream, line))

    def compare(self, tables: Mapping[str, Iterable[Row]]) -> dict[str, Difference]:
        """By stream, what differs from the tables."""
        found = {name: kept.compare(tables[name]) for name, kept in self.kept.items() if name in tables}
        return {name: difference for name, difference in found.items() if difference}

    def findings(self) -> list[str]:
        """What may not happen, and did."""
        return self._found

    def counts(self) -> dict[str, int]:
        """How often what happened."""
        return dict(self._counts)

    def trace(self, stream: str, last: int = 40) -> str:
        """The last lines of one stream."""
        found = [
            f"    {time.strftime('%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03d} {line[:200]}"
            for at, name, line in self.lines
            if name in (stream, "*")
        ]
        return "\n".join(found[-last:])


class Pages(Reader):
    """Asks for one page of rows after another over HTTP, at any of the daemons."""

    async def run(self) -> None:
        """`Reader.run`."""
        async with trio.open_nursery() as nursery:
            for stream in self.kept:
                nursery.start_soon(self._ask_for, stream)

    async def _ask_for(self, stream: str) -> None:
        token, number = EARLIEST, 0
        while True:
            number += 1
            self.place = number % len(self.places)
            with suppress(*BROKEN), trio.move_on_after(30):
                status, headers, body = await get(self.address, f"/streams/{stream}/rows?after={token}&limit=200")
                if status == 200:
                    token = self._take(stream, headers["replicad-next"], body)
                else:
                    token = self._refused(stream, token, status, json.loads(body))
            await trio.sleep(BETWEEN)

    def _take(self, stream: str, following: str, body: bytes) -> str:
        rows = [json.loads(line) for line in body.splitlines()]
        if rows:
            self.note(stream, f"{len(rows)} rows, {rows[0]['token']}..{rows[-1]['token']}, then {following}")
        for row in rows:
            self.kept[stream].row(row["instance"], row["token"], row["row"])
        return following

    def _refused(self, stream: str, token: str, status: int, problem: dict[str, Any]) -> str:
        self.note(stream, f"{status} {problem} for {token}")
        if problem["code"] not in VOID:
            return token
        if status == 409 and "token" in problem and problem["code"] == "bad_token":
            self.discard(stream, None, int(problem["discard_after"]), "told to go back")
            return str(problem["token"])
        self.discard(stream, None, None, f"begins again after {problem['code']}")
        return EARLIEST


class Events(Reader):
    """A browser's EventSource for each stream. It goes on with the id of the last event that it has."""

    async def run(self) -> None:
        """`Reader.run`."""
        async with trio.open_nursery() as nursery:
            for number, stream in enumerate(self.kept):
                nursery.start_soon(self._follow, stream, number)

    async def _follow(self, stream: str, number: int) -> None:
        last = EARLIEST
        while True:
            number += 1
            host, port = self.places[number % len(self.places)]
            kept = self.kept[stream]
            kept.connected()
            with suppress(*BROKEN):
                async with event_source(Address(host, port), f"/streams/{stream}/live", last) as source:
                    self.note(stream, f"-- connected with {last}: {source.status}")
                    if source.status != 200:
                        problem = await source.body()
                        if problem["code"] in VOID:
                            self.discard(stream, None, None, f"begins again after {problem['code']}")
                            last = EARLIEST
                    while source.status == 200:
                        event = await source.next()
                        last = event.id or last
                        self.note(stream, f"{event.name} {event.id} {event.data}")
                        if event.name == "message":
                            kept.row(event.data["instance"], event.data["token"], event.data["row"])
                        elif event.name == "reset":
                            self.discard(stream, event.data["instance"], event.data["discard_after"], "reset")
                        elif event.name == "refused":
                            break
            await trio.sleep(AGAIN)


class OverRedis(Reader):
    """Our client, with rows over Redis."""

    def __init__(self, name: str, streams: Sequence[str], places: Sequence[Place], url: str, server: str) -> None:
        super().__init__(name, streams, places)
        self._url = url
        self._server = server

    async def run(self) -> None:
        """`Reader.run`."""
        tokens: dict[str, str | None] = dict.fromkeys(self.kept, EARLIEST)
        daemons = [f"{host}:{port}" for host, port in self.places]
        while True:
            try:
                async with (
                    open_client(self._url, name=self.name, server_name=self._server, daemon=daemons) as client,
                    client.follow(
                        {name: token or EARLIEST for name, token in tokens.items()}, also=(Connected, Disconnected)
                    ) as follower,
                ):
                    async for event in follower:
                        self._take(event)
                        tokens.update(follower.tokens())
            except BROKEN as error:
                self.note("*", f"-- {type(error).__name__}: {error}")
                self._counts[f"{self.name}: {type(error).__name__}"] += 1
            await trio.sleep(AGAIN)

    def _take(self, event: object) -> None:
        if isinstance(event, RowBatch):
            self.note(event.stream, f"{event.instance} {event.token}: {len(event.rows)} rows")
            bodies = [str(json.loads(row)[-1]) for row in event.rows]
            self.kept[event.stream].batch(event.instance, event.token, bodies)
        elif isinstance(event, Reset):
            self.discard(event.stream, event.instance, event.token, f"reset {event.reason}")
        elif isinstance(event, Disconnected):
            self.note("*", f"-- disconnected, again in {event.retry_in:.1f} s: {event.error}")
        else:
            self.note("*", f"-- {event}")


class Tail(Reader):
    """`replicad tail --json` as a process, all streams at one daemon."""

    async def run(self) -> None:
        """`Reader.run`. It ends where its first request for a stream is refused, as any command does, and not later."""
        words = [sys.executable, "-m", "replicad", "tail", *self.kept, "--from", EARLIEST, "--json"]
        words += ["--server", f"{self.address[0]}:{self.address[1]}"]
        while True:
            process = await trio.lowlevel.open_process(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            said: list[str] = []
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._remember, process, said)
                    lines = await self._follow(process)
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
            refused = _REFUSED.findall("".join(said))
            if lines and not any(name in self.kept and not any(self.kept[name].rows.values()) for name in refused):
                self._found.append(f"tail ended with {await process.wait()} after {lines} lines")
                return
            self._counts["tail: did not begin"] += 1
            for stream in self.kept:
                self.discard(stream, None, None, "begins again")
            await trio.sleep(AGAIN)

    async def _follow(self, process: trio.Process) -> int:
        assert process.stdout is not None
        rest, lines = b"", 0
        before: tuple[str, str, int] | None = None
        async for data in process.stdout:
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                before = self._take(json.loads(line), before)
                lines += 1
        return lines

    async def _remember(self, process: trio.Process, said: list[str]) -> None:
        assert process.stderr is not None
        async for data in process.stderr:
            said.append(data.decode())
            for line in data.decode().splitlines():
                self.note("*", f"stderr: {line}")

    def _take(self, found: dict[str, Any], before: tuple[str, str, int] | None) -> tuple[str, str, int] | None:
        """Lines of one token follow each other."""
        stream, writer, token = found["stream"], found["instance"], found["token"]
        if "reset" in found:
            self.discard(stream, writer, token, f"reset {found['reset']}")
            return None
        self.note(stream, f"{writer} {token}")
        kept, body = self.kept[stream], str(found["row"][-1])
        if before == (stream, writer, token):
            kept.more(writer, token, body)
        else:
            kept.batch(writer, token, [body])
        return stream, writer, token


class SparkSource(Reader):
    """A streaming query on one stream, in the calls and the order in which Spark makes them. It needs no JVM.

    A loss of data (the history forked) ends a query; then its user removes its results, and takes another checkpoint.
    """

    async def run(self) -> None:
        """`Reader.run`."""
        async with trio.open_nursery() as nursery:
            for stream in self.kept:
                nursery.start_soon(self._query, stream)

    async def _query(self, stream: str) -> None:
        offsets: list[dict[str, Any]] = []
        while True:
            try:
                rows = await trio.to_thread.run_sync(self._batch, stream, offsets, abandon_on_cancel=True)
            except DataLoss as error:
                self.note(stream, f"-- {error}")
                self.discard(stream, None, None, "another checkpoint")
                offsets = []
            except Exception as error:  # noqa: BLE001 - a query that fails is started again
                self.note(stream, f"-- {type(error).__name__}: {error}")
                self._counts[f"{self.name}: {type(error).__name__}"] += 1
            else:
                fresh: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
                for row in rows:
                    fresh[row["instance"], row["token"]].append(str(json.loads(row["row"])[-1]))
                for (writer, token), bodies in fresh.items():
                    self.kept[stream].batch(writer, token, bodies)
                if rows:
                    self.note(stream, f"{len(rows)} rows up to {offsets}")
            await trio.sleep(BETWEEN)

    def _batch(self, stream: str, offsets: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One micro-batch. A planned one whose tasks failed is read again first, as after a restart of the query."""
        from tests.spark.harness import make_source, read_tasks, struct, through_json

        host, port = self.address
        options = {"host": host, "port": str(port), "stream": stream, "pollTimeout": "0", "retryInterval": "50ms"}
        source = make_source(options)
        reader: Any = source.streamReader(struct(source))
        if not offsets:
            offsets.append(through_json(reader.initialOffset()))
        if len(offsets) == 1:
            end = through_json(reader.latestOffset(offsets[0], reader.getDefaultReadLimit()))
            if end == offsets[0]:
                return []
            offsets.append(end)
        rows = read_tasks(source, reader.partitions(*offsets))
        del offsets[0]
        return rows


async def get(address: Place, path: str) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own."""
    async with await trio.open_tcp_stream(*address) as stream:
        host = f"{address[0]}:{address[1]}"
        await stream.send_all(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        received = b""
        async for data in stream:
            received += data
    head, ended, body = received.partition(b"\r\n\r\n")
    if not ended:
        raise EOFError("no answer")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if len(body) != int(headers["content-length"]):
        raise EOFError(f"{len(body)} of {headers['content-length']} bytes")
    return int(first.split(" ")[1]), headers, body
