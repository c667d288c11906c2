"""Following streams over connections that may be lost: subscribe, pass lines to the follower, reconnect, resume.

`FollowLoop` makes the steps (see `steps`) that both clients perform; it does no I/O. `follower` keeps the received
rows and positions. This file decides what a refusal, a gap or a lost connection means for the subscriptions.
`FollowerBase` is the base of the followers of both clients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import Any, TypedDict

from replicad.client.events import Connected, Disconnected, Reset, RowBatch, StreamsChanged, StreamStopped, TakenUpto
from replicad.client.follower import BatchLimits, Follower
from replicad.client.link import DaemonTarget
from replicad.client.refusals import concerns_one_request, is_notice, may_pass, named_stream, refusal, refuses_stream
from replicad.client.steps import STEPS, Connect, Receive, Send, Sleep, Steps
from replicad.errors import (
    BadToken,
    ConnectionLost,
    RemoteProtocolError,
    ReplicadError,
    RowUnreadable,
    StreamError,
    TokenAhead,
    TokenExpired,
    TokenForked,
)
from replicad.protocol.command import Command
from replicad.protocol.commands import Error
from replicad.protocol.connection import ProtocolConnection
from replicad.protocol.lines import LineTooLong
from replicad.retry import Backoff
from replicad.streams.commands import Replicate, Streams, Taken

FIRST_PAUSE = 0.5  # seconds; about as often as the server tries the row again at first
MAX_PAUSE = 10.0


@dataclass(slots=True)
class _Stop:
    row_id: int | None  # None: the server refused the stream
    backoff: Backoff
    pause: float = 0.0
    waited: float = 0.0  # seconds in all for this row or refusal, including the present pause
    again_at: float = 0.0  # when to subscribe again on this connection
    stands: bool = True  # it has stopped on this connection


class Stops:
    """The streams of one follower that have stopped: before an unreadable row, or because the server refuses them.

    Decides when to subscribe to each of them again. The pause grows while a stream stops before the same row or is
    refused again. It begins with the shortest when the stream has advanced or was accepted. Times are seconds of the
    caller's monotonic clock.
    """

    def __init__(self) -> None:
        self._stops: dict[str, _Stop] = {}
        self._noted: list[RowUnreadable] = []

    def note(self, error: RowUnreadable) -> None:
        """Keep the server's error; `take` returns it when the lines before it are handled."""
        self._noted.append(error)

    def take(self) -> list[RowUnreadable]:
        """The errors since the last call."""
        noted, self._noted = self._noted, []
        return noted

    def stopped(self, stream: str, error: ReplicadError, now: float) -> float:
        """Begin a pause for the stream; returns its length."""
        row_id = error.row_id if isinstance(error, RowUnreadable) else None
        stop = self._stops.get(stream)
        if stop is None or stop.row_id != row_id:
            stop = self._stops[stream] = _Stop(row_id, Backoff(FIRST_PAUSE, MAX_PAUSE, jitter=0.0))
        stop.pause = stop.backoff.next_delay()
        stop.waited += stop.pause
        stop.again_at = now + stop.pause
        stop.stands = True
        return stop.pause

    def accepted(self, stream: str) -> None:
        """The server has accepted the subscription. The pause is kept, since it may stop before the same row again."""
        stop = self._stops.get(stream)
        if stop is None:
            return
        if stop.row_id is None:
            del self._stops[stream]
        else:
            stop.stands = False

    def forget(self, stream: str) -> None:
        """The stream is no longer followed."""
        self._stops.pop(stream, None)

    def new_connection(self) -> None:
        """A new connection subscribes to every stream; the lengths of pauses are kept."""
        self._noted.clear()
        for stop in self._stops.values():
            stop.stands = False

    def is_stopped(self, stream: str) -> bool:
        """Whether the stream has stopped on this connection and was not subscribed to again."""
        return stream in self._stops and self._stops[stream].stands

    def is_refused(self, stream: str) -> bool:
        """Whether the stream has stopped on this connection because the server refused it."""
        return self.is_stopped(stream) and self._stops[stream].row_id is None

    def may_ask(self, stream: str, now: float) -> bool:
        """Whether to subscribe now. After True the caller must subscribe."""
        if not self.is_stopped(stream):
            return True
        if now < self._stops[stream].again_at:
            return False
        self._stops[stream].stands = False
        return True

    def due(self, now: float) -> bool:
        """Whether a pause is over."""
        return any(stop.stands and now >= stop.again_at for stop in self._stops.values())

    def delay(self, stream: str) -> float:
        """The length of the last pause, in seconds."""
        return self._stops[stream].pause

    def waited(self, stream: str) -> float:
        """Seconds waited since the stream last advanced, including this pause."""
        return self._stops[stream].waited


