"""A connection to the daemon on trio or asyncio: like `link.SocketLink`, with tasks instead of a thread.

It sends and receives bytes and keeps the deadlines; `requests` and `follow_loop` interpret them. Only one task reads,
so that a cancelled request interrupts no read. It stops reading until the owner has taken the lines before. These wait
in an attribute, so that the owner loses none when it is cancelled.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Callable
from math import inf
from typing import Any, TypeVar

import anyio
from anyio.abc import ByteStream, TaskGroup
from anyio.streams.tls import TLSStream

from replicad.client.link import READ_BYTES, DaemonTarget, FailedChoices, Link, reason
from replicad.client.requests import greet
from replicad.client.steps import Receive, Send, Steps
from replicad.errors import ConnectionLost, ReplicadError
from replicad.groups import leaves
from replicad.loops import open_plain_tasks
from replicad.protocol.command import Command
from replicad.protocol.commands import Ping
from replicad.protocol.connection import Due
from replicad.tubes.commands import Part

_READY = re.compile(rb"^READY (\S{1,200}) ([0-9]{1,5})/([0-9]{1,5})\r?$", re.MULTILINE)


class ReadyCalls:
    """The calls of one client at READY lines of the daemon. No connection, no clock.

    There is at most one for each partition, and one for any partition of a tube.

    Each call is made once. All calls are made when the connection ends, because no READY comes on it any more.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[str, Part | None], Callable[[], None]] = {}

    def when(self, tube: str, part: Part | None, call: Callable[[], None]) -> None:
        """Call `call` at the next READY for the partition (None: any), in place of the call that was set before."""
        self._calls[tube, part] = call

    def look_at(self, block: bytes) -> None:
        """Make the calls for the READY lines among these lines."""
        if b"READY " not in block:  # as almost always
            return
        for found in _READY.finditer(block):
            tube = found[1].decode(errors="replace")
            self._call((tube, Part(int(found[2]), int(found[3]))))
            self._call((tube, None))

    def call_all(self) -> None:
        """The connection has ended."""
        for place in list(self._calls):
            self._call(place)

    def _call(self, place: tuple[str, Part | None]) -> None:
        call = self._calls.pop(place, None)
        if call is not None:
            call()


T = TypeVar("T")

_GRACE = 0.05  # seconds for the reader to take received bytes after the whole process was suspended
_LAST_ERROR = 0.5  # seconds to receive an ERROR that was sent before the connection broke
_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.BusyResourceError, ssl.SSLError, OSError)


async def open_link(target: DaemonTarget, tasks: TaskGroup, ready: ReadyCalls | None = None) -> AsyncLink:
    """`open_one`, to the first daemon that answers. Raises the errors of `open_one`."""
    if not target.others:
        return await open_one(target, tasks, ready)
    failed = FailedChoices()
    for choice in target.choices():
        try:
            return await open_one(choice, tasks, ready)
        except ReplicadError as error:
            failed.add(error)
    raise failed.error()


async def open_one(target: DaemonTarget, tasks: TaskGroup, ready: ReadyCalls | None) -> AsyncLink:
    """Connect, make the TLS handshake, wait for SERVER and send our name, all within `connect_timeout`.

    The link's tasks live in `tasks` until it is closed. `ready`: the calls for READY lines.

    Raises:
        ConnectionLost: it could not be made; the message says why.
        WrongServer, NotAuthorised, ReplicadError: the server has another name, or sent this error.
    """
    link: AsyncLink | None = None
    try:
        with anyio.fail_after(target.connect_timeout):
            link = AsyncLink(await connect(target), target, ready)
            tasks.start_soon(link.serve)
            link.server_name = await link.run(greet(link.connection, target.us))
    except TimeoutError as error:
        if link is not None:
            link.close()
        raise ConnectionLost(f"no connection to {target}: no answer in time") from error
    except BaseException:
        if link is not None:
            link.close()
        raise
    return link


