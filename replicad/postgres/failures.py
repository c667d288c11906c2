"""Turns errors of Postgres into our exceptions: one sentence with the place and the remedy.

It looks at the SQLSTATE and at the built-in exceptions of a connection attempt. It does not know the driver and never
sees a password (a `Target` has none).
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from replicad import errors
from replicad.masking import mask_secrets

_DEFAULT_PORT = "5432"

# SQLSTATEs that our own SQL functions raise; MESSAGE is the sentence, HINT the remedy.
_OURS: dict[str, type[errors.ReplicadError]] = {
    "RT001": errors.UnknownTube,
    "RT002": errors.LeaseLost,
    "RT003": errors.PartitionsChanged,
    "RT004": errors.LeaseHeld,
    "RT005": errors.TubeRefused,
    "RT006": errors.CursorAhead,
    "RT007": errors.DataLoss,
    "RS001": errors.UnknownStream,
    "RS002": errors.StreamRefused,
    "RS003": errors.StreamRefused,
    "RS004": errors.TokenExpired,
    "RS005": errors.TableReplaced,
    "RS010": errors.NotOwner,
    "RS011": errors.WriterExpelled,
    "RS012": errors.InstanceTaken,
    "RI001": errors.SchemaTooNew,
    "RI002": errors.SchemaCollision,
}

# Classes and codes of Postgres after which trying again may help: broken connections, exhausted resources (a full
# disk among them), shutdown and start-up of the server.
_UNAVAILABLE_CLASSES = ("08", "53")
_UNAVAILABLE_CODES = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25P04"})
_REFUSED_CLASSES = ("28",)

# Classes of Postgres that are not about the content of a row: connections, transactions that were rolled back, rights,
# names and syntax (a table or column that was renamed), resources, locks and states of objects, an operator's
# intervention, the system below Postgres, its configuration.
_NOT_OF_A_ROW = (
    "08",
    "25",
    "26",
    "28",
    "2D",
    "34",
    "3D",
    "3F",
    "40",
    "42",
    "53",
    "55",
    "57",
    "58",
    "F0",
    "HV",
    "RS",
    "RT",
)
_REFUSED_CODES = frozenset({"3D000", "42501"})
_READ_ONLY = "25006"


@dataclass(frozen=True, slots=True)
class Target:
    """The database that a message is about. Never contains a password. `host` is `name:port` or a socket's folder."""

    host: str
    database: str
    user: str

    def __str__(self) -> str:
        return f'{self.host}, database "{self.database}"'


