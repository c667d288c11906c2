"""`replicad sharding`: let the writers of a stream share its keys, and list their slots (docs/sharding.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from replicad.config.declaring import WHOLE
from replicad.terminal.command import ReplicadGroup, ValueType, database_options, json_option, option
from replicad.terminal.database import on_streams
from replicad.terminal.output import as_json_line, echo, print_rows, table

if TYPE_CHECKING:
    from replicad.sharding.admin import MemberStatus, SharingStatus, Stuck

_MOST_SLOTS = 4096
_SHOWN = 8  # slots that a line names

_stream = click.argument("stream")


@click.group("sharding", cls=ReplicadGroup, short_help="Divide a stream's keys among its writers.")
def command() -> None:
    """Divide a stream's keys among its writers, which may join, leave and fail at any time.

    \b
      replicad sharding enable events
      replicad sharding list
      replicad sharding show events
    """


@command.command("enable")
@_stream
@option(
    "--slots",
    type=ValueType(WHOLE, 1, _MOST_SLOTS),
    default=256,
    show_default=True,
    metavar="N",
    help="The number of slots that keys are hashed into. It cannot be changed. 256 are enough for dozens of writers.",
)
@database_options
def enable(stream: str, slots: int, **options: Any) -> None:
    """Let the writers of STREAM divide its keys. Each key is then written by its owner only."""

    from replicad.sharding import admin

    made = on_streams(options, lambda db, schema: admin.enable(db, stream, slots, schema=schema))
    echo(f"stream {stream}: its writers share {slots} slots" + ("" if made else " already"))


@command.command("disable")
@_stream
@database_options
def disable(stream: str, **options: Any) -> None:
    """End the sharing of STREAM. Stop its writers first: writers that still take part are refused."""

    from replicad.sharding import admin

    ended = on_streams(options, lambda db, schema: admin.disable(db, stream, schema=schema))
    echo(f"stream {stream}: sharing has ended" if ended else f"stream {stream}: its writers share nothing")


@command.command("list")
@json_option
@database_options
def list_shared(as_json: bool, **options: Any) -> None:
    """List the streams whose writers share the keys, and how evenly the slots are distributed."""

    from replicad.sharding import admin

    found = on_streams(options, lambda db, schema: admin.list_shared(db, schema=schema))
    rows = [_line(status) for status in found]
    nothing = "no stream's keys are shared; to share: replicad sharding enable STREAM"
    print_rows(["stream", "slots", "writers", "unowned", "smallest", "largest", "stuck"], rows, as_json=as_json,
        nothing=nothing)  # fmt: skip


@command.command("show")
@_stream
@json_option
@database_options
def show(stream: str, as_json: bool, **options: Any) -> None:
    """Show the writers that share STREAM, their slots, and what keeps slots from moving."""

    from replicad.sharding import admin

    found = on_streams(options, lambda db, schema: admin.show(db, stream, schema=schema))
    members = [_member(member, found.slots) for member in found.members]
    if as_json:
        stuck = [_stuck(stuck) | {"slots": list(stuck.slots)} for stuck in found.stuck]
        echo(as_json_line(_line(found) | {"writers": members, "stuck": stuck}))
        return
    echo(f"stream {stream}: {found.slots} slots, {found.unowned} of them without an owner")
    if members:
        echo(table(["writer", "slots", "share", "silent_s", "ttl_s", "leaving", "address"], members))
    else:
        echo("no writers")
    if found.stuck:
        echo("\nslots that do not move")
        echo(table(["slots", "owner", "held_by", "age_s"], map(_stuck, found.stuck)))


def _line(status: SharingStatus) -> dict[str, Any]:
    shares = [member.slots for member in status.members if not member.leaving]
    return {
        "stream": status.stream,
        "slots": status.slots,
        "writers": len(status.members),
        "unowned": status.unowned,
        "smallest": min(shares, default=None),
        "largest": max(shares, default=None),
        "stuck": sum(len(stuck.slots) for stuck in status.stuck),
    }


def _member(member: MemberStatus, slots: int) -> dict[str, Any]:
    return {
        "writer": member.instance,
        "slots": member.slots,
        "share": f"{member.slots / slots:.1%}",
        "silent_s": round(member.silent, 3),
        "ttl_s": member.ttl,
        "leaving": member.leaving,
        "address": member.address,
    }


def _stuck(stuck: Stuck) -> dict[str, Any]:
    """The holder of the slots: `pid 4711 (app)`, or the reason why there is none."""
    who = "nothing; no writer has taken them yet"
    if stuck.pid is not None:
        who = f"pid {stuck.pid}" + (f" ({stuck.application_name})" if stuck.application_name else "")
    elif stuck.held:
        who = "a prepared transaction"
    some = ",".join(map(str, stuck.slots[:_SHOWN])) + (",..." if len(stuck.slots) > _SHOWN else "")
    return {"slots": some, "owner": stuck.owner, "held_by": who, "age_s": stuck.age}
