"""What concerns all connections, passed on to those of the other daemons of one database as well.

The way between daemons is NOTIFY: a daemon gathers lines, numbers each message, and whoever listens passes the lines on
to its own connections. It is as reliable as the protocol asks for, which is not at all: what is told while a daemon
does not listen is lost, and the gap is logged. But it is told once: a message that was sent twice, because nobody knew
whether the first had arrived, has the same number. What a line means is none of this file's business.

Whoever may connect to the database may say anything on the channel. A message that makes no sense ends there: it is
counted, and logged now and then.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import trio

from replicad.daemon.supervision import Restarts, keep_running
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError, DatabaseUnavailable, RelayGap, RelayRefused, RemoteProtocolError
from replicad.protocol.command import Command, Vocabulary
from replicad.protocol.words import Side

MAX_MESSAGE = 7_900  # bytes; NOTIFY takes less than 8,000
MAX_LINE = MAX_MESSAGE - 64  # what is left beside the sender's name and the number
MESSAGES = 100  # in one statement
REPEATS = 1000  # a message that is sent twice comes again at once, behind at most MESSAGES others
MAX_SENDERS = 1000  # daemons whose numbers are remembered; a new one for every start
SERVICE = "relay"

_HEAD = re.compile(r"([!-~]{1,64}) ([0-9]{1,18})")  # of a message: its sender and its number
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Pace:
    """How often the relay does what, in seconds, and how much may wait."""

    interval: float = 0.01  # between two statements: a NOTIFY that commits locks out all others of the whole cluster
    message: float = 0.001  # between two messages received, in which sessions send what they were given
    patience: float = 10.0  # of silence after which the listening connection is asked whether it is there
    retry: float = 0.1  # before the second try; doubles up to `longest_retry`
    longest_retry: float = 5.0
    max_waiting: int = 4 << 20  # bytes of lines that wait for Postgres; then the oldest are dropped
    restarts: Restarts = Restarts()


class Notifies(Protocol):
    """What the relay needs of a `Database`, whose methods say what each does."""

    async def fetch(self, sql: str, *args: object) -> list[Any]: ...

    def listen(self, channel: str) -> AbstractAsyncContextManager[Notices]: ...


class Notices(Protocol):
    """What comes in on a channel."""

    async def next(self, patience: float) -> str: ...


@dataclass(frozen=True, slots=True)
class RelayStatistics:
    """Lines since the start; `missed` are messages that others sent and this daemon did not hear, `refused` messages
    and lines that made no sense.
    """

    sent: int
    heard: int
    dropped: int
    missed: int
    refused: int


class Relay:
    """Sends commands to the other daemons, and calls who asked for them with the commands that those send."""

    def __init__(
        self, db: Notifies, schema: str, vocabulary: Vocabulary, troubles: Troubles, pace: Pace = Pace()
    ) -> None:
        self._db = db
        self._pace = pace
        self._channel = channel_of(schema)
        self._vocabulary = vocabulary
        self._handlers: dict[type[Command], Callable[[Any], None]] = {}
        self._troubles = troubles
        self._me = uuid.uuid4().hex[:16]
        self._number = 0  # of the last message that was made
        self._waiting: deque[str] = deque()
        self._waiting_bytes = 0
        self._told = trio.Event()
        self._numbers: OrderedDict[str, int] = OrderedDict()  # of the last message heard, by daemon
        self._sent = self._lines_heard = self._dropped = self._missed = self._refused = 0

    def on(self, kind: type[Command], handler: Callable[[Any], None]) -> None:
        """Have `handler` called with every command of that kind that another daemon sends."""
        self._handlers[kind] = handler

    def tell(self, command: Command) -> None:
        """Have the connections of all other daemons told, soon; never waits.

        Raises:
            RelayRefused: the line is longer than a message can be.
        """
        line = command.render()
        size = len(line.encode())
        if size > MAX_LINE:
            raise RelayRefused(f"{command.NAME} is passed on between servers with up to {MAX_LINE} bytes, not {size}")
        self._waiting.append(line)
        self._waiting_bytes += size
        while self._waiting_bytes > self._pace.max_waiting:
            self._waiting_bytes -= len(self._waiting.popleft().encode())
            self._dropped += 1
        self._told.set()

    def statistics(self) -> RelayStatistics:
        """Counts, as one frozen value."""
        return RelayStatistics(self._sent, self._lines_heard, self._dropped, self._missed, self._refused)

    async def run(self) -> None:
        """Tell and listen until cancelled. Neither is stopped by a failure of the other."""
        async with trio.open_nursery() as nursery:
            for name, job in (("send", self._send_forever), ("listen", self._listen_forever)):
                nursery.start_soon(
                    keep_running, job, "service", f"{SERVICE}: {name}", self._troubles, self._pace.restarts
                )

    # --- telling ---

    async def _send_forever(self) -> None:
        while True:
            while not self._waiting:
                self._told = trio.Event()
                await self._told.wait()
            messages: list[str] = []
            while self._waiting and len(messages) < MESSAGES:
                messages.append(self._message())
            try:
                await self._send(messages)
            except Exception:
                self._dropped += _lines_in(messages)
                raise
            await trio.sleep(self._pace.interval)

    def _message(self) -> str:
        """As many of the waiting lines as a message takes, under the next number."""
        self._number += 1
        lines = [f"{self._me} {self._number}"]
        room = MAX_MESSAGE - len(lines[0])
        while self._waiting and (size := len(self._waiting[0].encode())) < room:
            lines.append(self._waiting.popleft())
            self._waiting_bytes -= size
            room -= size + 1
        return "\n".join(lines)

    async def _send(self, messages: list[str]) -> None:
        """Send until Postgres has taken them: those who heard them already know the numbers."""
        pause = self._pace.retry
        while messages:
            try:
                await self._db.fetch("SELECT pg_notify($1, m) FROM unnest($2::text[]) m", self._channel, messages)
            except DatabaseUnavailable as error:
                self._troubles.fail("service", SERVICE, "send", error)
                await trio.sleep(pause)
                pause = min(2 * pause, self._pace.longest_retry)
            except DatabaseError as error:  # not now, and not later either: its queue is full, or it lacks a letter
                self._dropped += _lines_in(messages)
                self._troubles.fail("service", SERVICE, "send", error)
                return
            else:
                self._sent += _lines_in(messages)
                self._troubles.end("service", SERVICE, "send")
                return

    # --- listening ---

    async def _listen_forever(self) -> None:
        pause = self._pace.retry
        deaf_since: float | None = None
        while True:
            try:
                async with self._db.listen(self._channel) as notices:
                    if deaf_since is not None:
                        away = round(trio.current_time() - deaf_since, 1)
                        log.warning("relay_listens_again", away_s=away, remedy="what others told meanwhile is lost")
                        deaf_since = None
                    self._troubles.end("service", SERVICE, "listen")
                    pause = self._pace.retry
                    while True:
                        await self._hear(await notices.next(self._pace.patience))
            except DatabaseError as error:
                if deaf_since is None:
                    deaf_since = trio.current_time()
                    log.warning("relay_deaf", error=str(error))
                self._troubles.fail("service", SERVICE, "listen", error)
                await trio.sleep(pause)
                pause = min(2 * pause, self._pace.longest_retry)

    async def _hear(self, message: str) -> None:
        """Pass on what a message says; whatever is wrong with it ends with it."""
        head, *lines = message.split("\n")
        found = _HEAD.fullmatch(head)
        if found is None:
            self._refuse(RemoteProtocolError(f"no daemon's message begins with {head[:60]!a}"))
            return
        sender, number = found.groups()
        if sender == self._me or not self._is_new(sender, int(number)):
            return
        for line in lines:
            try:
                command = self._vocabulary.parse(line, Side.CLIENT)
                if handler := self._handlers.get(type(command)):
                    handler(command)
            except Exception as error:  # noqa: BLE001 - reported; the next line may be a good one
                self._refuse(error)
            else:
                self._lines_heard += 1
        await trio.sleep(self._pace.message)

    def _refuse(self, error: Exception) -> None:
        self._refused += 1
        self._troubles.record("service", SERVICE, "message", error)

    def _is_new(self, sender: str, number: int) -> bool:
        """Whether this message was not heard before; notes it, and what is missing before it.

        Only the last REPEATS numbers count as heard. A message that another role forged with a huge number so mutes
        nobody for long: the next real number is far below it, and counting begins there.
        """
        last = self._numbers.pop(sender, None)
        repeated = last is not None and last - REPEATS < number <= last
        self._numbers[sender] = last if repeated and last is not None else number
        if len(self._numbers) > MAX_SENDERS:
            self._numbers.popitem(last=False)
        if last is not None and number > last + 1:
            missed = number - last - 1
            self._missed += missed
            gap = RelayGap(f"{missed} messages of daemon {sender} were not heard: what they told is lost")
            self._troubles.record("service", SERVICE, "gap", gap)
        return not repeated


def _lines_in(messages: list[str]) -> int:
    return sum(message.count("\n") for message in messages)


def channel_of(schema: str) -> str:
    """The channel of the daemons whose streams are in that schema; Postgres takes up to 63 bytes."""
    name = f"{schema}.relay"
    return name if len(name.encode()) < 64 else f"relay.{hashlib.sha256(name.encode()).hexdigest()[:40]}"
