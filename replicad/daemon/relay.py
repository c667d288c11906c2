"""Sends commands to the other daemons of one database, which pass them on to their clients.

Daemons reach each other by NOTIFY. A daemon puts several lines into one numbered message; the daemons that listen pass
the lines on. Delivery is at most once, which is all that the protocol requires: messages that are sent while a daemon
does not listen are lost to it, and the gap is logged. A message that is sent again, because the first result is
unknown, keeps its number, so that it is delivered once. This file does not interpret the lines.

Every role that may connect to the database can listen to any channel and send on it. So the name of the channel is a
secret of the daemons (`find_channel`). A message that cannot be parsed is dropped and counted all the same; such
messages are logged at a limited rate.
"""

from __future__ import annotations

import re
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import trio

from replicad.daemon.supervision import Restarts, keep_running
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError, DatabaseUnavailable, RelayGap, RelayRefused, RemoteProtocolError
from replicad.nurseries import open_plain_nursery
from replicad.protocol.command import Command, Vocabulary
from replicad.protocol.words import Side
from replicad.retry import Backoff

MAX_MESSAGE = 7_900  # bytes; NOTIFY takes less than 8,000
MAX_LINE = MAX_MESSAGE - 64  # what is left beside the sender's name and the number
MESSAGES = 100  # in one statement
REPEATS = 1000  # numbers that count as received; a message is repeated at once, after at most MESSAGES others
MAX_SENDERS = 1000  # daemons whose last number is kept; a daemon that restarts counts as a new one
SERVICE = "relay"

_HEAD = re.compile(r"([!-~]{1,64}) ([0-9]{1,18})")  # of a message: its sender and its number
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Pace:
    """The relay's intervals in seconds, and the bound of its queue."""

    interval: float = 0.01  # between two statements: a commit with NOTIFY takes a lock of the whole cluster
    message: float = 0.001  # between two received messages; sessions send the lines in this time
    patience: float = 10.0  # without a message, after which the listening connection is probed
    channel: float = 10.0  # between two looks whether the channel has another name
    retry: float = 0.1  # before the second try; doubles up to `longest_retry`
    longest_retry: float = 5.0
    max_waiting: int = 4 << 20  # bytes of lines that wait for Postgres; then the oldest are dropped
    restarts: Restarts = Restarts()


FindChannel = Callable[[], Awaitable[str | None]]
"""The present name of the channel; None if it has no key. Raises DatabaseError."""


class Notifies(Protocol):
    """What the relay needs of a `Database`, whose methods have the docstrings."""

    async def fetch(self, sql: str, *args: object) -> list[Any]: ...

    def listen(self, channel: str) -> AbstractAsyncContextManager[Notices]: ...


class Notices(Protocol):
    """The messages received on a channel."""

    async def next(self, patience: float) -> str: ...


@dataclass(frozen=True, slots=True)
class RelayStatistics:
    """Lines since the start. `missed` counts messages of other daemons that did not arrive, `refused` the messages and
    lines that could not be parsed or handled.
    """

    sent: int
    received: int
    dropped: int
    missed: int
    refused: int