FOREVER = float("inf")  # a quiet stream may send no row for any time
REFUSALS = 8  # in a row of a token that was accepted before, some 20 s: a daemon may have just started or lag
FIRST_REFUSALS = 4  # of a caller's token that is ahead, about a second: the daemon may be some polls behind another
LOOK_INTERVAL = 10.0  # seconds between two STREAMS, for followers of all streams
# In a row, of one stream in one generation, before giving up: a server that leaves a gap each time would cause endless
# reconnections. Many streams may fork at once, as where a standby is promoted, and each of them ends a connection.
GAPS = 3


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """The options of following streams. Times in seconds.

    `linear`: rows in strictly ascending order over all writers. `begin`: where unnamed streams begin, NOW or EARLIEST.
    `after_reset`: where a stream begins again when the server refuses its token, EARLIEST (all rows that still exist,
    some of them again) or NOW. `patience`: how long to wait in all for a lost connection or a stopped
    stream before the error is raised (None: without limit); `first_patience`: the same for the first connection.
    `answer_timeout`: for the answer to a subscription. `taken`: send TAKEN for each stream on every connection and then
    at this interval; the answers are TakenUpto. (Sent only when something is received; a server sends PINGs.)
    `merged`: rows of one writer that came together may be one RowBatch, with the token of the last. It is cheaper, for
    a reader that does not use the tokens in between. `where`: of streams of changes that are named, only the changes
    with this value of a filter column: `("customer_id", "42")`, the value as text.
    """

    linear: bool = False
    begin: str = "NOW"
    after_reset: str = "EARLIEST"
    patience: float | None = None
    first_patience: float | None = 10.0
    answer_timeout: float = 60.0
    taken: float | None = None
    merged: bool = False
    where: tuple[str, str] | None = None
    batch_limits: BatchLimits = field(default_factory=BatchLimits)
    backoff: Backoff | None = None  # how long to wait between two tries to connect


class FollowWishes(TypedDict, total=False):
    """The FollowOptions that `follow` of both clients accepts as keyword arguments."""

    backoff: Backoff | None
    begin: str
    after_reset: str
    patience: float | None
    first_patience: float | None
    taken: float | None
    merged: bool
    where: tuple[str, str] | None


