"""Sends commands to the other daemons of one database, which pass them on to their clients.

Daemons reach each other by NOTIFY. A daemon puts several lines into one numbered message; the daemons that listen pass
the lines on. Delivery is at most once, which is all that the protocol requires: messages that are sent while a daemon
does not listen are lost to it, and the gap is logged. A message that is sent again, because the first result is
unknown, keeps its number, so that it is delivered once. This file does not interpret the lines.

Every role that may connect to the database can send on any channel, and a role with pg_read_all_stats sees the name of
this one. So each message is signed (HMAC-SHA256) with a key that only the daemons' roles can read. The signature covers
the sender, its number, the time and the lines. A message is refused if its number is not above the last number of its
sender, or if it is older than MAX_AGE; so no message can be repeated. Times are read from Postgres's clock, which all
daemons ask. A refused message is dropped and counted by its reason, and logged at a limited rate.
"""

from __future__ import annotations

import hmac
import re
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
import trio

from replicad.daemon.troubles import Restarts, Troubles, keep_running
from replicad.errors import DatabaseError, DatabaseUnavailable, RelayGap, RelayRefused, RemoteProtocolError
from replicad.nurseries import open_plain_nursery
from replicad.protocol.command import Command, Vocabulary
from replicad.protocol.words import Side
from replicad.retry import Backoff

MAX_MESSAGE = 7_900  # bytes; NOTIFY takes less than 8,000
HEAD = 128  # bytes for the sender's name, the number, the time and the signature
MAX_LINE = MAX_MESSAGE - HEAD
MAX_AGE = 60  # seconds; a daemon that has just begun to listen knows no numbers, and takes nothing that is older
MESSAGES = 100  # in one statement
MAX_SENDERS = 1000  # daemons whose last number is kept; a daemon that restarts counts as a new one
SERVICE = "relay"

_HEAD = re.compile(r"([!-~]{1,64}) ([0-9]{1,18}) ([0-9]{1,18}) ([0-9a-f]{64})", re.ASCII)
REASONS = ("unsigned", "forged", "repeated", "old", "line")  # for which something is refused
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RelayIntervals:
    """The relay's intervals in seconds, and the bound of its queue."""

    interval: float = 0.01  # between two statements: a commit with NOTIFY takes a lock of the whole cluster
    message: float = 0.001  # between two received messages; sessions send the lines in this time
    patience: float = 10.0  # without a message, after which the listening connection is probed
    channel: float = 10.0  # between two looks whether the channel has another name
    retry: float = 0.1  # before the second try; doubles up to `longest_retry`
    longest_retry: float = 5.0
    max_waiting: int = 4 << 20  # bytes of lines that wait for Postgres; then the oldest are dropped
    restarts: Restarts = Restarts()


@dataclass(frozen=True, slots=True)
class RelayKey:
    """The channel of the daemons, the key of their signatures, and Postgres's clock in seconds since 1970."""

    channel: str
    secret: bytes = field(repr=False)
    clock: float = 0.0

    def sign(self, sender: str, number: int, at: int, lines: Iterable[str]) -> str:
        """A message."""
        head, body = f"{sender} {number} {at}", "\n".join(["", *lines])
        return f"{head} {self._signature(head, body)}{body}"

    def is_signed(self, head: str, body: str, signature: str) -> bool:
        """Whether a daemon has signed it. Takes the same time for every signature."""
        return hmac.compare_digest(self._signature(head, body), signature)

    def _signature(self, head: str, body: str) -> str:
        return hmac.digest(self.secret, (head + body).encode(), "sha256").hex()


FindKey = Callable[[], Awaitable[RelayKey | None]]
"""The present key; None if there is none. Raises DatabaseError."""


class Notifies(Protocol):
    """What the relay needs of a `Database`, whose methods have the docstrings."""

    async def fetch(self, sql: str, *args: object) -> list[Any]: ...

    def listen(self, channel: str) -> AbstractAsyncContextManager[ReceivedNotices]: ...


class ReceivedNotices(Protocol):
    """The messages received on a channel."""

    async def next(self, patience: float) -> str: ...


@dataclass(frozen=True, slots=True)
class RelayStatistics:
    """Lines since the start. `missed` counts messages of other daemons that did not arrive; `refused`, by reason, the
    messages that no daemon has sent so, and the lines that could not be parsed or handled.
    """

    sent: int
    received: int
    dropped: int
    missed: int
    reasons: Mapping[str, int]

    @property
    def refused(self) -> int:
        """All that was refused."""
        return sum(self.reasons.values())