class Relay:
    """Sends commands to the other daemons, and calls the handlers of the commands that those send."""

    def __init__(
        self,
        db: Notifies,
        find_channel: FindChannel,
        vocabulary: Vocabulary,
        troubles: Troubles,
        pace: Pace = Pace(),
    ) -> None:
        self._db = db
        self._pace = pace
        self._find_channel = find_channel
        self._channel: str | None = None  # as it was found last
        self._vocabulary = vocabulary
        self._handlers: dict[type[Command], Callable[[Any], None]] = {}
        self._troubles = troubles
        self._me = uuid.uuid4().hex[:16]
        self._number = 0  # of the last message that was made
        self._waiting: deque[str] = deque()
        self._waiting_bytes = 0
        self._has_lines = trio.Event()
        self._numbers: OrderedDict[str, int] = OrderedDict()  # of the last message received, by daemon
        self._sent = self._received = self._dropped = self._missed = self._refused = 0

    def on(self, kind: type[Command], handler: Callable[[Any], None]) -> None:
        """Call `handler` with every command of that kind that another daemon sends."""
        self._handlers[kind] = handler

    def broadcast(self, command: Command) -> None:
        """Queue a command for all other daemons; never waits.

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
        self._has_lines.set()

    def statistics(self) -> RelayStatistics:
        """Counts, as one frozen value."""
        return RelayStatistics(self._sent, self._received, self._dropped, self._missed, self._refused)

    async def run(self) -> None:
        """Send and listen until cancelled. A failure of one does not stop the other."""
        async with trio.open_nursery() as nursery:
            for name, job in (("send", self._send_forever), ("listen", self._listen_forever)):
                nursery.start_soon(
                    keep_running, job, "service", f"{SERVICE}: {name}", self._troubles, self._pace.restarts
                )

    # --- sending ---

    async def _send_forever(self) -> None:
        while True:
            while not self._waiting:
                self._has_lines = trio.Event()
                await self._has_lines.wait()
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
        """A message with the next number and as many of the waiting lines as it can hold."""
        self._number += 1
        lines = [f"{self._me} {self._number}"]
        room = MAX_MESSAGE - len(lines[0])
        while self._waiting and (size := len(self._waiting[0].encode())) < room:
            lines.append(self._waiting.popleft())
            self._waiting_bytes -= size
            room -= size + 1
        return "\n".join(lines)

    async def _send(self, messages: list[str]) -> None:
        """Repeat until Postgres has accepted them. Daemons that received them already know the numbers."""
        backoff = Backoff(self._pace.retry, self._pace.longest_retry, jitter=0.0)
        while messages:
            try:
                channel = self._channel or await self._present_channel()
                await self._db.fetch("SELECT pg_notify($1, m) FROM unnest($2::text[]) m", channel, messages)
            except DatabaseUnavailable as error:
                self._troubles.fail("service", SERVICE, "send", error)
                await trio.sleep(backoff.next_delay())
            except DatabaseError as error:  # permanent: its queue is full, or its encoding lacks a character
                self._dropped += _lines_in(messages)
                self._troubles.fail("service", SERVICE, "send", error)
                return
            else:
                self._sent += _lines_in(messages)
                self._troubles.end("service", SERVICE, "send")
                return

    # --- listening ---

    async def _listen_forever(self) -> None:
        backoff = Backoff(self._pace.retry, self._pace.longest_retry, jitter=0.0)
        lost_at: float | None = None
        while True:
            try:
                channel = self._channel = await self._present_channel()
                async with self._db.listen(channel) as notices, open_plain_nursery() as nursery:
                    nursery.start_soon(self._watch_channel, channel, nursery.cancel_scope)
                    if lost_at is not None:
                        away = round(trio.current_time() - lost_at, 1)
                        log.warning(
                            "relay_listens_again", away_s=away, remedy="commands that others sent meanwhile are lost"
                        )
                        lost_at = None
                    self._troubles.end("service", SERVICE, "listen")
                    backoff.reset()
                    while True:
                        await self._receive(await notices.next(self._pace.patience))
            except DatabaseError as error:
                if lost_at is None:
                    lost_at = trio.current_time()
                    log.warning("relay_deaf", error=str(error))
                self._troubles.fail("service", SERVICE, "listen", error)
                await trio.sleep(backoff.next_delay())

    async def _present_channel(self) -> str:
        channel = await self._find_channel()
        if channel is None:
            raise DatabaseError(
                "the daemons' channel has no key: INSERT INTO stream_relay_key DEFAULT VALUES in replicad's schema"
            )
        return channel

    async def _watch_channel(self, channel: str, scope: trio.CancelScope) -> None:
        """End the listening when the channel has another name."""
        while await self._present_channel() == channel:
            await trio.sleep(self._pace.channel)
        log.info("relay_channel_changed")
        scope.cancel()

    async def _receive(self, message: str) -> None:
        """Call the handlers of a message's lines. Errors are recorded and never raised."""
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
                self._received += 1
        await trio.sleep(self._pace.message)

    def _refuse(self, error: Exception) -> None:
        self._refused += 1
        self._troubles.record("service", SERVICE, "message", error)

    def _is_new(self, sender: str, number: int) -> bool:
        """Whether this message was not received before. Keeps its number, and records a gap before it.

        Only the last REPEATS numbers count as received. So a message that another role forged with a huge number does
        not block the daemon of that name: the next real number is far below, and is accepted as a new beginning.
        """
        last = self._numbers.pop(sender, None)
        repeated = last is not None and last - REPEATS < number <= last
        self._numbers[sender] = last if repeated and last is not None else number
        if len(self._numbers) > MAX_SENDERS:
            self._numbers.popitem(last=False)
        if last is not None and number > last + 1:
            missed = number - last - 1
            self._missed += missed
            gap = RelayGap(f"{missed} messages of daemon {sender} were not received: their commands are lost")
            self._troubles.record("service", SERVICE, "gap", gap)
        return not repeated


def _lines_in(messages: list[str]) -> int:
    return sum(message.count("\n") for message in messages)
