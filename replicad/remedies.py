"""What an operator can do about a problem: the command or statement, and the role that may run it.

The lists, the doctor, the console and the daemons' troubles take the remedies of Python code from here, so that there
is one list of them. A test runs each of them as the role that may, and fails for a remedy that it does not run.
Remedies of SQL functions are in their own texts (`remedy := ...`); the same test reads these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from shlex import quote
from typing import Final, Self


class Who(StrEnum):
    """Who may run a remedy. `of` of a `Remedy` says of what."""

    ANYONE = "any role that may look"
    KEEPER = "the owner of replicad's schemas"
    OWNER = "the owner of the table"  # of: its name
    SESSION = "that session's role, a superuser or a member of pg_signal_backend"  # of: its process id
    PREPARER = "the role that prepared it or a superuser"  # of: the name of the prepared transaction
    SUPERUSER = "a superuser"
    MACHINE = "whoever runs the program"  # nothing that a role of Postgres decides


@dataclass(frozen=True, slots=True)
class RemedyForm:
    """One remedy. `text`: a template of `str.format`."""

    text: str
    who: Who


FORMS: Final[Mapping[str, RemedyForm]] = {
    "attach": RemedyForm("replicad tubes attach {tube} {table} --shard {shard}{more}", Who.KEEPER),
    "backfill": RemedyForm("replicad tubes backfill {tube} --shard {shard}", Who.KEEPER),
    "cancel_backfill": RemedyForm("replicad tubes backfill {tube} --shard {shard} --cancel", Who.KEEPER),
    "resume_tube": RemedyForm("replicad tubes resume {tube}", Who.KEEPER),
    "detach": RemedyForm("replicad tubes detach {tube} {table}", Who.KEEPER),
    "terminate": RemedyForm("SELECT pg_terminate_backend({pid})", Who.SESSION),
    "roll_back_prepared": RemedyForm("ROLLBACK PREPARED {gid}", Who.PREPARER),
    "retire_writer": RemedyForm("replicad streams writers {stream} --retire {writer}", Who.KEEPER),
    "locks": RemedyForm("SELECT * FROM pg_locks WHERE NOT granted", Who.ANYONE),
    "show_stream": RemedyForm("replicad streams show {stream}", Who.ANYONE),
    "list_tubes": RemedyForm("replicad tubes list", Who.ANYONE),
    "list_parked": RemedyForm("replicad tubes parked list {tube}", Who.ANYONE),
    "list_sender_parked": RemedyForm("replicad sender parked list --stream {stream}", Who.ANYONE),
    "reset_read_only": RemedyForm("ALTER {what} RESET default_transaction_read_only", Who.SUPERUSER),
    "reset_replication_role": RemedyForm("ALTER {what} RESET session_replication_role", Who.SUPERUSER),
    "see_sessions": RemedyForm("GRANT pg_read_all_stats TO {role}", Who.SUPERUSER),
    "own_type": RemedyForm("ALTER {what} OWNER TO {role}", Who.SUPERUSER),
    "start_daemon": RemedyForm("start `replicad serve`", Who.MACHINE),
    "start_worker": RemedyForm("start a worker", Who.MACHINE),
    "start_sender": RemedyForm(
        "start `replicad sender --facts {stream}` with its --sender-name and --senders", Who.MACHINE
    ),
}


class Remedy(str):
    """A remedy as it is printed. `form`: its name in FORMS. `who` may run it; `of` says of what."""

    __slots__ = ("form", "of", "who")
    form: str
    who: Who
    of: str | None

    @classmethod
    def make(cls, form: str, /, of: object = None, **values: object) -> Self:
        """The remedy of that name with these values in its text. Words of a shell are quoted by `word`."""
        found = cls(FORMS[form].text.format(**values))
        found.form, found.who, found.of = form, FORMS[form].who, None if of is None else str(of)
        return found

    @property
    def with_role(self) -> str:
        """The remedy, and who may run it where that is no matter of course."""
        return f"{self}, as {self.who}" if self.who in (Who.SESSION, Who.PREPARER, Who.SUPERUSER) else str(self)


def word(text: object) -> str:
    """One word of a command, for a shell."""
    return quote(str(text))
