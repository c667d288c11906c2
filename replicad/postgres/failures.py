"""Turns errors of Postgres into our exceptions: one sentence with the place and the remedy.

It looks at the SQLSTATE and at the built-in exceptions of a connection attempt. It does not know the driver and never
sees a password (a `Target` has none).
"""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from replicad import errors, sqlstates
from replicad.masking import mask_secrets, visible
from replicad.postgres.literals import quote_ident
from replicad.sqlstates import means

_DEFAULT_PORT = "5432"
_LAST_PORT = 65535
_ESCAPES = "in a password / : @ # ? are written %2F %3A %40 %23 %3F"

# SQLSTATEs that our own SQL functions raise; MESSAGE is the sentence, HINT the remedy.
_OURS: dict[str, type[errors.ReplicadError]] = {
    "RT001": errors.UnknownTube,
    "RT002": errors.LeaseLost,
    "RT003": errors.PartitionsChanged,
    "RT004": errors.LeaseHeld,
    "RT005": errors.TubeRefused,
    "RT006": errors.CursorAhead,
    "RT007": errors.DataLoss,
    "RT008": errors.UsageError,
    "RT009": errors.DatabaseUnavailable,
    "RS001": errors.UnknownStream,
    "RS002": errors.StreamRefused,
    "RS003": errors.StreamRefused,
    "RS004": errors.TokenExpired,
    "RS005": errors.TableReplaced,
    "RS006": errors.DatabaseError,
    "RS007": errors.UsageError,
    sqlstates.NOT_OWNER[0]: errors.NotOwner,
    "RS011": errors.WriterExpelled,
    "RS012": errors.InstanceTaken,
    "RI001": errors.SchemaTooNew,
    "RI002": errors.SchemaCollision,
}


@dataclass(frozen=True, slots=True)
class Target:
    """The database that a message is about. Never contains a password. `host` is `name:port` or a socket's folder."""

    host: str
    database: str
    user: str

    def __str__(self) -> str:
        return f'{self.host}, database "{self.database}"'


