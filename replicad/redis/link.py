"""One connection to Redis on trio or asyncio. `hiredis` packs and parses; this file opens, waits and gives up in time.

Whatever Redis sends that is no answer to us ends the connection by RedisUnavailable, which says what it was (`_odd`).
The owner connects again after a pause.

A connection either asks (`call`, `call_all`) or, after `subscribe`, receives. Nothing is queued here: what the owner
does not take stays in the socket, and Redis ends the connection of a subscriber for which it has to keep too much.

`RedisAddress` is the place of a Redis and the login there. `RespReader` reads its replies (RESP) without I/O.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import anyio
import hiredis
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

from replicad.config.secrets import trust
from replicad.errors import RedisRefused, RedisUnavailable, ReplicadError, UsageError
from replicad.masking import mask_secrets, visible
from replicad.reading import Unreadable
from replicad.streams.chunks import MAX_ROW

CONNECT_TIMEOUT = 5.0  # seconds, with TLS and the password
ANSWER_TIMEOUT = 5.0  # seconds for all answers to requests that were sent together
READ_BYTES = 1 << 16
_BROKEN = (
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    ssl.SSLError,
    OSError,
    UnicodeError,
)  # the last: of a name
# Refusals that another try does not help against. Others may be over later (LOADING), or are somebody's doing.
_LASTING = re.compile(r"OOM |ERR (?:unknown command|invalid DB index|DB index is out of range)", re.IGNORECASE)

Word = str | bytes | int

MOST_BYTES = MAX_ROW + (1 << 20)  # of one reply: the longest row with its frame
MOST_HEADS = 8 << 10  # bytes of a reply that are parsed already while a text in it is not complete; bounds its depth
NOTHING: Final = False  # what hiredis gives where a reply is not complete; RESP 2 has no such value
_LONG = re.compile(rb"\r\n\*[0-9]{2}")  # the head of a list of ten elements or more
_PUSH = b"\r\n>"  # the head of the other kind of list, which only RESP 3 has
_OVERLAP = 4  # bytes of the end of what came before: a head may come in two pieces

PORT = 6379


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A Redis: `redis://[[user]:password@]host[:port][/database]`; `rediss://` is the same with TLS.

    `str()` has no password.
    """

    host: str
    port: int = PORT
    database: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' if self.tls else ''}://{host}:{self.port}/{self.database}"