def parse_target(url: str) -> Target:
    """The parts of a Postgres URL that may be shown. Raises UsageError if it is not a `postgresql://` URL."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise errors.UsageError(f"not a Postgres URL: {mask_secrets(str(error))}") from None
    if parts.scheme not in ("postgresql", "postgres"):
        raise errors.UsageError(
            "not a Postgres URL: expected postgresql://user@host:5432/database (or ?host=/folder/of/the/socket)"
        )
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    credentials, _, location = parts.netloc.rpartition("@")
    user = unquote(credentials.partition(":")[0]) or query.get("user", "") or "(default)"
    database = unquote(parts.path.lstrip("/")) or query.get("dbname") or query.get("database") or user
    host = unquote(location) or query.get("host", "") or "localhost"
    if not host.startswith("/") and ":" not in host.rpartition("]")[2]:
        host = f"{host}:{query.get('port', _DEFAULT_PORT)}"
    return Target(host=host, database=database, user=user)


def sqlstate_of(error: BaseException) -> str | None:
    """The five characters of Postgres, or None for an error that did not come from the server."""
    state = getattr(error, "sqlstate", None)
    return state if isinstance(state, str) else None


def while_connecting(error: BaseException, target: Target, timeout: float) -> errors.DatabaseError:
    """The exception to raise (from `error`) when no connection could be made within `timeout` seconds."""
    state = sqlstate_of(error)
    if state is not None:
        return _server_said_no(error, state, target)
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
    if state == "28P01":
        return errors.DatabaseRefused(
            f'Postgres at {target.host} refused the password of user "{target.user}": '
            "check the URL, PGPASSWORD or ~/.pgpass.",
            sqlstate=state,
        )
    if state.startswith("28"):
        return errors.DatabaseRefused(
            f'Postgres at {target.host} does not let user "{target.user}" into database "{target.database}" '
            f"({_text(error)}): check the user's name and pg_hba.conf.",
            sqlstate=state,
        )
    if state == "3D000":
        return errors.DatabaseRefused(
            f'Postgres at {target.host} has no database "{target.database}": create it or name another in the URL.',
            sqlstate=state,
        )
    if state == "53300":
        return errors.DatabaseUnavailable(
            f"Postgres at {target.host} has no connection left: raise max_connections or lower the pool sizes.",
            sqlstate=state,
        )
    if state == "57P03":
        return errors.DatabaseUnavailable(
            f"Postgres at {target.host} is not ready ({_text(error)}): wait for it to start.", sqlstate=state
        )
    kind = errors.DatabaseUnavailable if _trying_again_may_help(state) else errors.DatabaseRefused
    return kind(f"Postgres at {target} refused the connection: {_text(error)}", sqlstate=state)


def while_running(error: BaseException, target: Target, *, connection_lost: bool) -> errors.ReplicadError:
    """The exception to raise (from `error`) when a statement failed."""
    state = sqlstate_of(error)
    if state in _OURS:
        return _OURS[state](_text(error))
    if connection_lost or isinstance(error, OSError) or (state is not None and _trying_again_may_help(state)):
        if connection_lost:
            # Without a message of the server the driver's own message describes its inner states, which does not help.
            why = _text(error) if state is not None or isinstance(error, OSError) else "it was closed by the other side"
            return errors.DatabaseUnavailable(f"the connection to Postgres at {target} broke: {why}", sqlstate=state)
        return errors.DatabaseUnavailable(f"Postgres at {target} cannot do it now: {_text(error)}", sqlstate=state)
    if state == _READ_ONLY:
        return errors.DatabaseRefused(
            f'Postgres at {target} lets user "{target.user}" only read ({_text(error)}): it is a standby, or '
            "default_transaction_read_only is on for this user, database or server; set it off for this user. "
            "Sessions that are open keep the old setting: the daemon replaces its own, others have to connect again.",
            sqlstate=state,
        )
    if state is not None and (state in _REFUSED_CODES or state.startswith(_REFUSED_CLASSES)):
        return errors.DatabaseRefused(f"Postgres at {target} refused: {_text(error)}", sqlstate=state)
    return errors.DatabaseError(f"Postgres at {target} reports an error: {_text(error)}", sqlstate=state)


def is_read_only(error: BaseException) -> bool:
    """Whether a statement was refused because the session is read-only; it stays so until it ends."""
    return sqlstate_of(error) == _READ_ONLY


def may_be_of_a_row(state: str | None) -> bool:
    """Whether a read may have failed because of the content of one row: an error of data or of a program, or a limit.

    Only reading that row alone shows it for sure. SQLSTATEs of functions of the user count too.
    """
    return state is not None and not state.startswith(_NOT_OF_A_ROW)


def reason_of(error: BaseException) -> str:
    """The message of Postgres, without the place."""
    return _text(error.__cause__ or error)


def is_too_large(error: errors.DatabaseError) -> bool:
    """Whether Postgres could not make a value because it would have been larger than it can hold (1 GB)."""
    return error.sqlstate == "54000" or "invalid memory alloc request size" in str(error)


def _trying_again_may_help(state: str) -> bool:
    return state.startswith(_UNAVAILABLE_CLASSES) or state in _UNAVAILABLE_CODES


def _text(error: BaseException) -> str:
    """MESSAGE, DETAIL and HINT of the server, or the text of a local error, with secrets masked."""
    parts = [getattr(error, "message", None) or str(error) or type(error).__name__]
    parts += [part for part in (getattr(error, "detail", None), getattr(error, "hint", None)) if part]
    text = parts[0] if len(parts) == 1 else ". ".join(part.rstrip(". ") for part in parts) + "."
    return mask_secrets(" ".join(text.split()))