class FollowLoop:
    """Follows `streams`, a token (see `Follower.want`) for each; None: all present and future streams.

    `now` is a monotonic clock in seconds. `steps` is for one driver, once.
    """

    def __init__(
        self,
        streams: Mapping[str, str | None] | None,
        options: FollowOptions | None = None,
        *,
        now: Callable[[], float],
    ) -> None:
        """Raises BadToken if a token cannot be parsed."""
        self._options = options or FollowOptions()
        self._now = now
        self._backoff = self._options.backoff or Backoff()
        self.follower = Follower(self._options.batch_limits, merged=self._options.merged)
        for stream, token in (streams or {}).items():
            self.follower.want(stream, token, linear=self._options.linear)
        self._accepted: set[str] = set()  # streams whose token the server accepted at least once
        self._every = streams is None
        self._looked = False  # the list of streams was received
        self._next_look = 0.0
        self._names: tuple[str, ...] | None = None  # the answer to STREAMS
        self._asked_at = 0.0  # when TAKEN was sent
        self._answers_due = 0
        self._answers: list[Taken] = []
        self._connection: ProtocolConnection
        self._asking: str | None = None  # the stream whose REPLICATE is not answered yet
        self._refused: ReplicadError | None = None
        self._stops = Stops()  # streams that stop while others go on
        self._begun = False  # there was a connection on which everything was accepted
        self._waited = 0.0
        self._gaps: dict[str, tuple[str | None, int]] = {}  # by stream: the generation, and how many in a row
        self._refusals = 0
        self._rewinds = 0  # in a row, to tokens that the server named

    def steps(self) -> Steps[None]:
        """Never returns; yields Events, and commands that are not about streams.

        Raises:
            ReplicadError: an error that trying again does not help against, or the last one when `patience` has passed.
        """
        while True:
            try:
                yield from self._one_connection()
            except LineTooLong as error:
                raise self._explained(error) from error
            except ReplicadError as error:
                delay = self._delay_after(error)
                yield Disconnected(error, delay)
                yield Sleep(delay)

    def _one_connection(self) -> Steps[None]:
        self._asking = None
        connected: tuple[ProtocolConnection, str] = yield Connect()
        self._connection, server_name = connected
        self._answers_due = 0
        self._answers.clear()
        self.follower.new_connection()
        self._stops.new_connection()
        yield from self._subscribe_all()
        self._refusals = 0
        self._begun = True
        yield Connected(server_name)
        yield from self._ask_taken()
        yield from self._take((yield Receive(FOREVER)))
        self._backoff.reset()  # accepted: the next loss begins with the shortest pause
        self._waited = 0.0
        self._gaps.clear()
        while True:
            if (self._every and self._now() >= self._next_look) or self._stops.due(self._now()):
                yield from self._subscribe_all()
            if self._options.taken is not None and self._now() >= self._asked_at + self._options.taken:
                yield from self._ask_taken()
            yield from self._take((yield Receive(FOREVER)))

    def _ask_taken(self) -> Steps[None]:
        """Send TAKEN for each stream, unless answers to the last ones are due."""
        if self._options.taken is not None and self._answers_due <= 0:
            streams = [stream for stream in self.follower.streams() if not self._stops.is_refused(stream)]
            questions = tuple(Taken(stream) for stream in streams)
            self._asked_at, self._answers_due = self._now(), len(questions)
            yield Send(questions)

    def _subscribe_all(self) -> Steps[None]:
        """Subscribe to wanted streams that are not subscribed to. A follower of all streams updates its list first."""
        changed: StreamsChanged | None = None
        if self._every:
            changed = yield from self._look()
        for stream in self.follower.streams():
            if self.follower.answered(stream):
                self._stops.accepted(stream)
            elif self._stops.may_ask(stream, self._now()):
                yield from self._subscribe(stream)
        if changed is not None:
            yield changed

    def _look(self) -> Steps[StreamsChanged | None]:
        self._names = None
        yield Send((Streams(),))
        within: float | None = self._options.answer_timeout
        while self._names is None:
            yield from self._take((yield Receive(within)))
            within = None
        self._next_look = self._now() + LOOK_INTERVAL
        known = self.follower.streams()
        added = tuple(name for name in self._names if name not in known)
        removed = tuple(name for name in known if name not in self._names)
        for name in removed:
            self.follower.drop(name)
            self._stops.forget(name)
        for name in added:
            begin = "NOW" if self._looked else self._options.begin
            self.follower.want(name, begin, linear=self._options.linear)
        first, self._looked = not self._looked, True
        return StreamsChanged(added, removed) if (added or removed) and not first else None

    def _subscribe(self, stream: str) -> Steps[None]:
        """Subscribe until the server accepts the token or its reset, or this stream stops and others go on."""
        while True:
            self._asking, self._refused = stream, None
            yield Send((Replicate(stream, self.follower.token(stream), self._options.linear, self._options.where),))
            within: float | None = self._options.answer_timeout
            while self._refused is None and not self.follower.answered(stream):
                yield from self._take((yield Receive(within)))
                within = None
            refused: ReplicadError | None = self._refused
            if refused is None:
                self._accepted.add(stream)
                self._stops.accepted(stream)
                self._rewinds = 0
            elif self._others_go_on(refused, stream):
                self._answers_due = 0  # the refusal may have been the answer to a TAKEN
                yield self._stop(stream, refused)
            elif not self._stops.is_stopped(stream):
                yield from self._resets_after(refused, stream)
                continue
            self._asking = None
            return

    def _others_go_on(self, error: ReplicadError, stream: str) -> bool:
        """Whether the refusal stops only this stream. If it was never accepted, the caller gets the error."""
        known = self._every or stream in self._accepted or isinstance(error, RowUnreadable)
        others = (name for name in self.follower.streams() if name != stream)
        return (
            known
            and refuses_stream(error)
            and not self._stops.is_stopped(stream)  # else `_take_stops` has handled it
            and not all(self._stops.is_stopped(name) for name in others)
        )

    def _stop(self, stream: str, error: ReplicadError) -> StreamStopped:
        """Begin a pause for a stream that is refused or stops before a row.

        Raises:
            ReplicadError: `error`, if no other stream goes on or `patience` has passed.
        """
        self.follower.suspend(stream)
        delay = self._stops.stopped(stream, error, self._now())
        if all(self._stops.is_stopped(name) for name in self.follower.streams()):
            raise error
        if self._options.patience is not None and self._stops.waited(stream) > self._options.patience:
            raise error
        return StreamStopped(stream, error, delay)

    def _take(self, block: bytes) -> Steps[None]:
        yield from self.follower.feed(block, self._understand)
        self._connection.check()
        yield from self._take_stops()
        for answer in self._answers:
            yield TakenUpto(answer.stream, answer.upto or 0, self._now() - self._asked_at)
        self._answers.clear()
        gap = self.follower.gap
        if gap is None:
            return
        epoch = self.follower.epoch(gap.stream)
        before, times = self._gaps.get(gap.stream, (epoch, 0))
        times = times + 1 if before == epoch else 1
        self._gaps[gap.stream] = (epoch, times)
        missing = (
            f"rows of {gap.stream} {gap.instance} after {gap.have} are missing, the server goes on from {gap.reported}"
        )
        if times >= GAPS:
            raise RemoteProtocolError(f"{missing}; so it was {times} times in a row")
        raise ConnectionLost(missing)

    def _take_stops(self) -> Steps[None]:
        """Begin pauses for streams that have stopped; raises if no other stream goes on."""
        for error in self._stops.take():
            yield self._stop(str(error.stream), error)

    def _explained(self, error: LineTooLong) -> LineTooLong:
        """The error with the stream of the line and the remedy."""
        stream = error.stream if error.stream in self.follower.streams() else None
        if stream is None:
            return error
        return LineTooLong(
            f"stream {stream}: {error}. The last token that was received is {self.follower.token(stream)}. Bound the "
            f"rows where the server is (`replicad streams alter {quote(stream)} --max-row BYTES`): it then names the "
            "row, which can be shortened or skipped",
            stream=stream,
        )

    def _understand(self, line: bytes) -> Command | None:
        command = self._connection.understand(line)
        if isinstance(command, Streams):
            self._names = command.names
            return None
        if isinstance(command, Taken):
            self._answers_due -= 1
            self._answers.append(command)
            return None
        if not isinstance(command, Error):
            return command
        error = refusal(command.text)
        if is_notice(error):
            return None
        if isinstance(error, RowUnreadable) and error.stream in self.follower.streams():
            self._stops.note(error)
            if self._asking == error.stream:
                self._refused = error
            return None
        named = named_stream(error)
        if named != self._asking and named in self.follower.streams():
            self._asking = None  # another stream has ended: this is not the answer
        if self._asking is None or not concerns_one_request(error):
            raise error
        self._refused = error
        return None

    def _resets_after(self, error: ReplicadError, stream: str) -> list[Reset]:
        """Go back, or begin the stream again, after the server has refused the token.

        A token above a fork goes back to the fork, even if the caller gave it. With any other token the stream begins
        again, if it was accepted before.

        Raises:
            ReplicadError: the refusal, if it is not about the token, may be temporary, or is repeated.
        """
        if isinstance(error, TokenForked) and self._rewinds < REFUSALS:
            self._rewinds += 1
            if resets := self.follower.rewind(stream, error.rewind):
                return resets
        ours = stream in self._accepted and self.follower.token(stream) != self._options.after_reset
        may_be_behind = isinstance(error, TokenAhead) and self._refusals < REFUSALS
        if not ours or may_be_behind or not isinstance(error, BadToken | TokenExpired | TokenAhead):
            raise error
        self._refusals = 0
        self.follower.want(stream, self._options.after_reset, linear=self._options.linear)
        return [Reset(stream, None, None, error.code)]

    def _delay_after(self, error: ReplicadError) -> float:
        """Seconds to wait after an error; raises it if waiting does not help, or `patience` has passed."""
        if not self._may_pass(error):
            raise error
        stream = str(error.stream if isinstance(error, RowUnreadable) else self._asking)
        if self._stops.is_stopped(stream):
            # The connection may be accepted each time, which resets its back-off. So stopped streams have their own.
            delay, waited = self._stops.delay(stream), self._stops.waited(stream)
        else:
            delay = self._backoff.next_delay()
            self._waited += delay
            waited = self._waited
        # Rows of the first stream may have been returned before the last stream was accepted: no program begins then.
        begun = self._begun or (bool(self._accepted) and not isinstance(error, StreamError))
        patience = self._options.patience if begun else self._options.first_patience
        if patience is not None and waited > patience:
            raise error
        return delay

    def _may_pass(self, error: ReplicadError) -> bool:
        if not isinstance(error, StreamError) or isinstance(error, RowUnreadable):
            return may_pass(error)
        if self._asking is None:
            return True  # about a followed stream: the next subscription shows the state
        self._refusals += 1
        if self._every or self._asking in self._accepted:
            return self._refusals <= REFUSALS
        return isinstance(error, TokenAhead) and self._refusals < FIRST_REFUSALS


