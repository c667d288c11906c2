"""Checks of senders: whether they run, and what their destinations refuse or do not take."""

from __future__ import annotations

from collections.abc import Iterable
from shlex import quote

from replicad.operations.doctor.declared import Check, Finding, counted, failing, fine, warning
from replicad.operations.doctor.seen import MOST_PARKED, Evidence


async def _senders(seen: Evidence) -> Iterable[Finding]:
    rows = await seen.senders()
    found: list[Finding] = []
    published: dict[str, int] = {}
    if any(row["recorded"] for row in rows):
        published = {one.stream.name: one.position or 0 for one in (await seen.streams()).streams}
    for row in rows:
        stream = row["source"]
        recorded = (one.rpartition(" ") for one in row["recorded"])
        unread = any(published.get(name, 0) > int(token) for name, _, token in recorded)
        if row["absent"] and (row["outstanding"] or unread):
            text = f"stream {stream}: facts or updates wait, and its sender {', '.join(row['absent'])} does not run"
            found.append(
                failing(text, f"start `replicad sender --facts {quote(stream)}` with its --sender-name and --senders")
            )
        if row["parked"]:
            number = (
                f"{row['parked']:,} or more items are"
                if row["parked"] >= MOST_PARKED
                else counted(row["parked"], "item is", "items are")
            )
            remedy = f"replicad sender parked list --stream {quote(stream)}"
            found.append(warning(f"stream {stream}: {number} parked", remedy))
        if row["failing"]:
            hours, others = row["failing_s"] / 3600, row["failing"] - 1
            more = f", and {counted(others, 'other destination')} for more than an hour" if others else ""
            text = (
                f"stream {stream}: {row['first'][:100]} has taken nothing for {hours:.1f} h ({row['last_error']}){more}"
            )
            found.append(warning(text, "mend the receiver; `REMOTE_SERVER_UP name` to a daemon ends the pause"))
    known = f"senders of {counted(len(rows), 'stream')} are known"
    return found or fine(f"{known}; of what they deliver nothing is parked, and nothing waits in vain")


SENDER_CHECKS = (
    Check(
        "senders",
        "senders, what their destinations refuse, and destinations that are down",
        "something is parked, or a destination that has yet to take something has failed for an hour",
        "a sender does not run, and facts or updates of its stream wait",
        "start the sender; `replicad sender parked`; docs/sender.md",
        _senders,
        needs="schema",
    ),
)
