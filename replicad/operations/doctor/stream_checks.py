"""Checks of streams: what cannot be served, what holds them back, and their sequences."""

from __future__ import annotations

from collections.abc import Iterable
from shlex import quote

from replicad.operations.doctor.declared import Check, Finding, Level, counted, failing, fine, warning
from replicad.operations.doctor.seen import Evidence
from replicad.streams import status
from replicad.terminal.holders import how_to_end, who

_WAITS = (status.NO_DAEMON, status.IDS_AHEAD)  # states in which the stream is served, and rows wait


async def _streams(seen: Evidence) -> Iterable[Finding]:
    found = []
    streams = (await seen.streams()).streams
    for one in streams:
        if one.state == status.OK or one.stream.denied is not None:  # `rights` has the latter
            continue
        text = f"stream {one.stream.name} ({one.state}): {one.problem}"
        level = Level.WARNING if one.state in _WAITS else Level.FAILING
        found.append(Finding(level, text, f"replicad streams show {quote(one.stream.name)}"))
    return found or fine(f"{counted(len(streams), 'stream can', 'streams can')} be served")


async def _holders(seen: Evidence) -> Iterable[Finding]:
    found, limits = [], seen.thresholds
    for one in (await seen.streams()).streams:
        holder = one.held_by
        age = None if holder is None else holder.age_s if holder.age_s is not None else one.lag_seconds
        if holder is None or age is None or age < limits.held:
            continue
        text = f"stream {one.stream.name} is held back for {age:.0f} s by {who(holder)}"
        found.append((failing if age >= limits.held_long else warning)(text, how_to_end(holder)))
    for row in await seen.partitions():
        if row["partition"] == 0 and (row["writer_s"] or 0) >= limits.held:
            text = f"tube {row['tube']} is held back for {row['writer_s']:.0f} s by {row['writer']}"
            pid = row["writer"].split()[1] if row["writer"].startswith("pid ") else None
            remedy = f"SELECT pg_terminate_backend({pid})" if pid else "ROLLBACK PREPARED, or COMMIT PREPARED"
            found.append((failing if row["writer_s"] >= limits.held_long else warning)(text, remedy))
    return found or fine(f"nothing has held a stream or tube back for {limits.held:.0f} s")


async def _lag(seen: Evidence) -> Iterable[Finding]:
    limits = seen.thresholds
    streams = (await seen.streams()).streams
    found = [
        warning(
            f"stream {one.stream.name}: {one.lag_rows:,} rows have waited for up to {one.lag_seconds:.0f} s",
            f"replicad streams show {quote(one.stream.name)}",
        )
        for one in streams
        if one.lag_rows and one.lag_seconds >= limits.lag and one.held_by is None and one.state == status.OK
    ]
    return found or fine("no rows wait without a reason")


async def _sequences(seen: Evidence) -> Iterable[Finding]:
    found, limits = [], seen.thresholds
    rows = await seen.sequences()
    for row in rows:
        share = (row["last"] or 0) / row["most"]
        if share < limits.used:
            continue
        text = f"stream {row['name']}: its sequence has used {share:.0%} of {row['most']:,} ids"
        level = Level.FAILING if share >= limits.used_up else Level.WARNING
        found.append(Finding(level, text, "make column and sequence bigint; a reservation has at most 2^48 ids"))
    return found or fine(f"{counted(len(rows), 'sequence has', 'sequences have')} room")


STREAM_CHECKS = (
    Check(
        "streams",
        "whether each stream can be served",
        "rows wait for a daemon, or have ids that the sequence has not reached",
        "a stream is refused, locked, stalled, or stopped before a row",
        "what the sentence says; `replicad streams show NAME`",
        _streams,
        needs="schema",
    ),
    Check(
        "holders",
        "which transactions hold streams and tubes back",
        "one is open for a minute",
        "one is open for a quarter of an hour",
        "the statement that is printed; then idle_in_transaction_session_timeout",
        _holders,
        needs="schema",
    ),
    Check(
        "lag",
        "rows that wait in streams that nothing holds back",
        "they have waited for a minute",
        None,
        "`replicad streams show NAME`; the daemons' logs",
        _lag,
        needs="schema",
    ),
    Check(
        "sequences",
        "how far the sequences of the streams are used up",
        "80 % are used",
        "95 % are used",
        "make column and sequence bigint",
        _sequences,
        needs="schema",
    ),
)
