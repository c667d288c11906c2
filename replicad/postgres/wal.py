"""Hears from Postgres that WAL was flushed, over a replication connection that keeps nothing back and confirms nothing.

The server sends its WAL here as soon as it is on disk, some 0.1 ms after the commit; nothing comes while nothing is
written. The content is thrown away: that it came is a hint to poll. What the connection must not do:

- keep WAL or dead rows: it has no slot and sends no feedback, so it has no xmin;
- count as a synchronous standby: its replies say what was received (`write`), and never that anything was flushed. A
  standby without a flush position is not chosen, also with `synchronous_standby_names = '*'`;
- delay a shutdown: the server waits until all WAL is received, and asks; the answer is sent at once. A daemon that is
  suspended does not answer, and is cut off after `wal_sender_timeout`, which this session sets to 2 s.

All WAL of the server comes, also that of other databases. While much comes, the connection is closed: then polls are
frequent anyway.

It needs the extra `bell` (libpq, by psycopg: it knows all ways to log in), a role with REPLICATION, a free WAL sender
and `wal_level` replica or logical. Where one is missing, `why` says so, and the bell looks from time to time instead.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NoReturn

import trio

from replicad import errors
from replicad.eventlog import get_logger
from replicad.masking import mask_secrets
from replicad.postgres.bridge import Database
from replicad.retry import Backoff

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn

CONNECT_TIMEOUT: Final = 5  # seconds
RETRY: Final = (1.0, 600.0)  # seconds before a connection that failed or was refused is tried again: first, longest
SENDER_TIMEOUT: Final = 2  # seconds after which the server ends a session that does not answer
MOST_BYTES: Final = 2_000_000  # of WAL in a second; with more, the connection is closed until nothing moves
MOST_CHUNKS: Final = 500  # likewise
REST: Final = 2.0  # seconds for which it then stays closed at least

_SETTINGS: Final = {
    "replication": "true",
    "application_name": "replicad bell",
    "connect_timeout": str(CONNECT_TIMEOUT),
    "tcp_user_timeout": str(10_000),  # milliseconds
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "client_encoding": "UTF8",
    "options": f"-c wal_sender_timeout={SENDER_TIMEOUT}s",
}
# The messages are in the manual of Postgres: Streaming Replication Protocol.
_WAL: Final = struct.Struct("!cQQQ")  # "w", where this WAL begins, where all WAL ends, the time
_ASKED: Final = struct.Struct("!cQQB")  # "k", where all WAL ends, the time, whether an answer is wanted
_REPLY: Final = struct.Struct("!cQQQQB")  # "r", received, flushed, applied, the time, whether an answer is wanted

_MAY_LISTEN: Final = "SELECT r.rolreplication OR r.rolsuper FROM pg_roles AS r WHERE r.rolname = current_user"
_NEEDS_ATTRIBUTE: Final = (
    "the daemon's role may not start a WAL sender, which hears of commits at once: replicad sql roles --replication"
)

log = get_logger(__name__)


class WalListener:
    """Calls `on_wal` each time that WAL comes. `url`: of the database, as asyncpg and libpq take it. `db`: a pool of
    connections to it, to ask whether this role may listen: a refused login is a line in the server's log.

    `hears`: whether it is connected; `why`: why it is not, a sentence for the operator, or None; `heard_at`: when WAL
    came last, by trio's clock.
    """

    def __init__(self, url: str, db: Database) -> None:
        self._db = db
        self.hears = False
        self.why: str | None = None
        self.heard_at = float("-inf")
        self.on_wal: Callable[[], None] = _nothing
        self._url = url
        self._wanted = trio.Event()
        self._backoff = Backoff(*RETRY, jitter=0.0)

    def want(self) -> None:
        """Nothing moves now, so WAL would be news: connect again, if much WAL has ended the connection."""
        self._wanted.set()

    async def run(self) -> None:
        """Listen until cancelled; connects again after each failure."""
        while True:
            pause = REST
            try:
                await self._listen()
            except errors.EnvironmentRefused as error:
                self._report(str(error))
                return
            except errors.DatabaseError as error:
                self._report(str(error))
                pause = self._backoff.next_delay()
            finally:
                self.hears = False
                self.on_wal()  # whoever waits for WAL looks again
            await trio.sleep(pause)
            self._wanted = trio.Event()
            await self._wanted.wait()

    def _report(self, why: str) -> None:
        if why != self.why:
            self.why = why
            log.info("bell_without_wal", reason=why, effect="Postgres is looked at every few milliseconds instead")

    async def _listen(self) -> None:
        """Listen until too much WAL comes. Raises DatabaseErrors and EnvironmentRefused."""
        if not await self._db.fetch_value(_MAY_LISTEN):
            raise errors.DatabaseRefused(_NEEDS_ATTRIBUTE)
        connection, position = await trio.to_thread.run_sync(_connect, self._url, abandon_on_cancel=True)
        try:
            self.why, self.hears = None, True
            self._backoff.reset()
            log.debug("bell_hears_wal")
            self.on_wal()
            from psycopg import Error  # noqa: PLC0415 - of an extra, which is there

            try:
                await self._receive(connection, position)
            except Error as error:
                raise errors.DatabaseUnavailable(f"the replication connection ended: {_text(error)}") from error
        finally:
            self.hears = False
            connection.finish()

    async def _receive(self, connection: PGconn, received: int) -> None:
        """`received`: the position from which WAL comes. Raises psycopg's errors, and DatabaseUnavailable."""
        lately: deque[tuple[float, int]] = deque()
        in_a_second = 0
        while True:
            await trio.lowlevel.wait_readable(connection.socket)
            connection.consume_input()
            came, asked = 0, False
            while True:
                size, data = connection.get_copy_data(1)
                if size <= 0:
                    break
                message = bytes(data[: _WAL.size])
                if message[:1] == b"w":
                    _, begin, _, _ = _WAL.unpack(message)
                    received = max(received, begin + size - _WAL.size)
                    came += size
                elif message[:1] == b"k":
                    asked |= bool(_ASKED.unpack_from(message)[3])
            if came:
                self.heard_at = now = trio.current_time()
                self.on_wal()
                in_a_second += came
                lately.append((now, came))
                while lately[0][0] < now - 1:
                    in_a_second -= lately.popleft()[1]
                if in_a_second > MOST_BYTES or len(lately) == MOST_CHUNKS:
                    return
            if size < 0:
                raise errors.DatabaseUnavailable(f"the replication connection ended: {_ending(connection)}")
            if asked:
                await self._reply(connection, received)

    async def _reply(self, connection: PGconn, received: int) -> None:
        connection.put_copy_data(_REPLY.pack(b"r", received, 0, 0, 0, 0))
        with trio.move_on_after(SENDER_TIMEOUT):
            while connection.flush():
                await trio.lowlevel.wait_writable(connection.socket)


