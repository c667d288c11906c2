"""A client on a raw socket that keeps what it is sent: `Ledger`s, a connection, and the will to come back.

It goes on from its tokens after every disconnection, at the same daemon or at another one. What it received is
remembered for the report on a failed run.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from random import Random

import trio

from .ledger import Difference, Ledger, Order, Row

Address = tuple[str, int]

_AGAIN = 0.05  # seconds between two tries to connect
_RETRY = 0.2  # seconds before a stream that cannot be served now is asked for again
_SILENCE = 20.0  # seconds without a byte, PINGs included, after which the connection counts as dead
_REMEMBERED = 4000  # lines
_VOID = ("bad_token", "token_expired", "token_ahead")  # answers after which the token is of no use
_STOPPED = re.compile(r"row_(?:unreadable|too_long): stream (\S+) stops")
_LATER = (
    "stream_refused",
    "unknown_stream",
    "database_unavailable",
    "database_refused",
    "database",
    "row_unreadable",
)


class Holder:
    """One client: `order` over `streams`, at one of the `addresses` at a time."""

    def __init__(
        self, name: str, order: Order, streams: Sequence[str], addresses: Sequence[Address], rng: Random | None = None
    ) -> None:
        self.name = name
        self.order = order
        self.ledgers = {stream: Ledger(stream, order) for stream in streams}
        self.addresses = list(addresses)
        self.place = 0  # which of the addresses
        self.lines: deque[tuple[float, str]] = deque(maxlen=_REMEMBERED)
        self._rng = rng or Random(0)
        self._session = trio.CancelScope()
        self._to_ask: list[str] = []
        self._asking: str | None = None
        self._retry_at = 0.0
        self.away = trio.Event()  # set: it may connect
        self.away.set()

    # --- life ---

    async def run(self) -> None:
        """Connect, follow, and connect again, until cancelled."""
        while True:
            await self.away.wait()
            with trio.CancelScope() as self._session, suppress(OSError, trio.BrokenResourceError):
                await self._follow()
            await trio.sleep(_AGAIN)

    def hop(self, place: int | None = None) -> None:
        """Disconnect, and go on at that daemon, or at one of them."""
        self.place = self._rng.randrange(len(self.addresses)) if place is None else place
        self._session.cancel()

    def leave(self) -> None:
        """Disconnect and stay away until `come_back`."""
        self.away = trio.Event()
        self._session.cancel()

    def come_back(self, place: int | None = None) -> None:
        """Go on from the tokens."""
        if place is not None:
            self.place = place
        self.away.set()

    async def _follow(self) -> None:
        async with await trio.open_tcp_stream(*self.addresses[self.place]) as stream:
            self._note(f"-- connected to daemon {self.place}")
            for ledger in self.ledgers.values():
                ledger.connected()
            self._to_ask = [] if self.order is Order.PLAIN else list(self.ledgers)
            self._asking = None
            self._retry_at = 0.0
            try:
                if self.order is Order.PLAIN:
                    await self._send(stream, "REPLICATE")
                await self._read(stream)
            finally:
                self._note("-- disconnected")

    async def _read(self, stream: trio.SocketStream) -> None:
        rest = b""
        heard = trio.current_time()
        while True:
            await self._ask(stream)
            data: bytes | bytearray | None = None
            with trio.move_on_after(0.1 if self._to_ask and self._asking is None else 1.0):
                data = await stream.receive_some(65536)
            if data is None:
                if trio.current_time() > heard + _SILENCE:
                    self._note("-- silent for too long")
                    return
                continue
            if not data:
                return
            heard = trio.current_time()
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                self.take(line.decode())

    async def _ask(self, stream: trio.SocketStream) -> None:
        """One REPLICATE at a time, so that each ERROR has one that it answers."""
        if self._asking is None and self._to_ask and trio.current_time() >= self._retry_at:
            self._asking = self._to_ask.pop(0)
            await self._send(stream, self.ledgers[self._asking].request())

    async def _send(self, stream: trio.SocketStream, line: str) -> None:
        self._note(f"C> {line}")
        await stream.send_all(line.encode() + b"\n")

    def _note(self, line: str) -> None:
        self.lines.append((time.time(), line))

    # --- lines ---

    def take(self, line: str) -> None:
        """One line of the server."""
        word, _, rest = line.partition(" ")
        if word == "PING":
            return
        self._note(line)
        if word == "RDATA":
            name, writer, token, row = rest.split(" ", 3)
            if (ledger := self.ledgers.get(name)) is not None:
                ledger.row(writer, token, row)
        elif word == "POSITION":
            name, writer, previous, new = rest.split(" ")
            if (ledger := self.ledgers.get(name)) is not None:
                ledger.position(writer, int(previous), int(new))
            if name == self._asking:
                self._asking = None
        elif word == "WRITERS":
            name, epoch, *pairs = rest.split(" ")
            numbers = {writer: int(number) for writer, _, number in (pair.rpartition("=") for pair in pairs)}
            if (ledger := self.ledgers.get(name)) is not None:
                ledger.writers(epoch, numbers)
        elif word == "ERROR":
            stopped = _STOPPED.match(rest)
            if stopped is not None and stopped[1] != self._asking:
                self._ask_again(stopped[1])
            elif self._asking is not None:
                self._answer(rest)

    def _answer(self, text: str) -> None:
        assert self._asking is not None
        code = text.partition(":")[0]
        if code in _VOID:
            self.ledgers[self._asking].refused(text)
        elif code in _LATER:
            self._retry_at = trio.current_time() + _RETRY
        else:
            return
        self._to_ask.append(self._asking)
        self._asking = None

    def _ask_again(self, stream: str) -> None:
        """A subscription by name has ended before a row that cannot be read."""
        if self.order is not Order.PLAIN and stream in self.ledgers:
            self.ledgers[stream].connected()
            self._to_ask.append(stream)
            self._retry_at = trio.current_time() + _RETRY

    # --- the end ---

    def compare(self, tables: Mapping[str, Iterable[Row]]) -> dict[str, Difference]:
        """By stream, what differs from the tables; streams without a difference are left out."""
        found = {name: ledger.compare(tables[name]) for name, ledger in self.ledgers.items() if name in tables}
        return {name: difference for name, difference in found.items() if difference}

    def findings(self) -> list[str]:
        """What no server may do, and what it did."""
        return [f"{name}: {finding}" for name, ledger in self.ledgers.items() for finding in ledger.findings]

    def counts(self) -> dict[str, int]:
        """How often it was told what, over all streams."""
        found: dict[str, int] = {}
        for ledger in self.ledgers.values():
            for what, times in ledger.counts.items():
                found[what] = found.get(what, 0) + times
        return found

    def trace(self, stream: str, last: int = 60) -> str:
        """The last lines of one stream; rows that follow each other, and positions that move on, are one line."""
        found: list[str] = []
        run: list[list[str]] = []
        for at, line in self.lines:
            words = line.split(" ", 4)
            if line.startswith(("--", "C>", "ERROR")):
                if words[:2] == ["C>", "REPLICATE"] and words[2:3] not in ([], [stream]):
                    continue
            elif words[1:2] != [stream]:
                continue
            elif words[0] == "RDATA" or (words[0] == "POSITION" and int(words[4]) > int(words[3])):
                run.append(words)
                continue
            found += [*_summary(run), f"{time.strftime('%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03d} {line}"]
            run = []
        return "\n".join(f"    {line[:200]}" for line in [*found, *_summary(run)][-last:])


def _summary(run: list[list[str]]) -> list[str]:
    if not run:
        return []
    rows = [words for words in run if words[0] == "RDATA"]
    ids = [int(words[4].strip("[").partition(",")[0]) for words in rows]
    told = {words[2]: words[4] for words in run if words[0] == "POSITION"}
    writers = ", ".join(sorted({words[2] for words in rows}))
    sent = f"{len(rows)} rows {ids[0]}..{ids[-1]} of {writers}" if rows else "no rows"
    return [f"             {sent}; then {' '.join(f'{writer} {at}' for writer, at in told.items()) or 'no POSITION'}"]