Tokens = Mapping[str, str | None]
"""A token for each stream: NOW (or None), EARLIEST, or a token that a follower's `token` has returned."""


class FollowerBase:
    """The state of a follower. `also`: the types of events wanted besides RowBatch and Reset."""

    def __init__(
        self,
        target: DaemonTarget,
        streams: Tokens | None,
        *,
        linear: bool,
        also: Collection[type],
        wishes: FollowWishes,
        now: Callable[[], float],
    ) -> None:
        options = FollowOptions(linear, answer_timeout=target.answer_timeout, **wishes)
        self._target = target
        self._loop = FollowLoop(streams, options, now=now)
        self._steps = self._loop.steps()
        self._wanted = frozenset({RowBatch, Reset, *also})
        self._pending: Any = None  # a step that is not performed yet
        self._failure: ReplicadError | None = None  # to be raised when the events before it were handed over

    def _add_at_hand(self, events: list[Any]) -> None:
        """Add the events that need no further step: at most the events of one read of the socket."""
        while self._pending is None and self._failure is None:
            try:
                step = self._steps.send(None)
            except ReplicadError as error:
                self._failure = error
                return
            if type(step) in self._wanted:
                events.append(step)
            elif type(step) in STEPS:
                self._pending = step

    def token(self, stream: str) -> str | None:
        """The token to follow the stream with later: delivered rows do not come again, and no others are missed."""
        return self._loop.follower.token(stream)

    def tokens(self) -> dict[str, str | None]:
        """`token` of every stream."""
        return {stream: self.token(stream) for stream in self._loop.follower.streams()}

    def epoch(self, stream: str) -> str | None:
        """The generation of the stream that is followed; None before the first answer to a token without one."""
        return self._loop.follower.epoch(stream)

    def writers(self, stream: str) -> Mapping[str, int]:
        """The small numbers of the stream's writers that vector tokens are made of, by name."""
        return self._loop.follower.writers(stream)

    def is_accepted(self, stream: str) -> bool:
        """Whether the subscription to the stream was accepted on the present or last connection."""
        return self._loop.follower.answered(stream)

    def positions(self, stream: str) -> Mapping[str, int]:
        """The position up to which each known writer's rows were delivered (`*`: all, in a linear subscription)."""
        return self._loop.follower.positions(stream)
