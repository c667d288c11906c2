"""Postgres through ADBC, for executors: one cached connection per worker, and retries while Postgres does not answer.

Errors of the driver become errors of `replicad.errors`, with their cause and with passwords masked.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from replicad import sqlstates
from replicad.errors import DatabaseError, DatabaseRefused, DatabaseUnavailable, EnvironmentRefused
from replicad.fixed_settings import FIXED
from replicad.masking import mask_secrets
from replicad.retry import Retries
from replicad.sqlstates import means

T = TypeVar("T")

PATIENCE = 60.0  # seconds to wait for an unreachable Postgres: a restart or a failover
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between two tries; each pause doubles

_TCP = {  # a server, or a client, that is away without a word is noticed within a minute
    "connect_timeout": 10,  # seconds, for each address
    "keepalives_idle": 20,  # seconds of silence before the first question
    "keepalives_interval": 10,
    "keepalives_count": 4,
    "tcp_user_timeout": 60_000,  # ms for what was sent to be acknowledged
}
_TCP_OF_SERVER = {  # the same on the other side: a lost client must not keep its transaction and locks
    "tcp_keepalives_idle": 20,
    "tcp_keepalives_interval": 10,
    "tcp_keepalives_count": 4,
    "tcp_user_timeout": 60_000,
}

_Key = tuple[int, int, str, bool]  # process, thread, url, transactional
_connections: dict[_Key, Any] = {}
_threads: dict[int, threading.Thread] = {}  # that have opened connections, by their numbers


def connection(url: str, *, transactional: bool = False) -> Any:
    """This thread's connection to `url`; opened if there is none. `transactional` turns autocommit off.

    Raises:
        DatabaseError: it cannot be opened.
    """
    key = _key(url, transactional)
    found = _connections.get(key)
    if found is None:
        _close_abandoned()
        _threads[key[1]] = threading.current_thread()
        found = _connections[key] = _connect(url, transactional)
    return found


def _close_abandoned() -> None:
    """Close connections whose threads have ended: each start of a query of Spark has a new thread on the driver."""
    for number, thread in list(_threads.items()):
        if not thread.is_alive():
            _threads.pop(number, None)
            for key in list(_connections):
                if key[:2] == (os.getpid(), number):
                    _close(key)


def _key(url: str, transactional: bool) -> _Key:
    return os.getpid(), threading.get_ident(), url, transactional  # a forked worker must not use its parent's socket


def _connect(url: str, transactional: bool) -> Any:
    try:
        from adbc_driver_postgresql import dbapi  # noqa: PLC0415 - not needed by the data source
    except ImportError as error:
        raise EnvironmentRefused(
            "the ADBC driver for Postgres is not installed; pip install 'replicad[spark]', on the executors too"
        ) from error
    try:
        made = dbapi.connect(with_time_outs(url), autocommit=not transactional)
        with made.cursor() as cursor:
            cursor.execute("SET client_min_messages = warning")  # libpq prints notices to stderr
            cursor.execute("SET application_name = 'replicad spark'")
            for name, number in _TCP_OF_SERVER.items():
                cursor.execute(f"SET {name} = {number}")
            for name, setting in FIXED.items():  # what becomes text must be read again as it was, and no row be hidden
                cursor.execute(f"SET {name} = {literal(setting)}")
        if transactional:
            made.commit()
    except dbapi.Error as error:
        raise _ours(error) from error
    return made


def with_time_outs(url: str) -> str:
    """The URL with the time-outs of TCP that it does not set itself."""
    given = {name for name, _ in parse_qsl(url.partition("?")[2], keep_blank_values=True)}
    missing = [f"{name}={number}" for name, number in _TCP.items() if name not in given]
    return url + ("&" if "?" in url else "?") + "&".join(missing) if missing else url


def forget(url: str, *, transactional: bool | None = None) -> None:
    """Close this thread's connections to `url`, or only connections of one kind. Uncommitted changes are rolled
    back.
    """
    for kind in (True, False) if transactional is None else (transactional,):
        _close(_key(url, kind))


def _close(key: _Key) -> None:
    lost = _connections.pop(key, None)
    if lost is not None:
        with contextlib.suppress(Exception):  # it may already be broken
            lost.close()


@atexit.register
def _close_all() -> None:
    """Close open connections before the interpreter unloads what the driver needs to close them."""
    for key in [key for key in _connections if key[0] == os.getpid()]:
        _close(key)


def patiently(
    url: str,
    work: Callable[[Any], T],
    *,
    transactional: bool = False,
    patience: float = PATIENCE,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Run `work(connection)`. While Postgres is away, repeat it on a new connection for up to `patience` seconds.

    `work` must be safe to repeat: after a failure it is unknown how much of it was done.

    Raises:
        DatabaseError: Postgres refused, or was still away after that time.
    """
    retries = Retries(_FIRST_PAUSE, _LONGEST_PAUSE, patience=patience, now=now, sleep=sleep)
    while True:
        try:
            return work(connection(url, transactional=transactional))
        except EnvironmentRefused:
            raise
        except Exception as error:
            forget(url, transactional=transactional)
            known = error if isinstance(error, DatabaseError) else driver_error(error)
            if not isinstance(known, DatabaseUnavailable) or not retries.pause():
                if known is error or known is None:
                    raise
                raise known from error


def driver_error(error: Exception) -> DatabaseError | None:
    """An error of the driver as an error of `replicad.errors`; None: it is not of the driver."""
    from adbc_driver_manager import Error  # noqa: PLC0415
    from pyarrow import ArrowInvalid  # noqa: PLC0415

    if isinstance(error, ArrowInvalid):  # the driver raises it for a value that Arrow does not have
        return DatabaseError(f"a value cannot be read: {str(error)[:300]}")
    return _ours(error) if isinstance(error, Error) else None


def _ours(error: Exception) -> DatabaseError:
    """The driver's error as an error of `replicad.errors`."""
    state: str | None = getattr(error, "sqlstate", None)
    text = mask_secrets(" ".join(str(error).partition("\n\nQuery was:")[0].split()))
    if means(state, sqlstates.REFUSED):
        return DatabaseRefused(f"Postgres refuses: {text}", sqlstate=state)
    if means(state, sqlstates.TRANSIENT) if state else type(error).__name__ == "OperationalError":
        refused = "password authentication failed" in text or ("database" in text and "does not exist" in text)
        kind = DatabaseRefused if refused else DatabaseUnavailable
        return kind(f"Postgres cannot be used: {text}", sqlstate=state)
    return DatabaseError(f"Postgres reports: {text}", sqlstate=state)


def batches_of(cursor: Any) -> Any:
    """The Arrow reader of a cursor's result. An error during a read has its SQLSTATE, which the reader of
    `fetch_record_batch` lacks: with it a lost connection is not known as one. It is a private part of the driver.
    """
    return cursor._results.reader


def literal(text: str) -> str:
    """A text as an SQL literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "''")
    return f"E'{escaped}'" if "\\" in text else f"'{escaped}'"


def quote(name: str) -> str:
    """A name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
