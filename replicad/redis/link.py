"""One connection to Redis on trio. `hiredis` packs, `resp` reads; this file opens, waits and gives up in time.

Whatever Redis sends that is no answer to us ends the connection by RedisUnavailable, which says what it was (`_odd`).
The owner connects again after a pause.

A connection either asks (`call`, `call_all`) or, after `subscribe`, receives. Nothing is queued here: what the owner
does not take stays in the socket, and Redis ends the connection of a subscriber for which it has to keep too much.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable, Sequence
from typing import Any

import hiredis
import trio

from replicad.errors import RedisRefused, RedisUnavailable, ReplicadError
from replicad.masking import visible
from replicad.reading import Unreadable
from replicad.redis.address import RedisAddress
from replicad.redis.resp import NOTHING, RespReader

CONNECT_TIMEOUT = 5.0  # seconds, with TLS and the password
ANSWER_TIMEOUT = 5.0  # seconds for all answers to requests that were sent together
READ_BYTES = 1 << 16
_BROKEN = (
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    ssl.SSLError,
    OSError,
    UnicodeError,
)  # the last: of a name
# Refusals that another try does not help against. Others may be over later (LOADING), or are somebody's doing.
_LASTING = re.compile(r"OOM |ERR (?:unknown command|invalid DB index|DB index is out of range)", re.IGNORECASE)

Word = str | bytes | int


def refused(address: RedisAddress, error: Exception) -> ReplicadError:
    """Our exception for an error reply."""
    text = " ".join(visible(str(error)[:1000]).split())
    code = text.partition(" ")[0]
    if code in ("NOAUTH", "WRONGPASS") or "invalid password" in text or "without any password" in text:
        remedy = "give the password in the URL or by REPLICAD_REDIS_PASSWORD, and the user in the URL"
        return RedisRefused(f"{address} does not accept the password: {text[:200]}; {remedy}")
    if code == "NOPERM":
        return RedisRefused(f"{address}: {text[:300]}; docs/transports.md has the rights that replicad needs")
    kind = RedisRefused if _LASTING.match(text) else RedisUnavailable
    return kind(f"{address}: {text[:300]}")


class RedisLink:
    """An open connection, made by `open_redis`. For one task at a time. Any failure closes it for good."""

    def __init__(self, stream: trio.abc.Stream, address: RedisAddress, timeout: float) -> None:
        self.address = address
        self._stream = stream
        self._timeout = timeout
        self._reader = RespReader()

    async def call(self, *words: Word) -> Any:
        """The answer to one command. Raises RedisUnavailable and RedisRefused."""
        answer = (await self.call_all([words]))[0]
        if isinstance(answer, hiredis.ReplyError):
            raise refused(self.address, answer)
        return answer

    async def call_text(self, *words: Word) -> str | None:
        """`call` for a command that is answered by a text or by nothing."""
        answer = await self.call(*words)
        if answer is None:
            return None
        try:
            if isinstance(answer, bytes):
                return answer.decode()
        except UnicodeDecodeError:
            pass
        await self.aclose()
        raise self._odd(f"answered {words[0]!s} by {_shown(answer)}, which is no text")

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
                match answer:
                    case [b"subscribe", bytes(channel), int()]:
                        wanted.discard(channel)
                    case [b"message", bytes(), bytes()]:
                        pass  # of a channel that is confirmed already; unconfirmed channels are not relied on
                    case _:
                        raise self._odd(f"answered SUBSCRIBE by {_shown(answer)}")
        if scope.cancelled_caught:
            raise RedisUnavailable(f"{self.address} did not confirm a subscription within {self._timeout:g} s")

    async def subscribe_more(self, channels: Iterable[str]) -> None:
        """Subscribe to other channels as well; `messages` takes the confirmations, and raises a refusal."""
        await self._send(_pack(("SUBSCRIBE", *sorted(channels))))

    async def ping(self) -> None:
        """Have Redis send a PONG to this subscriber, so that a connection that is dead is noticed."""
        await self._send(_pack(("PING",)))

    async def messages(self) -> list[tuple[bytes, bytes]]:
        """Messages of the subscribed channels: channel and message; empty for other replies.

        A cancelled call loses nothing. Raises RedisUnavailable.
        """
        found: list[tuple[bytes, bytes]] = []
        while not (answers := self._replies()):
            self._feed(await self._receive())
        for answer in answers:
            if type(answer) is list and len(answer) == 3:
                kind, channel, line = answer
                if kind == b"message" and type(line) is bytes and type(channel) is bytes:
                    found.append((channel, line))
                    continue
            self._pass_over(answer)
        return found

    def _pass_over(self, answer: Any) -> None:
        """What comes to a subscriber beside messages. Raises for what cannot."""
        match answer:
            case [b"subscribe" | b"unsubscribe", bytes() | None, int()] | [b"pong", bytes()]:
                return
        if isinstance(answer, hiredis.ReplyError):
            raise refused(self.address, answer)
        raise self._odd(f"sent a subscriber {_shown(answer)}")

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

    def _odd(self, what: str) -> RedisUnavailable:
        return RedisUnavailable(f"{self.address} does not answer as a Redis does: it {what}")

    async def _next(self) -> Any:
        while (answer := self._reply()) is NOTHING:
            self._feed(await self._receive())
        return answer

    def _feed(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
        except Unreadable as error:
            raise self._odd(f"sent {error}") from error

    def _reply(self) -> Any:
        """The next answer; NOTHING if it is not complete."""
        try:
            return self._reader.reply()
        except Unreadable as error:
            raise self._odd(f"sent {error}") from error

    def _replies(self) -> list[Any]:
        """All answers that are complete."""
        try:
            return self._reader.replies()
        except Unreadable as error:
            raise self._odd(f"sent {error}") from error


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


def _shown(answer: Any) -> str:
    """An answer in a message: bounded, and without recursion."""
    if isinstance(answer, list):
        return f"a list of {len(answer)} values"
    return repr(answer)[:100] if isinstance(answer, (bytes, int, type(None))) else f"a {type(answer).__name__}"


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
