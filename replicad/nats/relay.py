"""Publishes the rows of a stream into a stream of JetStream, each row once and in order (docs/nats.md).

The place to continue from is in the last message of the JetStream stream, so there is no other state that could differ
from it. Each message names the sequence number that it expects before it (`Nats-Expected-Last-Sequence`). So no message
is stored twice, none is stored after a hole, and of two relays only one publishes at a time. After any doubt (an
acknowledgement that did not come, a connection that was lost) the relay reads the last message again.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import nats
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from nats.js.errors import APIError, NotFoundError

from replicad.client.async_client import AsyncClient
from replicad.client.events import Reset, RowBatch
from replicad.errors import BadToken, DownstreamError, TokenExpired
from replicad.eventlog import get_logger
from replicad.groups import leaves
from replicad.loops import open_plain_tasks
from replicad.retry import Backoff

RESUME = "Replicad-Resume"  # the token from which a relay continues after this message
PART = "Replicad-Part"  # `2/3`: the second of three rows with one token
OF_ROW = "Replicad-Token"
INSTANCE = "Replicad-Instance"
RESET = "Replicad-Reset"  # the reason: discard rows that were published before, as the body says
ID = "Nats-Msg-Id"
EXPECTED = "Nats-Expected-Last-Sequence"

WINDOW = 256  # messages that are published and not acknowledged; a round trip of 1 ms allows a quarter million rows/s
ACK_TIME = 10.0  # seconds for an acknowledgement
DUPLICATES = 120.0  # seconds for which JetStream knows ids, its own default

log = get_logger(__name__)

_FAILURES = (NatsError, APIError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """What is published where."""

    stream: str
    jetstream: str  # the name of the stream of JetStream
    subject: str
    begin: str = "EARLIEST"  # the token for a stream of JetStream that is empty
    create: bool = False  # make the stream of JetStream if it is absent


@dataclass(frozen=True, slots=True)
class RelayPlace:
    """The end of the JetStream stream: its last sequence number, the token to follow from, and how many rows of the
    first token are published already.
    """

    sequence: int
    token: str
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """A message before it has its place in the order."""

    body: bytes
    headers: dict[str, str]


OpenClient = Callable[[], AbstractAsyncContextManager[AsyncClient]]
Connect = Callable[[], AbstractAsyncContextManager[Client]]


@asynccontextmanager
async def connect_nats(servers: list[str], **options: Any) -> AsyncIterator[Client]:
    """A connection to a NATS server, closed at the end of the block. It is lost for good when it breaks."""

    async def note(error: Exception) -> None:
        log.debug("nats_error", reason=str(error) or type(error).__name__)

    connection = await nats.connect(
        servers, allow_reconnect=False, connect_timeout=5, error_cb=note, name="replicad", **options
    )
    try:
        yield connection
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(2):
            await connection.close()


class JetStreamRelay:
    """Publishes one stream until it is cancelled. `published` counts the messages that JetStream has acknowledged."""

    def __init__(self, open_client: OpenClient, connect: Connect, settings: RelaySettings) -> None:
        self._open_client = open_client
        self._connect = connect
        self._settings = settings
        self._backoff = Backoff(first=0.2, cap=10.0)
        self.published = 0

    async def run(self) -> None:
        """Publish for ever. What may pass is tried again.

        Raises:
            DownstreamError: the stream of JetStream is absent, holds messages of others, or does not take a row.
            ReplicadError: the daemon refuses the stream.
        """
        while True:
            try:
                async with self._connect() as connection:
                    jetstream = connection.jetstream(timeout=ACK_TIME)
                    await self._publish(jetstream, await self._find_place(jetstream))
            except MaxPayloadError as error:
                raise DownstreamError(
                    f"a row of stream {self._settings.stream} is longer than a message may be (max_payload of NATS)"
                ) from error
            except _FAILURES as error:
                await self._pause(error)
            except ExceptionGroup as group:  # the publishing and an acknowledgement have failed at the same moment
                if not all(isinstance(error, _FAILURES) for error in leaves(group)):
                    raise
                await self._pause(leaves(group)[0])

    async def _pause(self, error: BaseException) -> None:
        pause = self._backoff.next_delay()
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        log.warning("nats_interrupted", stream=self._settings.stream, reason=reason, retry_in=round(pause, 1))
        await anyio.sleep(pause)

    async def _find_place(self, jetstream: JetStreamContext) -> RelayPlace:
        """Where to continue. Raises DownstreamError if JetStream cannot say it."""
        wanted = self._settings
        try:
            info = await jetstream.stream_info(wanted.jetstream)
        except NotFoundError:
            if not wanted.create:
                raise DownstreamError(
                    f"JetStream has no stream {wanted.jetstream}: make it, with the subject {wanted.subject}, "
                    "or give --create"
                ) from None
            made = StreamConfig(name=wanted.jetstream, subjects=[wanted.subject], duplicate_window=DUPLICATES)
            info = await jetstream.add_stream(made)
            log.info("nats_stream_created", jetstream=wanted.jetstream, subject=wanted.subject)
        last = info.state.last_seq
        if last == 0:
            return RelayPlace(0, wanted.begin)
        try:
            found = await jetstream.get_msg(wanted.jetstream, seq=last)
        except NotFoundError:
            if wanted.begin == "EARLIEST":
                raise DownstreamError(
                    f"the last message of JetStream stream {wanted.jetstream} was removed, and with it the place to "
                    f"continue from: give --from TOKEN; the removed message had the number {last}"
                ) from None
            return RelayPlace(last, wanted.begin)
        headers = found.headers or {}
        if found.subject != wanted.subject or RESUME not in headers:
            raise DownstreamError(
                f"message {last} of JetStream stream {wanted.jetstream} (subject {found.subject}) is not from this "
                f"command: a stream of its own is needed, with the subject {wanted.subject} and no other publisher"
            )
        part, _, parts = headers.get(PART, "1/1").partition("/")
        return RelayPlace(last, headers[RESUME], 0 if part == parts else int(part))

    async def _publish(self, jetstream: JetStreamContext, place: RelayPlace) -> None:
        """Publish from a place until something fails."""
        send, receive = anyio.create_memory_object_stream[tuple[int, Awaitable[Any]]](WINDOW)
        async with self._open_client() as client, open_plain_tasks() as tasks:
            tasks.start_soon(self._await_acks, receive)
            try:
                await self._send_rows(jetstream, client, place, send)
            except (TokenExpired, BadToken) as error:  # rows were trimmed that are not published, or all is another now
                reset = Reset(self._settings.stream, None, None, error.code)
                sequence = await self._send(jetstream, reset, place, "EARLIEST", send)
                await self._send_rows(jetstream, client, RelayPlace(sequence, "EARLIEST"), send)

    async def _send_rows(
        self,
        jetstream: JetStreamContext,
        client: AsyncClient,
        place: RelayPlace,
        sent: MemoryObjectSendStream[tuple[int, Awaitable[Any]]],
    ) -> None:
        stream = self._settings.stream
        async with client.follow({stream: place.token}) as follower:
            async for event in follower:
                after = follower.token(stream) or "EARLIEST"
                place = RelayPlace(await self._send(jetstream, event, place, after, sent), after)

    async def _send(
        self,
        jetstream: JetStreamContext,
        event: RowBatch | Reset,
        place: RelayPlace,
        after: str,
        sent: MemoryObjectSendStream[tuple[int, Awaitable[Any]]],
    ) -> int:
        """Publish what is not published of an event; the sequence number of the last message."""
        sequence = place.sequence
        for message in list(messages(self._settings.stream, event, place.token, after))[place.rows :]:
            headers = {**message.headers, EXPECTED: str(sequence)}
            acknowledged = await jetstream.publish_async(
                self._settings.subject, message.body, headers=headers, wait_stall=ACK_TIME
            )
            sequence += 1
            await sent.send((sequence, acknowledged))
        return sequence

    async def _await_acks(self, sent: MemoryObjectReceiveStream[tuple[int, Awaitable[Any]]]) -> None:
        async for sequence, acknowledged in sent:
            with anyio.fail_after(ACK_TIME):
                found = await acknowledged
            if found.seq != sequence:
                raise TimeoutError(f"message {sequence} was acknowledged as {found.seq}; the place is read again")
            self.published += 1
            self._backoff.reset()


def messages(stream: str, event: RowBatch | Reset, before: str, after: str) -> Iterator[Message]:
    """The messages of an event, between two tokens. Their ids are the same whenever the event is published."""
    generation = after.partition("!")[0] if "!" in after else ""
    if isinstance(event, Reset):
        body = {"stream": stream, "instance": event.instance, "discard_after": event.token, "reason": event.reason}
        name = f"{stream}:{generation}:reset:{event.instance}:{event.token}:{event.reason}:{before}"
        yield Message(json.dumps(body).encode(), {ID: name, RESET: event.reason, RESUME: after})
        return
    rows = len(event.rows)
    for part, row in enumerate(event.rows, 1):
        headers = {
            ID: f"{stream}:{generation}:{event.instance}:{event.token}:{part}",
            OF_ROW: str(event.token),
            INSTANCE: event.instance,
            RESUME: after if part == rows else before,
        }
        yield Message(row.encode(), headers if rows == 1 else {**headers, PART: f"{part}/{rows}"})