def parse_redis(url: str, *, password: str | None = None, ca: Path | None = None) -> RedisAddress:
    """Parse the URL. `password` counts where the URL has none; `ca`: whom to trust, for rediss://; else the system.

    Raises:
        UsageError: with what to give instead.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or PORT
    except ValueError as error:
        raise UsageError(f"{mask_secrets(url)!r} is no URL of a Redis: {error}") from None
    database = parts.path.strip("/") or "0"
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(
            f"{mask_secrets(url)!r} is no URL of a Redis; give redis://host:{PORT}/0, or rediss:// for TLS"
        )
    if not (database.isascii() and database.isdigit() and len(database) < 6):
        raise UsageError(f"the database of a Redis is a number, not {database[:40]!r}; give redis://{parts.hostname}/0")
    tls = None
    if parts.scheme == "rediss":
        tls = ssl.create_default_context() if ca is None else trust(ca, "--redis-ca")
    elif ca is not None:
        raise UsageError("--redis-ca is for a Redis with TLS; give rediss://, or leave it out")
    given = None if parts.password is None else unquote(parts.password)
    user = unquote(parts.username) if parts.username else None
    return RedisAddress(parts.hostname, port, int(database), user, given or password, tls)


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

    def __init__(self, stream: ByteStream, address: RedisAddress, timeout: float) -> None:
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
        with anyio.move_on_after(self._timeout) as scope:
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
        with anyio.move_on_after(self._timeout) as scope:
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
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(self._stream)

    # --- inside ---

    async def _send(self, data: bytes) -> None:
        try:
            await self._stream.send(data)
        except _BROKEN as error:
            raise self._lost(error) from error

    async def _receive(self) -> bytes:
        try:
            return await self._stream.receive(READ_BYTES)
        except anyio.EndOfStream:
            raise RedisUnavailable(f"{self.address} closed the connection") from None
        except _BROKEN as error:
            raise self._lost(error) from error

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
    stream: ByteStream | None = None
    link: RedisLink | None = None
    try:
        with anyio.fail_after(CONNECT_TIMEOUT):
            stream = await anyio.connect_tcp(address.host, address.port)
            if address.tls is not None:
                stream = await TLSStream.wrap(
                    stream, hostname=address.host, ssl_context=address.tls, standard_compatible=False
                )
            link = RedisLink(stream, address, timeout)
            if address.password is not None:
                await link.call("AUTH", *([address.user] if address.user else []), address.password)
            if address.database:
                await link.call("SELECT", address.database)
            await link.call("CLIENT", "SETNAME", name)
    except TimeoutError:
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


async def _close(stream: ByteStream | None) -> None:
    if stream is not None:
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(stream)


def _why(error: BaseException) -> str:
    cause = error.__cause__ or error
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


class RespReader:
    """Takes bytes with `feed`; gives replies with `reply`. After an Unreadable it is of no more use.

    hiredis parses, and this class bounds what it believes. hiredis makes a list as long as the reply announces:
    `*1000000000` takes 8 GB and stops the program for ten seconds. It goes as deep as a reply says, too. What Redis
    answers us is known: texts, numbers, nothing, and lists of up to nine of them. Whatever else comes is refused by
    `Unreadable`, and no other exception.
    """

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._last = b"\r\n"  # the end of the input: the first reply begins as if after a line
        self._unparsed = 0  # bytes that came since a reply was complete, about
        self._fed = 0
        self._parsed = 0  # bytes that hiredis had taken when the last reply was complete, about

    def feed(self, data: bytes) -> None:
        """Take bytes. Raises Unreadable."""
        self._unparsed += len(data)
        if self._unparsed > MOST_BYTES:  # any process may publish up to 512 MB, and hiredis would keep all of it
            raise Unreadable(f"a message of over {MOST_BYTES} bytes, which is not read")
        seen = self._last + data
        if _LONG.search(seen) is not None or (b">" in data and _PUSH in seen):
            # Or a text that begins so: no line of replicad or Synapse does. To tell them apart would take a parser.
            raise Unreadable("a list of ten elements or more, which no answer to us has")
        self._last = seen[-_OVERLAP:]
        self._fed += len(data)
        self._reader.feed(data)

    def reply(self) -> Any:
        """The next reply: bytes, a number, None, a hiredis.ReplyError, or a list of these; NOTHING: it is not complete.

        Raises:
            Unreadable: this is no reply.
        """
        try:
            found = self._reader.gets()
        except Exception as error:
            raise _no_reply(error) from error
        self._note(complete=found is not NOTHING)
        return found

    def replies(self) -> list[Any]:
        """All replies that are complete. Raises Unreadable."""
        found: list[Any] = []
        gets = self._reader.gets
        try:
            while (one := gets()) is not NOTHING:
                found.append(one)
        except Exception as error:
            raise _no_reply(error) from error
        if found:
            self._note(complete=True)
        self._note(complete=False)
        return found

    def _note(self, *, complete: bool) -> None:
        """Bound what hiredis has parsed of a reply that is not complete."""
        if complete:
            self._unparsed = 0
            return
        taken = self._fed - self._reader.len()
        if self._unparsed == 0:
            self._parsed = taken
        elif taken > self._parsed + MOST_HEADS + 1024:  # hiredis drops what it has taken when it is 1,024 bytes
            raise Unreadable("lists in lists, deeper than any answer to us")


def _no_reply(error: Exception) -> Unreadable:
    return Unreadable(f"a malformed reply ({type(error).__name__}: {str(error)[:100]})")