async def connect(target: DaemonTarget) -> ByteStream:
    """A connection to the daemon, after the TLS handshake; nothing was sent on it. Raises ConnectionLost."""
    if target.dial is not None:
        dialled: ByteStream = await target.dial()
        return dialled
    stream: ByteStream | None = None
    try:
        stream = await anyio.connect_tcp(target.host, target.port)
        if target.tls is not None:
            stream = await TLSStream.wrap(
                stream, hostname=target.host, ssl_context=target.tls, standard_compatible=False
            )
    except (OSError, UnicodeError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
        if stream is not None:
            await anyio.aclose_forcefully(stream)
        raise ConnectionLost(f"no connection to {target}: {_why(error)}") from error
    except BaseException:
        if stream is not None:
            await anyio.aclose_forcefully(stream)
        raise
    return stream


def _why(error: BaseException) -> str:
    """The reason of a failure for people; of attempts at several addresses, that of the first one."""
    return reason(leaves(error.__cause__ or error)[0])


class AsyncLink(Link):
    """An open connection. One task at a time runs steps on it. Any failure closes it for good.

    Use `begin` and `end` around requests. Between requests received lines are discarded, so that PINGs do not
    accumulate and the end of the connection is noticed at once.
    """

    def __init__(self, stream: ByteStream, target: DaemonTarget, ready: ReadyCalls | None = None) -> None:
        super().__init__(target, anyio.current_time())
        self._ready = ready or ReadyCalls()
        self._stream = stream
        self._sending = anyio.Lock()
        self._block: bytes | None = None  # delivered, and not yet taken by the owner
        self._arrived = anyio.Event()  # set when there is a block, or none will come
        self._wanted = anyio.Event()  # the owner waits for a block
        self._scope = anyio.CancelScope()

    # --- for the owner ---

    def begin(self) -> bool:
        """Begin a request; False if the connection has ended."""
        self._busy = True
        return not self.closed

    def end(self) -> None:
        """End a request, after its whole answer."""
        self._busy = False
        self._wanted.set()
        if self._block is not None:
            block, self._block = self._block, None
            self._pass_over(block)

    async def run(self, steps: Steps[T]) -> T:
        """Perform steps that yield nothing for the user, and return their result."""
        answer: bytes | None = None
        try:
            while True:
                answer = await self.perform(steps.send(answer))
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def perform(self, step: Any) -> bytes | None:
        """Perform a Send or a Receive.

        Raises:
            ConnectionLost: the connection ended, or the deadline has passed.
        """
        if isinstance(step, Send):
            await self.send(step.commands)
            return None
        assert isinstance(step, Receive)
        if step.within is not None:
            self._deadline = anyio.current_time() + step.within
        return await self.receive()

    def close(self) -> None:
        """Close the connection; safe to repeat. Does not wait."""
        self._fail(ConnectionLost(f"the connection to {self.target} was closed"))

    # --- sending and receiving ---

    async def send(self, commands: tuple[Command, ...]) -> None:
        """Send commands in one piece, waiting for the socket for at most `answer_timeout`. Cancelled: closes."""
        self._check_open()
        now = anyio.current_time()
        data = b"".join(self.connection.send(command, now) for command in commands)
        sent = False
        try:
            async with self._sending:
                with anyio.move_on_after(self.target.answer_timeout):
                    await self._stream.send(data)
                    sent = True
        except _BROKEN as error:
            with anyio.move_on_after(_LAST_ERROR), contextlib.suppress(ReplicadError):
                self._pass_over(await self._next_block())  # the peer may have sent the reason before
            self._fail(ConnectionLost(f"the connection to {self.target} broke: {_why(error)}"))
        finally:
            if not sent:
                self._fail(ConnectionLost(f"{self.target} does not read any more"))
        self._check_open()

    async def receive(self) -> bytes:
        """The next whole lines.

        Raises:
            ConnectionLost: the connection ended, or the deadline has come.
        """
        if self._deadline == inf or self._block is not None:
            return await self._next_block()
        with anyio.CancelScope(deadline=self._deadline):
            return await self._next_block()
        if self._block is None:
            self._fail(ConnectionLost(f"{self.target} did not answer in time"))
        return await self._next_block()

    async def _next_block(self) -> bytes:
        """The next block; raises the reason if the connection has ended. A cancelled call leaves the block."""
        while self._block is None:
            self._check_open()
            if self._arrived.is_set():
                self._arrived = anyio.Event()
            self._wanted.set()
            await self._arrived.wait()
        block, self._block = self._block, None
        return block

    # --- the tasks ---

    async def serve(self) -> None:
        """Read and send PINGs until the link is closed, then close the stream. Raises only when cancelled."""
        try:
            with self._scope:
                async with open_plain_tasks() as tasks:
                    if self.target.keepalive:
                        tasks.start_soon(self._keep_alive)
                    await self._read()
        finally:
            self.close()
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        """Receive until the connection ends."""
        try:
            while True:
                self._reading = True
                data = await self._stream.receive(READ_BYTES)
                self._reading = False
                await self._hand_over(data)
        except anyio.EndOfStream:
            self._fail(ConnectionLost(f"{self.target} closed the connection"))
        except _BROKEN as error:
            self._fail(ConnectionLost(f"the connection to {self.target} broke: {_why(error)}"))
        except ReplicadError as error:
            self._fail(error)

    async def _hand_over(self, data: bytes) -> None:
        """Deliver lines to the owner during a request, and discard them otherwise.

        Bytes are parsed only when the owner waits for more, since the block before may announce raw bytes.
        """
        while True:
            if self._busy:
                await self._wanted.wait()
            block = self.connection.receive_block(data, anyio.current_time())
            self._ready.look_at(block)
            if block and self._busy:
                self._wanted = anyio.Event()
                self._block = block
                self._arrived.set()
            elif block:
                self._pass_over(block)
            if not self.connection.holds_back:
                return
            data = b""

    async def _keep_alive(self) -> None:
        """Send PINGs when nothing else is sent, and give up on a silent peer."""
        while not self.closed:
            now = anyio.current_time()
            if not self._reading:
                self.connection.pardon(now)  # the owner does not read, so the peer's silence does not count
            due = self.connection.due(now)
            if due in (Due.PEER_SILENT, Due.UNFINISHED_LINE):
                await anyio.sleep(_GRACE)
                due = self.connection.due(now)
            match due:
                case Due.PING:
                    with contextlib.suppress(ReplicadError):  # raised to the owner by its next call
                        await self.send((Ping(),))
                case None:
                    await anyio.sleep_until(self.connection.next_deadline())
                case overdue:
                    self._fail(self._overdue(overdue))

    # --- the end ---

    def _pass_over(self, block: bytes) -> None:
        """Discard lines that were received between requests; an ERROR in them ends the connection."""
        try:
            self._look_at(block)
        except ReplicadError as error:
            self._fail(error)

    def _fail(self, error: ReplicadError) -> None:
        """End the tasks and keep the reason; the first one counts. Lines received before can still be taken."""
        if self._ended is None:
            self._ended = error
            self._arrived.set()
            self._scope.cancel()
            self._ready.call_all()