def _connect(url: str) -> tuple[PGconn, int]:
    """Connect and begin to receive; returns the position at which WAL begins. Runs in a thread, as libpq waits.

    Raises EnvironmentRefused and DatabaseErrors.
    """
    try:
        from psycopg import Error, pq  # noqa: PLC0415 - of an extra
        from psycopg.conninfo import make_conninfo  # noqa: PLC0415
    except ImportError as error:
        raise errors.EnvironmentRefused(
            "psycopg is not installed, which hears of commits at once: pip install 'replicad[bell]'"
        ) from error
    try:
        connection = pq.PGconn.connect(make_conninfo(url, **_SETTINGS).encode())
    except Error as error:
        raise errors.DatabaseRefused(f"libpq does not take the address: {_text(error)}") from error
    try:
        if connection.status != pq.ConnStatus.OK:
            _refuse(connection.error_message)
        found = connection.exec_(b"IDENTIFY_SYSTEM")
        position = found.get_value(0, 2) if found.status == pq.ExecStatus.TUPLES_OK else None
        if position is None:
            _refuse(found.error_message)
        begun = connection.exec_(b"START_REPLICATION PHYSICAL " + position)
        if begun.status != pq.ExecStatus.COPY_BOTH:
            _refuse(begun.error_message)
        connection.nonblocking = 1
    except BaseException:
        connection.finish()
        raise
    high, _, low = position.decode().partition("/")
    return connection, int(high, 16) << 32 | int(low, 16)


def _ending(connection: PGconn) -> str:
    found = connection.get_result()
    message = connection.error_message if found is None else found.error_message
    return _text(message.decode("utf-8", "replace")) or "the server has closed it"


def _refuse(message: bytes) -> NoReturn:
    """Raise what Postgres said, and what to do."""
    said = _text(message.decode("utf-8", "replace"))
    if "pg_hba.conf" in said:
        said += ": add a line for the database `replication` to pg_hba.conf, to hear of commits at once"
    raise errors.DatabaseRefused(said)


_WHERE = re.compile(r"connection to server (?:on socket|at) .*? failed: ")  # shown over HTTP, and a socket has a path


def _text(said: object) -> str:
    return mask_secrets(_WHERE.sub("", " ".join(str(said).split())))[:300]


def _nothing() -> None:
    """Nobody waits for WAL."""
