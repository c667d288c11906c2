"""Records the daemon's rows in Postgres; then queues them for delivery, and sends FEDERATION_ACK to the daemon.

Rows are routed and recorded for every destination that they concern, all waiting rows in one transaction. The engine
delivers them. A row that cannot be routed stops the intake or is skipped, depending on the settings. Deliveries
continue in both cases.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog
import trio

from replicad.client.async_client import AsyncFollower, open_client
from replicad.client.events import (
    Connected,
    Disconnected,
    GenerationBegan,
    PositionMoved,
    Reset,
    RowBatch,
    StreamStopped,
)
from replicad.errors import (
    BadToken,
    ConnectionLost,
    DatabaseError,
    DatabaseUnavailable,
    RemoteError,
    RouteFailed,
    SenderRefused,
    StreamRestarted,
)
from replicad.nurseries import open_plain_nursery
from replicad.protocol.commands import RemoteServerUp
from replicad.retry import Backoff
from replicad.sender.engine import Engine
from replicad.sender.items import Edu, Order, Pdu
from replicad.sender.routing import Router, SourceRow, Update, body_text
from replicad.sender.store import FactBatch, Recorded, Restart, SenderStore
from replicad.sender.transport import OWN
from replicad.streams.commands import FederationAck

NOW = "NOW"
EARLIEST = "EARLIEST"
ACK_RETRY = 1.0  # seconds; nothing waits for an ack

_Also = PositionMoved | Connected | Disconnected | StreamStopped | RemoteServerUp
_ALSO: tuple[type[_Also], ...] = (PositionMoved, Connected, Disconnected, StreamStopped, RemoteServerUp)
UpstreamEvent = RowBatch | Reset | _Also

log = structlog.get_logger()


class Upstream:
    """A connection to the daemon that is made again when it was lost. Made by `client_upstream`."""

    def __init__(self, follower: AsyncFollower[UpstreamEvent]) -> None:
        self._follower = follower
        self._acks: dict[str, FederationAck] = {}  # by stream; not sent yet
        self._new_ack = trio.Event()

    def follow(self) -> AsyncIterator[UpstreamEvent]:
        """Rows of every stream in ascending order over all writers, and the other events that a sender needs.

        Never ends by itself. Raises ReplicadError if another try would not help.
        """
        return self._follower

    def epoch(self, stream: str) -> str | None:
        """The generation of the stream to which the last event belongs; None before the first answer."""
        return self._follower.epoch(stream)

    def acknowledge(self, sender: str, stream: str, token: int) -> None:
        """Send soon up to which token a stream is recorded. Of each stream the last token counts."""
        self._acks[stream] = FederationAck(sender, token, stream)
        self._new_ack.set()

    async def send_acks(self) -> None:
        """Send the last ack of each stream; try again if it fails.

        Acks go out on the connection that follows the streams. After a fork the daemon accepts acks only there, because
        only that connection has named the generation of its rows.
        """
        while True:
            await self._new_ack.wait()
            self._new_ack = trio.Event()
            acks = [ack for stream, ack in self._acks.items() if self._follower.is_accepted(stream)]
            try:
                if acks:
                    await self._follower.send(*acks)
            except (ConnectionLost, RemoteError, DatabaseError) as error:
                log.debug("ack_not_sent", error=str(error))
            else:
                for ack in acks:
                    if ack.stream is not None and self._acks[ack.stream] is ack:
                        del self._acks[ack.stream]
            if self._acks:
                self._new_ack.set()
                await trio.sleep(ACK_RETRY)


OpenUpstream = Callable[[Mapping[str, str]], AbstractAsyncContextManager[Upstream]]
"""Connects to the daemon and follows streams, each behind a token: of `Recorded`, a number, NOW or EARLIEST."""


def client_upstream(
    host: str, port: int | None, *, name: str, token: str | None = None, tls: ssl.SSLContext | None = None
) -> OpenUpstream:
    """How to open upstreams of the daemon at host:port, or of several (see `open_client`).

    `name` is our name for the daemon, `token` its secret.
    """

    @asynccontextmanager
    async def open_upstream(tokens: Mapping[str, str]) -> AsyncIterator[Upstream]:
        async with open_client(host, port, name=name, token=token, tls=tls) as client:
            async with client.follow(tokens, linear=True, also=_ALSO) as follower, open_plain_nursery() as nursery:
                upstream = Upstream(follower)
                nursery.start_soon(upstream.send_acks)
                yield upstream

    return open_upstream


AHEAD = 256  # events that are read before they are recorded; beyond it the daemon's socket is not read
ROWS = 1000  # routed and recorded together, so that the cost of a commit is small
# Facts times destinations, likewise. Fewer: more requests with few facts. More: nothing else is stored for longer.
PAIRS = 25_000  # a single fact may have more
STRANGE_NAMES = 1000  # invalid names that are logged at most
IDLE_TOKEN = 1.0  # seconds after which a position without rows is stored too

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IntakeStatistics:
    """Counts since the session began."""

    rows: int
    skipped: int
    refused_names: int


class SenderIntake:
    """See the module. `mine`: whether this sender serves a destination. `objection`: why a name is refused, or None."""

    def __init__(
        self,
        *,
        store: SenderStore,
        engine: Engine,
        router: Router,
        facts: str,
        sender: str,
        mine: Callable[[str], bool],
        objection: Callable[[str], str | None],
        skip_bad_rows: bool = False,
        connected: Callable[[], None] = lambda: None,
    ) -> None:
        """`connected` is called whenever there is a connection to the daemon."""
        self._store = store
        self._engine = engine
        self._router = router
        self._facts = facts
        self._sender = sender
        self._mine = mine
        self._objection = objection
        self._skip_bad_rows = skip_bad_rows
        self._connected = connected
        self._recorded: dict[str, int | None] = {}
        self._everywhere: dict[str, int | None] = {}  # likewise, by all senders of our name: what may be acknowledged
        self._told: dict[str, int] = {}  # positions without rows that are not stored yet
        self._moves: MutableMapping[str, str] = {}  # streams that continue at their first position
        self._acknowledged: dict[str, int] = {}
        self._strange: set[str] = set()  # invalid names that were logged
        self._rows = self._skipped = self._refused_names = 0
        self.began = trio.Event()  # the daemon has accepted the tokens, and void rows were forgotten

    def statistics(self) -> IntakeStatistics:
        """A frozen copy of the counters."""
        return IntakeStatistics(self._rows, self._skipped, self._refused_names)

    async def run(
        self, upstream: Upstream, recorded: Mapping[str, Recorded], moves: MutableMapping[str, str] | None = None
    ) -> None:
        """Take rows until cancelled. `recorded`: up to where each stream is recorded.

        Streams in `moves` continue at their first position, whatever was recorded. Then they are removed from `moves`.

        Raises:
            Restart: a stream was reset or went back; the store has been corrected.
            ReplicadError: from the upstream or from Postgres.
        """
        self._recorded = {stream: one.token for stream, one in recorded.items()}
        self._everywhere = {stream: one.everywhere for stream, one in recorded.items()}
        self._moves = moves if moves is not None else {}
        epochs = {stream: one.epoch for stream, one in recorded.items()}
        write, read = trio.open_memory_channel[UpstreamEvent | GenerationBegan](AHEAD)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, upstream, write, epochs)
            while True:
                await self._take_next(upstream, read)

    async def _take_next(
        self, upstream: Upstream, read: trio.MemoryReceiveChannel[UpstreamEvent | GenerationBegan]
    ) -> None:
        """Process the events that have come, or store positions if none comes."""
        events: list[UpstreamEvent | GenerationBegan] = []
        behind = self._others_are_behind()
        with trio.move_on_after(IDLE_TOKEN if self._told or behind else math.inf):
            events.append(await read.receive())
        if not events:
            await self._write_positions(upstream, look=behind)
        while events and len(events) < ROWS:
            try:
                events.append(read.receive_nowait())
            except trio.WouldBlock:
                break
        await self._take(upstream, events)

    async def _pump(
        self,
        upstream: Upstream,
        write: trio.MemorySendChannel[UpstreamEvent | GenerationBegan],
        epochs: MutableMapping[str, str | None],
    ) -> None:
        """Pass events on; `GenerationBegan` before the first event of a generation. `epochs`: earlier generations.

        If rows are void, a Reset comes first. Only after it are the recorded rows true in the next generation.
        """
        async for event in upstream.follow():
            if isinstance(event, RowBatch | PositionMoved):
                epoch = upstream.epoch(event.stream)
                if epoch is not None and epoch != epochs.get(event.stream):
                    epochs[event.stream] = epoch
                    await write.send(GenerationBegan(event.stream, epoch))
            if isinstance(event, RemoteServerUp):
                self._engine.wake(event.server_name)  # at once, even if rows wait
            else:
                await write.send(event)

    async def _take(self, upstream: Upstream, events: Sequence[UpstreamEvent | GenerationBegan]) -> None:
        """Process events in order. Consecutive rows of one stream are processed together."""
        batches: list[RowBatch] = []
        for event in events:
            if batches and not (isinstance(event, RowBatch) and event.stream == batches[0].stream):
                await self._take_rows(upstream, batches)
                batches = []
            if isinstance(event, RowBatch):
                batches.append(event)
            else:
                await self._take_other(event)
        if batches:
            await self._take_rows(upstream, batches)

    async def _take_other(self, event: UpstreamEvent | GenerationBegan) -> None:
        match event:
            case GenerationBegan():
                await self._store.follow(event.stream, event.epoch)
            case PositionMoved():
                await self._position(event)
            case Reset():
                log.warning("stream_reset", stream=event.stream, reason=event.reason, position=event.token)
                if event.token is not None:
                    self._note_rewound(event, await self._store.fork(event.stream, event.token))
                elif event.reason == BadToken.code:
                    await self._check_restored(event.stream)
                raise Restart
            case Connected():
                log.info("daemon_connected", server=event.server_name)
                self.began.set()
                self._connected()
                self._acknowledged.clear()  # sent again with the first position of this connection
            case Disconnected():
                log.warning("daemon_lost", error=str(event.error), retry_in=round(event.retry_in, 3))
            case StreamStopped():
                log.warning(
                    "stream_stopped", stream=event.stream, error=str(event.error), retry_in=round(event.retry_in, 3)
                )
            case _:
                pass

    async def _position(self, event: PositionMoved) -> None:
        known = self._recorded.get(event.stream)
        moving = self._moves.pop(event.stream, None) is not None
        if known is not None and not moving:
            self._told[event.stream] = event.token
            return
        if known is None:
            await self._store.begin(event.stream, event.token)
            self._everywhere[event.stream] = (await self._store.recorded())[event.stream].everywhere
        elif event.token >= known:
            self._everywhere[event.stream] = await self._store.record(event.stream, event.token, FactBatch())
        else:
            names = list(self._engine) if event.stream == self._facts else []
            self._note_rewound(event, await self._store.rewind(event.stream, event.token, names))
            raise Restart
        self._recorded[event.stream] = event.token

    @staticmethod
    def _note_rewound(event: PositionMoved | Reset, forgotten: int) -> None:
        log.warning("stream_rewound", stream=event.stream, position=event.token, facts_forgotten=forgotten)

    async def _check_restored(self, stream: str) -> None:
        """The server does not know the generation of our token: its database was restored to an earlier time.

        The state of the sender was restored with it, unless this session has written since. Then it speaks of rows
        that are void.

        Raises:
            StreamRestarted: the state is that of this session.
        """
        recorded = self._recorded.get(stream)
        found = (await self._store.recorded()).get(stream)
        if recorded is not None and found is not None and found.token == recorded:
            raise StreamRestarted(
                f"the history of stream {stream} forked at an unknown position, and it was recorded up to {recorded}. "
                "Start the sender once with --from to say where to go on: a token, now or earliest"
            )

    async def _take_rows(self, upstream: Upstream, batches: Sequence[RowBatch]) -> None:
        stream, upto = batches[0].stream, batches[-1].token
        if batches[0].token <= 0:
            raise SenderRefused(f"stream {stream} has ids that are not above 0, such as {batches[0].token}")
        rows = [SourceRow(batch.token, part, text) for batch in batches for part, text in enumerate(batch.rows)]
        if stream == self._facts:
            await self._route(rows, upto, self._route_facts, self._record_facts)
        else:
            route = partial(self._route_updates, stream)
            await self._route(rows, upto, route, partial(self._record_updates, stream))
        self._rows += len(rows)
        self._recorded[stream] = upto
        self._told.pop(stream, None)
        self._acknowledge(upstream)

    def _others_are_behind(self) -> bool:
        """Whether another sender of our name had recorded less when we looked. Two that record at the same time do not
        see each other: each would leave the ack to the other.
        """
        return any(
            upto is not None and upto < (self._recorded.get(stream) or 0) for stream, upto in self._everywhere.items()
        )

    async def _write_positions(self, upstream: Upstream, *, look: bool) -> None:
        for stream, token in self._told.items():
            if token > (self._recorded.get(stream) or 0):
                self._everywhere[stream] = await self._store.record(stream, token, FactBatch())
                self._recorded[stream] = token
        self._told.clear()
        if look:
            self._everywhere |= {stream: one.everywhere for stream, one in (await self._store.recorded()).items()}
        self._acknowledge(upstream)

    def _acknowledge(self, upstream: Upstream) -> None:
        """Send acks for all that every sender of our name has recorded; they are sent again after a lost connection."""
        for stream, token in self._everywhere.items():
            if token is not None and token != self._acknowledged.get(stream):
                upstream.acknowledge(self._sender, stream, token)
                self._acknowledged[stream] = token

    # --- routing ---

    async def _route(
        self,
        rows: Sequence[SourceRow],
        upto: int,
        route: Callable[[Sequence[SourceRow]], Awaitable[T]],
        record: Callable[[int, T], Awaitable[None]],
    ) -> None:
        """Route rows and record them and the token `upto`. Rows before a bad row are recorded."""
        backoff = Backoff(first=1.0, cap=60.0)
        while True:
            pause = backoff.next_delay()
            try:
                routed = await route(rows)
                break
            except RouteFailed as error:
                if len(rows) > 1:
                    half = len(rows) // 2  # tokens ascend: with this half all tokens below its last token are recorded
                    await self._route(rows[:half], rows[half - 1].token - 1, route, record)
                    await self._route(rows[half:], upto, route, record)
                    return
                if self._skip_bad_rows:
                    log.warning("row_skipped", token=rows[0].token, error=str(error))
                    self._skipped += 1
                    routed = await route([])
                    break
                log.warning("row_not_routed", token=rows[0].token, error=str(error), retry_in=round(pause, 3))
            except DatabaseUnavailable:
                raise
            except DatabaseError as error:
                log.warning("routing_failed", token=rows[0].token, error=str(error), retry_in=round(pause, 3))
            await trio.sleep(pause)
        await record(upto, routed)

    async def _route_facts(self, rows: Sequence[SourceRow]) -> list[tuple[Pdu, Sequence[str]]]:
        found = await self._router.facts(rows)
        return [
            (Pdu(Order(row.token, row.part), fact.room, body_text(row, fact.body)), fact.destinations)
            for row, fact in zip(rows, found, strict=True)
            if fact is not None
        ]

    async def _route_updates(self, stream: str, rows: Sequence[SourceRow]) -> list[tuple[Update, str]]:
        found = await self._router.updates(stream, rows)
        return [
            (update, body_text(row, update.body)) for row, update in zip(rows, found, strict=True) if update is not None
        ]

    # --- recording ---

    async def _record_facts(self, upto: int, routed: Sequence[tuple[Pdu, Sequence[str]]]) -> None:
        taken: list[tuple[Pdu, list[str]]] = []
        recording = FactBatch()
        for pdu, destinations in routed:
            full = len(recording.names) + len(destinations) > PAIRS and recording.names
            if full and pdu.order.token > recording.pdus[-1].order.token:  # rows that share a token stay together
                await self._flush(pdu.order.token - 1, recording, taken)
                taken, recording = [], FactBatch()
            wanted = await self._wanted(destinations, pdu)
            names = [name for name in wanted if not self._engine.has_had(name, pdu)]
            if names:
                recording.add(pdu, names)
                recording.newcomers.extend(name for name in names if name not in self._engine)
                taken.append((pdu, names))
        await self._flush(upto, recording, taken)

    async def _flush(self, upto: int, recording: FactBatch, taken: Sequence[tuple[Pdu, list[str]]]) -> None:
        self._everywhere[self._facts] = await self._store.record(self._facts, upto, recording)
        self._engine.accept(taken)

    async def _record_updates(self, stream: str, upto: int, routed: Sequence[tuple[Update, str]]) -> None:
        kept: list[tuple[str, Edu]] = []
        dropping: list[tuple[Edu, list[str]]] = []
        for update, body in routed:
            edu = Edu(body, update.key)
            names = await self._wanted(update.destinations, None if update.droppable else edu)
            if update.droppable:
                dropping.append((edu, names))
            else:
                kept.extend((name, edu) for name in names)
        self._everywhere[stream] = await self._store.record_edus(stream, upto, kept)
        self._engine.expect_edus(dict.fromkeys(name for name, _ in kept))
        for edu, names in dropping:
            self._engine.accept_edu(edu, names)

    async def _wanted(self, destinations: Iterable[str], item: Pdu | Edu | None) -> list[str]:
        """The destinations of this sender among them. `item` is parked for destinations that cannot be sent to."""
        names: list[str] = []
        refused: list[tuple[str, str]] = []
        for name in destinations:
            reason = None
            if name not in self._engine:  # else it is ours, and was found to be possible
                if not self._mine(name):
                    continue
                reason = self._objection(name)
            if reason is None:
                names.append(name)
            else:
                self._note_refused(name, reason)
                refused.append((name, reason))
        parked = [(name, item, reason) for name, reason in refused if reason != OWN] if item is not None else []
        if parked:
            await self._store.park(parked)
        return names

    def _note_refused(self, name: str, reason: str) -> None:
        self._refused_names += 1
        if name not in self._strange and len(self._strange) < STRANGE_NAMES:
            self._strange.add(name)
            log.warning("destination_refused", destination=name[:200], reason=reason)