class Relay:
    """Sends commands to the other daemons, and calls the handlers of the commands that those send."""

    def __init__(
        self,
        db: Notifies,
        find_key: FindKey,
        vocabulary: Vocabulary,
        troubles: Troubles,
        pace: RelayIntervals = RelayIntervals(),
    ) -> None:
        self._db = db
        self._pace = pace
        self._find_key = find_key
        self._key: RelayKey | None = None  # as it was found last
        self._clock = 0.0  # what Postgres's clock is ahead of ours
        self._vocabulary = vocabulary
        self._handlers: dict[type[Command], Callable[[Any], None]] = {}
        self._troubles = troubles
        self._me = uuid.uuid4().hex[:16]
        self._number = 0  # of the last message that was made
        self._waiting: deque[str] = deque()
        self._waiting_bytes = 0
        self._has_lines = trio.Event()
        self._numbers: OrderedDict[str, int] = OrderedDict()  # of the last message received, by daemon
        self._sent = self._received = self._dropped = self._missed = 0
        self._refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

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
        return RelayStatistics(self._sent, self._received, self._dropped, self._missed, dict(self._refused))

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
            messages: list[tuple[int, list[str]]] = []
            while self._waiting and len(messages) < MESSAGES:
                self._number += 1
                messages.append((self._number, self._lines()))
            try:
                await self._send(messages)
            except Exception:
                self._dropped += _lines_in(messages)
                raise
            await trio.sleep(self._pace.interval)

    def _lines(self) -> list[str]:
        """As many of the waiting lines as a message can hold."""
        lines: list[str] = []
        room = MAX_MESSAGE - HEAD
        while self._waiting and (size := len(self._waiting[0].encode())) < room + 1:
            lines.append(self._waiting.popleft())
            self._waiting_bytes -= size
            room -= size + 1
        return lines

    def _signed(self, key: RelayKey, messages: list[tuple[int, list[str]]]) -> list[str]:
        at = max(0, int(self._now()))
        return [key.sign(self._me, number, at, lines) for number, lines in messages]

    def _now(self) -> float:
        """Postgres's clock."""
        return trio.current_time() + self._clock

    async def _send(self, messages: list[tuple[int, list[str]]]) -> None:
        """Repeat until Postgres has accepted them. Daemons that received them already know the numbers."""
        backoff = Backoff(self._pace.retry, self._pace.longest_retry, jitter=0.0)
        while messages:
            try:
                key = self._key or await self._present_key()
                signed = self._signed(key, messages)
                await self._db.fetch("SELECT pg_notify($1, m) FROM unnest($2::text[]) m", key.channel, signed)
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
                key = await self._present_key()
                async with self._db.listen(key.channel) as notices, open_plain_nursery() as nursery:
                    nursery.start_soon(self._watch_key, key, nursery.cancel_scope)
                    if lost_at is not None:
                        away = round(trio.current_time() - lost_at, 1)
                        log.warning(
                            "relay_listens_again", away_s=away, remedy="commands that others sent meanwhile are lost"
                        )
                        lost_at = None
                    self._troubles.end("service", SERVICE, "listen")
                    backoff.reset()
                    while True:
                        await self._receive(key, await notices.next(self._pace.patience))
            except DatabaseError as error:
                if lost_at is None:
                    lost_at = trio.current_time()
                    log.warning("relay_deaf", error=str(error))
                self._troubles.fail("service", SERVICE, "listen", error)
                await trio.sleep(backoff.next_delay())

    async def _present_key(self) -> RelayKey:
        """Ask Postgres for the key, and for its clock."""
        asked = trio.current_time()
        key = await self._find_key()
        if key is None:
            raise DatabaseError(
                "the daemons' channel has no key: INSERT INTO stream_relay_key DEFAULT VALUES in replicad's schema"
            )
        self._key, self._clock = key, key.clock - asked
        return key

    async def _watch_key(self, key: RelayKey, scope: trio.CancelScope) -> None:
        """End the listening when there is another key."""
        while (found := await self._present_key()).channel == key.channel and found.secret == key.secret:
            await trio.sleep(self._pace.channel)
        log.info("relay_channel_changed")
        scope.cancel()

    async def _receive(self, key: RelayKey, message: str) -> None:
        """Call the handlers of a message's lines. Errors are recorded and never raised."""
        head, _, _ = message.partition("\n")
        found = _HEAD.fullmatch(head)
        if found is None:
            self._refuse("unsigned", RemoteProtocolError(f"no daemon's message begins with {head[:60]!a}"))
            return
        sender, number, at, signature = found.groups()
        if sender == self._me:
            return
        body = message[len(head) :]
        if not key.is_signed(f"{sender} {number} {at}", body, signature):
            self._refuse("forged", RemoteProtocolError(f"a message of daemon {sender} is not signed by our key"))
            return
        if not self._is_new(sender, int(number), int(at)):
            return
        for line in body.split("\n")[1:]:
            try:
                command = self._vocabulary.parse(line, Side.CLIENT)
                if handler := self._handlers.get(type(command)):
                    handler(command)
            except Exception as error:  # noqa: BLE001 - reported; the next line may be a good one
                self._refuse("line", error)
            else:
                self._received += 1
        await trio.sleep(self._pace.message)

    def _refuse(self, reason: str, error: Exception) -> None:
        self._refused[reason] += 1
        self._troubles.record("service", SERVICE, "message", error)

    def _is_new(self, sender: str, number: int, at: int) -> bool:
        """Whether a daemon has sent this message now, for the first time. Keeps its number; records a gap before it."""
        last = self._numbers.get(sender)
        if last is not None and number <= last:  # also where a daemon has sent it twice, see `_send`
            self._refuse("repeated", RemoteProtocolError(f"message {number} of daemon {sender} came before"))
            return False
        if at < self._now() - MAX_AGE:
            age = round(self._now() - at)
            self._refuse("old", RemoteProtocolError(f"message {number} of daemon {sender} is {age} s old"))
            return False
        self._numbers[sender] = number
        self._numbers.move_to_end(sender)
        if len(self._numbers) > MAX_SENDERS:
            self._numbers.popitem(last=False)
        if last is not None and number > last + 1:
            missed = number - last - 1
            self._missed += missed
            gap = RelayGap(f"{missed} messages of daemon {sender} were not received: their commands are lost")
            self._troubles.record("service", SERVICE, "gap", gap)
        return True


def _lines_in(messages: list[tuple[int, list[str]]]) -> int:
    return sum(len(lines) for _, lines in messages)
