"""The checker: clients that keep what they are sent by the rules of protocol.md, and share no code with the product.

A client finds by itself: a row twice, a row out of order, a row that was never committed, a POSITION that does not
begin where the client is, a row at or below its position that it was not sent. At a quiet moment it has exactly the
rows of the table.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import trio

from .links import End, some

AGAIN = 0.2  # seconds between two tries
PATIENCE = 120.0  # seconds in which a token that is ahead must become valid
_RESUME = re.compile(r"discard the rows after (\S+) and resume from (\S+)$")
IDLE = 10.0  # seconds between two PINGs where nothing comes
REMEMBERED = 60  # lines, for the report
UNKNOWN = -1  # a position below all


class Violation(Exception):
    """What may not happen."""


class Client:
    """Follows one stream, in one order, at any of the daemons, until it is cancelled."""

    def __init__(self, world: Any, name: str, stream: str, *, linear: bool, by_writer: bool, acks: bool) -> None:
        self.world = world
        self.name = name
        self.stream = stream
        self.linear = linear
        self.by_writer = by_writer
        self.acks = acks
        self.rows: dict[int, tuple[str, str]] = {}
        self.epoch = ""
        self.positions: dict[str, int] | None = None  # None: it has nothing, and begins with EARLIEST
        self.numbers: dict[str, int] = {}
        self.resets = 0
        self.voided = 0  # rows that it was told to discard
        self.begins_anew = 0
        self.lines: deque[str] = deque(maxlen=REMEMBERED)
        self._coming: dict[str, int] | None = None  # a set of writers that is not complete
        self._link: End | None = None
        self._ahead_since: float | None = None
        self._first_answer = True

    # --- life ---

    async def run(self) -> None:
        while True:
            try:
                if self.acks and self.positions and self.world.chance.random() < 0.3:
                    await self._acknowledge()
                await self._follow()
            except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
                pass
            finally:
                if self._link is not None:
                    self._link.close()
                    self._link = None
            await trio.sleep(self.world.chance.uniform(0, AGAIN))

    async def _acknowledge(self) -> None:
        """Acknowledge on a connection that follows nothing, as after a restart of the client."""
        if UNKNOWN in self.positions.values():  # type: ignore[union-attr]
            return
        link = self._link = await self.world.connect()
        await link.send_all(f"NAME {self.name}\n{self._ack()}".encode())
        await trio.sleep(self.world.chance.choice((0.01, 3.0)))
        link.close()

    def _ack(self) -> str:
        assert self.positions is not None
        return f"FEDERATION_ACK {self.name} {min(self.positions.values())} {self.stream}\n"

    def cut(self) -> None:
        """The network loses the connection."""
        if self._link is not None:
            self._link.cut()

    async def _follow(self) -> None:
        chance = self.world.chance
        link = self._link = await self.world.connect()
        self._note("connected")
        slow, rest = True, b""
        self._coming = None
        await link.send_all(f"NAME {self.name}\n{self._request()}".encode())
        acked: dict[str, int] | None = None
        pinged = trio.current_time()
        while True:
            data = b""
            with trio.move_on_after(IDLE):
                data = await link.receive_some(some(chance) if slow else 16384)
                if not data:
                    raise EOFError
            now = trio.current_time()
            if now >= pinged + (IDLE if acked == self.positions else 1.0):
                pinged = now
                await link.send_all(b"PING 1\n")
                if self.acks and self.positions and acked != self.positions:
                    acked = dict(self.positions)
                    await link.send_all(self._ack().encode())
            slow = chance.random() < 0.2
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith((b"PING", b"SERVER", b"NAME")):
                    continue
                text = line.decode()
                self._note(text)
                self.world.trace("line", self.name, text)
                answer = self._take(text)
                if answer:
                    self._note(f"> {answer}".rstrip())
                    await link.send_all(answer.encode())
            if lines and chance.random() < self.world.slowness:
                await trio.sleep(chance.expovariate(1 / 0.3))

    def _note(self, text: str) -> None:
        self.lines.append(f"{trio.current_time():.4f} {text}")

    def _request(self) -> str:
        self._first_answer = True
        return f"REPLICATE {self.stream} {self.token()}{' linear' if self.linear else ''}\n"

    def token(self) -> str:
        """Where it resumes."""
        if not self.positions or UNKNOWN in self.positions.values():
            self.positions, self.numbers = None, {}
            return "EARLIEST"
        lowest = min(self.positions.values())
        ahead = "".join(
            f"~{self.numbers[name]}.{at}"
            for name, at in sorted(self.positions.items())
            if at > lowest and name in self.numbers
        )
        return f"{self.epoch}!{lowest}{ahead}"

    # --- lines ---

    def _take(self, line: str) -> str:
        word, _, rest = line.partition(" ")
        if word == "RDATA":
            self._row(*rest.split(" ", 3))
        elif word == "POSITION":
            _, writer, before, after = rest.split(" ")
            self._position(writer, int(before), int(after))
        elif word == "WRITERS":
            _, epoch, *names = rest.split(" ")
            self._writers(epoch, {name: int(number) for name, _, number in (one.rpartition("=") for one in names)})
        elif word == "ERROR":
            return self._error(rest)
        return ""

    def _writers(self, epoch: str, named: dict[str, int]) -> None:
        whole = self.numbers if self._coming is None else self._coming
        begins = self._first_answer or not named or not named.keys().isdisjoint(whole)
        self._coming = dict(named) if begins else {**whole, **named}
        self._first_answer = False
        self.epoch = epoch

    def _complete(self) -> None:
        """The set of writers is complete. A writer that joins is where the slowest one is."""
        if self._coming is None:
            return
        self.numbers, self._coming = self._coming, None
        if self.linear:
            self.positions = self.positions or {"*": UNKNOWN}
        else:
            known = self.positions or {}
            lowest = min(known.values(), default=UNKNOWN)
            self.positions = {name: known.get(name, lowest) for name in self.numbers}

    def _position(self, writer: str, before: int, after: int) -> None:
        self._complete()
        assert self.positions is not None
        if writer not in self.positions:  # it is no longer listed
            self._discard(writer, after)
            return
        mine = self.positions[writer]
        if mine == UNKNOWN:
            pass  # after EARLIEST the daemon says where the stream begins
        elif before != mine:
            raise Violation(f"POSITION of {writer} begins at {before}, and this client is at {mine}")
        elif after < mine:
            self._discard(writer, after)
        else:
            self.world.check_all_sent(self, writer, mine, after)
        self.positions[writer] = after
        self.world.on_position(self, after)

    def _row(self, _: str, writer: str, token: str, body: str) -> None:
        id = int(token)
        assert self.positions is not None
        place = "*" if self.linear else writer
        mine = self.positions.get(place)
        if mine is None:  # of a writer that is not listed: it may come again
            if id in self.rows and self.rows[id] != (writer, body):
                raise Violation(f"row {id} of {writer} is {body}, and was {self.rows[id]}")
        elif mine == UNKNOWN or id <= mine:
            raise Violation(f"row {id} of {writer} came at position {mine}: twice, or out of order")
        if body not in self.world.committed[self.stream]:
            raise Violation(f"row {id} of {writer} is {body}, which was never committed")
        if mine is not None:
            self.world.check_all_sent(self, place, mine, id - 1)
            self.positions[place] = id
            self.world.on_position(self, id)
        self.rows[id] = (writer, body)

    def _discard(self, writer: str | None, above: int) -> None:
        """Rows above a position are void: of one writer, or of all."""
        self.resets += 1
        of_all = writer in (None, "*")
        listed = self.numbers
        lowest = min(above, *self.positions.values()) if self.positions else above
        for id, (name, _) in list(self.rows.items()):
            bound = above if of_all or name == writer else lowest if name not in listed else None
            if bound is not None and id > bound:
                del self.rows[id]
                self.voided += 1
        self.world.on_reset(self)

    def _error(self, text: str) -> str:
        code = text.partition(":")[0]
        found = _RESUME.search(text)
        if code == "bad_token" and found is not None:
            self._resume_from(found[1])
            self.epoch = found[2].partition("!")[0]
            return self._request()
        if code in ("bad_token", "token_expired"):
            self._begin_anew(code)
            return self._request()
        if code == "token_ahead" and "FEDERATION_ACK" in text:
            return ""
        if code == "token_ahead":
            now = trio.current_time()
            self._ahead_since = self._ahead_since or now
            if now > self._ahead_since + PATIENCE:
                raise Violation(f"token {self.token()} has been ahead for {PATIENCE:g} s: {text}")
            raise EOFError
        if code == "stream_waits":
            return ""
        raise EOFError

    def _resume_from(self, shared: str) -> None:
        lowest, *ahead = shared.split("~")
        at = {int(number): int(token) for number, token in (one.split(".") for one in ahead)}
        assert self.positions is not None
        for name in self.positions:
            bound = int(lowest) if self.linear else at.get(self.numbers.get(name, 0), int(lowest))
            if self.positions[name] > bound:
                self._discard("*" if self.linear else name, bound)
                self.positions[name] = bound
        for id, (name, _) in list(self.rows.items()):
            if id > at.get(self.numbers.get(name, 0), int(lowest)) and name not in self.positions and not self.linear:
                del self.rows[id]

    def _begin_anew(self, why: str) -> None:
        self.begins_anew += 1
        self.world.on_beginning(self, why)
        self.rows, self.positions, self.numbers, self.epoch = {}, None, {}, ""

    # --- the end ---

    def differs(self, table: dict[int, tuple[str, str]], above: int) -> str:
        """What this client has and the table has not, or the other way round, above an id."""
        mine = {id: row for id, row in self.rows.items() if id > above}
        missing = sorted(table.keys() - mine.keys())
        extra = sorted(mine.keys() - table.keys())
        other = sorted(id for id in mine.keys() & table.keys() if mine[id] != table[id])
        if not (missing or extra or other):
            return ""
        return f"missing {missing[:8]}, not in the table {extra[:8]}, other rows {other[:8]}"

    def at_least(self, last: int) -> bool:
        """Whether it has everything up to there, by its own positions."""
        return bool(self.positions) and min(self.positions.values()) >= last  # type: ignore[union-attr]

    def forget(self, upto: int) -> None:
        """Rows up to there were compared, and are no longer in the table."""
        for id in [id for id in self.rows if id <= upto]:
            del self.rows[id]
