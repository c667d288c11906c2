"""One connection to Redis on trio. `hiredis` packs and parses; this file opens, waits and gives up in time.

A connection either asks (`call`, `call_all`) or, after `subscribe`, receives. Nothing is queued here: what the owner
does not take stays in the socket, and Redis ends the connection of a subscriber for which it has to keep too much.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Sequence
from typing import Any

import hiredis
import trio

from replicad.errors import RedisRefused, RedisUnavailable, ReplicadError
from replicad.redis.address import RedisAddress
from replicad.streams.chunks import MAX_ROW

CONNECT_TIMEOUT = 5.0  # seconds, with TLS and the password
ANSWER_TIMEOUT = 5.0  # seconds for all answers to what was sent together
READ_BYTES = 1 << 16
MOST_BYTES = MAX_ROW + (1 << 20)  # of one message or answer: the longest row with what is around it
_BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError, OSError)
_PASSING = ("LOADING", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "BUSY", "READONLY")  # the next try may be answered

Word = str | bytes | int


def refused(address: RedisAddress, error: Exception) -> ReplicadError:
    """Our exception for an error reply."""
    text = str(error)
    code = text.partition(" ")[0]
    if code in ("NOAUTH", "WRONGPASS") or "invalid password" in text or "without any password" in text:
        remedy = "give the password in the URL or by REPLICAD_REDIS_PASSWORD, and the user in the URL"
        return RedisRefused(f"{address} does not accept the password: {text[:200]}; {remedy}")
    if code == "NOPERM":
        return RedisRefused(f"{address}: {text[:300]}; docs/transports.md has the rights that replicad needs")
    if code in _PASSING:
        return RedisUnavailable(f"{address}: {text[:300]}")
    return RedisRefused(f"{address}: {text[:300]}")


class RedisLink:
    """An open connection, made by `open_redis`. For one task at a time. Any failure closes it for good."""

    def __init__(self, stream: trio.abc.Stream, address: RedisAddress, timeout: float) -> None:
        self.address = address
        self._stream = stream
        self._timeout = timeout
        self._reader = hiredis.Reader()
        self._unparsed = 0  # bytes that the reader has kept since it gave something, about

    async def call(self, *words: Word) -> Any:
        """The answer to one command. Raises RedisUnavailable and RedisRefused."""
        answer = (await self.call_all([words]))[0]
        if isinstance(answer, hiredis.ReplyError):
            raise refused(self.address, answer)
        return answer

    async def call_all(self, commands: Sequence[tuple[Word, ...]]) -> list[Any]:
        """The answers to several commands, which are sent together; error replies are among them as exceptions.

        Raises:
            RedisUnavailable: the connection was lost, or not all answers came in time.
        """
        answers: list[Any] = []
        with trio.move_on_after(self._timeout) as scope:
            try:
                # What Redis answers is short, so it does not block while we send.
                await self._send(b"".join(_pack(words) for words in commands))
                while len(answers) < len(commands):
                    answers.append(await self._next())
            except BaseException:
                await self.aclose()
                raise
        if scope.cancelled_caught:
            await self.aclose()
            raise RedisUnavailable(f"{self.address} did not answer within {self._timeout:g} s")
        return answers

    async def subscribe(self, channels: Iterable[str]) -> None:
        """Subscribe, and wait until Redis has confirmed every channel. Raises as `call`."""
        wanted = {channel.encode() for channel in channels}
        with trio.move_on_after(self._timeout) as scope:
            await self._send(_pack(("SUBSCRIBE", *sorted(wanted))))
            while wanted:
                answer = await self._next()
                if isinstance(answer, hiredis.ReplyError):
                    raise refused(self.address, answer)
                if answer[0] == b"subscribe":
                    wanted.discard(answer[1])
        if scope.cancelled_caught:
            raise RedisUnavailable(f"{self.address} did not confirm a subscription within {self._timeout:g} s")

    async def ping(self) -> None:
        """Have Redis send a PONG to this subscriber, so that a connection that is dead is noticed."""
        await self._send(_pack(("PING",)))

    async def messages(self) -> list[tuple[bytes, bytes]]:
        """What was received on the subscribed channels: channel and message; empty where it was something else.

        A cancelled call loses nothing. Raises RedisUnavailable.
        """
        found: list[tuple[bytes, bytes]] = []
        answer = await self._next()  # some may have come together with what was read before
        while answer is not False:
            if type(answer) is list and answer[0] == b"message":
                found.append((answer[1], answer[2]))
            answer = self._parse()
        return found

    async def aclose(self) -> None:
        """Close it at once; safe to repeat."""
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self._stream)

    # --- inside ---

    async def _send(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except _BROKEN as error:
            raise self._lost(error) from error

    async def _receive(self) -> bytes:
        try:
            data = await self._stream.receive_some(READ_BYTES)
        except _BROKEN as error:
            raise self._lost(error) from error
        if not data:
            raise RedisUnavailable(f"{self.address} closed the connection")
        return bytes(data)

    def _lost(self, error: BaseException) -> RedisUnavailable:
        return RedisUnavailable(f"the connection to {self.address} broke: {error.__cause__ or error}")

    async def _next(self) -> Any:
        while (answer := self._parse()) is False:
            self._feed(await self._receive())
        return answer

    def _feed(self, data: bytes) -> None:
        self._unparsed += len(data)
        if self._unparsed > MOST_BYTES:  # any process may publish up to 512 MB, and the reader would keep all of it
            raise RedisUnavailable(f"{self.address} sent a message of over {MOST_BYTES} bytes, which is not read")
        self._reader.feed(data)

    def _parse(self) -> Any:
        """The next answer; False if it is not complete."""
        try:
            answer = self._reader.gets()
        except hiredis.ProtocolError as error:
            raise RedisUnavailable(f"{self.address} does not speak the protocol of Redis: {error}") from error
        if answer is not False:
            self._unparsed = 0
        return answer


async def open_redis(address: RedisAddress, *, name: str, timeout: float = ANSWER_TIMEOUT) -> RedisLink:
    """Connect, log in and choose the database. `name`: shown by CLIENT LIST. `timeout`: seconds for each answer.

    Raises:
        RedisUnavailable, RedisRefused: with the reason.
    """
    stream: trio.abc.Stream | None = None
    link: RedisLink | None = None
    try:
        with trio.fail_after(CONNECT_TIMEOUT):
            stream = await trio.open_tcp_stream(address.host, address.port)
            if address.tls is not None:
                stream = trio.SSLStream(stream, address.tls, server_hostname=address.host, https_compatible=True)
                await stream.do_handshake()
            link = RedisLink(stream, address, timeout)
            if address.password is not None:
                await link.call("AUTH", *([address.user] if address.user else []), address.password)
            if address.database:
                await link.call("SELECT", address.database)
            await link.call("CLIENT", "SETNAME", name)
    except trio.TooSlowError:
        await _close(stream)
        raise RedisUnavailable(f"no connection to {address}: no answer within {CONNECT_TIMEOUT:g} s") from None
    except _BROKEN as error:
        await _close(stream)
        raise RedisUnavailable(f"no connection to {address}: {_why(error)}") from error
    except BaseException:
        await _close(stream)
        raise
    return link


def _pack(words: tuple[Word, ...]) -> bytes:
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]  # its stub says a tuple of one word
    return packed


async def _close(stream: trio.abc.Stream | None) -> None:
    if stream is not None:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(stream)


def _why(error: BaseException) -> str:
    cause = error.__cause__ or error
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