def parse_target(url: str) -> Target:
    """The parts of a Postgres URL that may be shown. Raises UsageError if it is no `postgresql://` URL, or has a port
    that no server can have.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise errors.UsageError(f"not a Postgres URL: {mask_secrets(str(error))}") from None
    if parts.scheme not in ("postgresql", "postgres"):
        raise errors.UsageError(
            "not a Postgres URL: expected postgresql://user@host:5432/database (or ?host=/folder/of/the/socket)"
        )
    _refuse_half_a_password(parts)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    credentials, _, location = parts.netloc.rpartition("@")
    user = unquote(credentials.partition(":")[0]) or query.get("user", "") or "(default)"
    database = unquote(parts.path.lstrip("/")) or query.get("dbname") or query.get("database") or user
    service = f"service {query['service']}" if "service" in query else ""  # its host is in a file of libpq
    host = unquote(location) or query.get("host", "") or service or "localhost"
    ports = [place.rpartition("]")[2].partition(":")[2] for place in unquote(location).split(",")]
    for port in [*ports, *query.get("port", "").split(",")]:
        if port and not (port.isascii() and port.isdecimal() and 1 <= int(port) <= _LAST_PORT):
            raise errors.UsageError(  # without the port: it may be half of a password
                f"not a Postgres URL: the port is no number from 1 to {_LAST_PORT} ({_ESCAPES})"
            )
    if not host.startswith(("/", "service ")) and ":" not in host.rpartition("]")[2]:
        host = f"{host}:{query.get('port', _DEFAULT_PORT)}"
    return Target(host=host, database=database, user=user)


def _refuse_half_a_password(parts: SplitResult) -> None:
    """Refuse a URL in which a password has ended the host or the path: the host would be a piece of the password."""
    query = parts.query and any("=" not in piece for piece in parts.query.split("&"))
    if "@" in parts.path or parts.fragment or query:
        raise errors.UsageError(f"not a Postgres URL: it has @ # or ? in a place where none can be ({_ESCAPES})")


def pooled(where: str) -> errors.DatabaseRefused:
    """The exception to raise where the connection leads to a pooler: its statements run in sessions of others too."""
    return errors.DatabaseRefused(
        f"a pooler or another proxy answers for Postgres at {where}: the session behind this connection is not ours "
        "alone. Locks, settings and LISTEN of a session would be mixed up, and rows missed. Connect to Postgres itself "
        "(with PgBouncer: to the host and port in its [databases] section)."
    )


def sqlstate_of(error: BaseException) -> str | None:
    """The five characters of Postgres, or None for an error that did not come from the server."""
    state = getattr(error, "sqlstate", None)
    return state if isinstance(state, str) else None


def while_connecting(error: BaseException, target: Target, timeout: float) -> errors.DatabaseError:
    """The exception to raise (from `error`) when no connection could be made within `timeout` seconds."""
    state = sqlstate_of(error)
    if state is not None:
        of_pooler = "startup parameter" in _text(error)  # "unsupported startup parameter: jit" of PgBouncer
        return pooled(target.host) if of_pooler else _server_said_no(error, state, target)
    text = _text(error)
    if isinstance(error, TimeoutError):
        return errors.DatabaseUnavailable(
            f"Postgres at {target.host} did not answer within {timeout:g} s: is the host right and reachable?"
        )
    if isinstance(error, socket.gaierror):
        return errors.DatabaseUnavailable(f"the host of Postgres at {target.host} cannot be resolved: check its name.")
    if isinstance(error, ssl.SSLError):
        return errors.DatabaseRefused(
            f"TLS with Postgres at {target.host} failed ({text}): check sslmode and the certificates."
        )
    if isinstance(error, OSError):
        return errors.DatabaseUnavailable(
            f"no Postgres answers at {target.host} ({text}): is it running, and are host and port right?"
        )
    return errors.DatabaseRefused(f"cannot connect to Postgres at {target}: {text}")


def _server_said_no(error: BaseException, state: str, target: Target) -> errors.DatabaseError:
    if means(state, sqlstates.WRONG_PASSWORD):
        return errors.DatabaseRefused(
            f'Postgres at {target.host} refused the password of user "{target.user}": '
            "check the URL, PGPASSWORD or ~/.pgpass.",
            sqlstate=state,
        )
    if means(state, sqlstates.NO_LOGIN):
        return errors.DatabaseRefused(
            f'Postgres at {target.host} does not let user "{target.user}" into database "{target.database}" '
            f"({_text(error)}): check the user's name and pg_hba.conf.",
            sqlstate=state,
        )
    if means(state, sqlstates.NO_DATABASE):
        return errors.DatabaseRefused(
            f'Postgres at {target.host} has no database "{target.database}": create it or name another in the URL.',
            sqlstate=state,
        )
    if means(state, sqlstates.NO_CONNECTION_LEFT):
        return errors.DatabaseUnavailable(
            f"Postgres at {target.host} has no connection left: {_more_connections(error, target)}.", sqlstate=state
        )
    if means(state, sqlstates.NOT_READY):
        return errors.DatabaseUnavailable(
            f"Postgres at {target.host} is not ready ({_text(error)}): wait for it to start.", sqlstate=state
        )
    kind = errors.DatabaseUnavailable if means(state, sqlstates.UNAVAILABLE) else errors.DatabaseRefused
    return kind(f"Postgres at {target} refused the connection: {_text(error)}", sqlstate=state)


def _more_connections(error: BaseException, target: Target) -> str:
    """Whose limit is reached, and how it is raised. Postgres has one for the server, each database and each role."""
    text = _text(error)
    limit = "raise it by ALTER {0} CONNECTION LIMIT N as a superuser, or lower the pool sizes"
    if "connections for role" in text:  # slots that are "reserved for roles" are the limit of the server
        what = f"ROLE {quote_ident(target.user)}"
        return f'the CONNECTION LIMIT of role "{target.user}" is reached: {limit.format(what)}'
    if "connections for database" in text:
        what = f"DATABASE {quote_ident(target.database)}"
        return f'the CONNECTION LIMIT of database "{target.database}" is reached: {limit.format(what)}'
    return "raise max_connections or lower the pool sizes"


def while_running(error: BaseException, target: Target, *, connection_lost: bool) -> errors.ReplicadError:
    """The exception to raise (from `error`) when a statement failed."""
    state = sqlstate_of(error)
    if state in _OURS:
        return _OURS[state](_text(error))
    if connection_lost or isinstance(error, OSError) or means(state, sqlstates.UNAVAILABLE):
        if connection_lost:
            # Without a message of the server the driver's own message describes its inner states, which does not help.
            why = _text(error) if state is not None or isinstance(error, OSError) else "it was closed by the other side"
            return errors.DatabaseUnavailable(f"the connection to Postgres at {target} broke: {why}", sqlstate=state)
        return errors.DatabaseUnavailable(f"Postgres at {target} cannot do it now: {_text(error)}", sqlstate=state)
    if means(state, sqlstates.READ_ONLY):
        return errors.DatabaseRefused(
            f'Postgres at {target} lets user "{target.user}" only read ({_text(error)}): it is a standby, or '
            "default_transaction_read_only is on for this user, database or server; set it off for this user. "
            "Sessions that are open keep the old setting: the daemon replaces its own, others have to connect again.",
            sqlstate=state,
        )
    if means(state, sqlstates.REFUSED):
        text = f"Postgres at {target} refused: {_text(error)}"
        return errors.DatabaseRefused(f"{text}{_missing_grant(error, target)}", sqlstate=state)
    kind: type[errors.DatabaseError]
    if means(state, sqlstates.BAD_DATA):
        kind, what = errors.ValueRefused, f"refuses a value: {_value_text(error)}"
    else:
        kind, what = errors.DatabaseError, f"reports an error: {_text(error)}"
    return kind(f"Postgres at {target} {what}", sqlstate=state)


# What the driver says of an argument: its number, the value, and the fault.
_ARGUMENT = re.compile(r"invalid input for query argument \$\d+(?: in element #\d+ of .* sequence)?: (.*) \((.*)\)")
_SHOWN = 100  # characters of a value


def _value_text(error: BaseException) -> str:
    text = _text(error)
    found = _ARGUMENT.fullmatch(text)
    return text if found is None else f"{visible(found[1][:_SHOWN])}: {found[2]}"


# The right that is missing where Postgres denies an access. Postgres does not name the right that a statement needs on
# a table.
_DENIED = re.compile(r"permission denied for (database|schema|function|sequence|table|view) (\S+)")
_GRANTS = {
    "database": "CREATE ON DATABASE",
    "schema": "USAGE ON SCHEMA",
    "function": "EXECUTE ON FUNCTION",
    "sequence": "USAGE, SELECT ON SEQUENCE",
    "table": "SELECT ON TABLE",
    "view": "SELECT ON TABLE",
}


def _missing_grant(error: BaseException, target: Target) -> str:
    """The GRANT for an error of Postgres that has no hint of ours."""
    denied = _DENIED.search(getattr(error, "message", None) or "")
    if denied is None or getattr(error, "hint", None):
        return ""
    grant = f'GRANT {_GRANTS[denied[1]]} {denied[2]} TO "{target.user}"'
    more = {"table": " (and what else the statement does)", "schema": " (CREATE, if something is made in it)"}
    return f". Have its owner run: {grant}{more.get(denied[1], '')}"


def is_read_only(error: BaseException) -> bool:
    """Whether a statement was refused because the session is read-only; it stays so until it ends."""
    return means(sqlstate_of(error), sqlstates.READ_ONLY)


def may_be_of_a_row(state: str | None) -> bool:
    """Whether a read may have failed because of the content of one row: an error of data or of a program, or a limit.

    Only reading that row alone shows it for sure. SQLSTATEs of functions of the user count too.
    """
    return state is not None and not means(state, sqlstates.NOT_OF_A_ROW)


def reason_of(error: BaseException) -> str:
    """The message of Postgres, without the place."""
    return _text(error.__cause__ or error)


def is_too_large(error: errors.DatabaseError) -> bool:
    """Whether Postgres could not make a value because it would have been larger than it can hold (1 GB)."""
    return means(error.sqlstate, sqlstates.TOO_LARGE) or "invalid memory alloc request size" in str(error)


def _text(error: BaseException) -> str:
    """MESSAGE, DETAIL and HINT of the server, or the text of a local error, with secrets masked."""
    parts = [getattr(error, "message", None) or str(error) or type(error).__name__]
    parts += [part for part in (getattr(error, "detail", None), getattr(error, "hint", None)) if part]
    text = parts[0] if len(parts) == 1 else ". ".join(part.rstrip(". ") for part in parts) + "."
    return mask_secrets(" ".join(text.split()))
