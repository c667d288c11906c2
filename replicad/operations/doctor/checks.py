"""The checks of `replicad doctor`: of the database, streams, tubes and senders, and how they are run.

The table of docs/doctor.md and the tests come from the declarations. Checks run one after the other, each within a
bounded time.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import trio

from replicad.errors import DatabaseRefused, ReplicadError, SchemaMissing, SchemaTooNew
from replicad.operations.doctor.seen import MOST_PARKED, Evidence
from replicad.positions.horizon import Holder, HolderKind
from replicad.postgres import schema
from replicad.postgres.bridge import quote_ident
from replicad.remedies import Remedy, word
from replicad.streams import status
from replicad.terminal.holders import remedy_for, who
from replicad.tubes.serving.leases import LEASE_EXPIRED
from replicad.tubes.untouched import attach_command

_WAITS = (status.NO_DAEMON, status.IDS_AHEAD)  # states in which the stream is served, and rows wait

LONGEST = 15.0  # seconds for a check; a second look at streams takes three


class Level(IntEnum):
    """How bad a finding is; the exit status of the command is that of the worst."""

    FINE = 0
    WARNING = 1
    FAILING = 2

    @property
    def word(self) -> str:
        """The word in the output."""
        return {Level.FINE: "ok", Level.WARNING: "WARNING", Level.FAILING: "FAILING"}[self]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found, as one sentence, and what to do about it."""

    level: Level
    text: str
    remedy: str = ""
    by: str = ""  # who may run the remedy, if the asking role may not


@dataclass(frozen=True, slots=True)
class Check:
    """A check. `warns` and `fails` are the conditions; None: it never does. `needs`: the check that must not fail
    before it.

    `run` returns at least one finding: a problem, or that all is fine.
    """

    name: str
    looks_at: str
    warns: str | None
    fails: str | None
    remedy: str
    run: Callable[[Evidence], Awaitable[Iterable[Finding]]]
    needs: str | None = "database"

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels that it may report."""
        given = {Level.WARNING: self.warns, Level.FAILING: self.fails}
        return (Level.FINE, *(level for level, when in given.items() if when is not None))


def fine(text: str) -> list[Finding]:
    """Nothing is wrong."""
    return [Finding(Level.FINE, text)]


def warning(text: str, remedy: str) -> Finding:
    """Something will need attention, or costs something; all that can be served is served."""
    return Finding(Level.WARNING, text, remedy)


def failing(text: str, remedy: str) -> Finding:
    """Something is not served, or will soon not be."""
    return Finding(Level.FAILING, text, remedy)


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 stream`, `2 streams`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


# --- the database, its schema, and what daemons need of it ---


async def _database(seen: Evidence) -> Iterable[Finding]:
    row = await seen.server()
    where = f"{seen.db.target}, as {row['role']}"
    return fine(f"PostgreSQL {row['version']} at {where}, answers in {seen.answered_in * 1000:.1f} ms")


async def _standby(seen: Evidence) -> Iterable[Finding]:
    row = await seen.server()
    if row["standby"]:
        return [failing("the server is a standby; daemons cannot serve it", "name the primary with --database")]
    if row["read_only"]:
        remedy = Remedy.make("reset_read_only", what=row["read_only_by"])
        return [failing(f"user {row['role']} may only read here", remedy)]
    return fine("the server is a primary, and this user may write")


async def _rights(seen: Evidence) -> Iterable[Finding]:
    row = await seen.server()
    streams = (await seen.streams()).streams
    denied = [one for one in streams if one.stream.denied is not None]
    viewer = any(one.state != "denied" for one in denied)  # a role that only looks: its rights are no fault of a stream
    found = [
        failing(
            f"stream {one.stream.name}: {one.stream.denied}",
            "run what the sentence says, as the owner of the table or as a superuser",
        )
        for one in denied
        if not viewer
    ]
    if not row["sees_sessions"]:
        text = f"user {row['role']} cannot see what other users' sessions do, so holders have no age and no query"
        found.append(warning(text, Remedy.make("see_sessions", role=quote_ident(row["role"]))))
    if viewer and not found:
        few = counted(len(denied), "stream")
        return fine(f"user {row['role']} may look at all streams and sessions, and read no rows of {few}")
    return found or fine(f"user {row['role']} may read all streams, and see all sessions")


async def _owners(seen: Evidence) -> Iterable[Finding]:
    found = [
        warning(
            f"tube {row['tube']}: the triggers of {row['root']} run with the rights of role {row['runs_as']}, and the "
            f"table belongs to role {row['owner']}",
            attach_command(row, row["root"]),
        )
        for row in await seen.misowned_triggers()
    ]
    found += [
        warning(
            f"table {row['table']} of role {row['table_owner']} is read with the daemon's rights, and runs code of "
            f"role {row['owner']}: {row['what']}",
            Remedy.make("own_type", what=row["what"], role=row["table_owner"]),
        )
        for row in await seen.strangers()
    ]
    return found or fine("code on every table runs with the rights of the table's owner")


async def _schema(seen: Evidence) -> Iterable[Finding]:
    found: list[Finding] = []
    versions = []
    for part, name in (("stream", seen.settings.stream_schema), ("tube", seen.settings.tube_schema)):
        try:
            present = await schema.require(seen.db, part, name)
        except (SchemaMissing, SchemaTooNew) as error:
            found.append(failing(str(error), "start `replicad serve` of the version that this database shall have"))
            continue
        except DatabaseRefused as error:  # a right: nothing else can be looked at without it
            return [
                failing(str(error), "that GRANT; `replicad sql roles` prints all that a role needs (docs/access.md)")
            ]
        versions.append(f"{part} version {present.version} in {name}")
        remark = schema.remark(present, part, name)
        if remark is not None:
            found.append(warning(remark, "upgrade the older one of program and schema"))
    return found or fine(", ".join(versions))


async def _sessions(seen: Evidence) -> Iterable[Finding]:
    row, limits = await seen.server(), seen.thresholds
    text = f"{counted(row['sessions'], 'session')} of max_connections = {row['max_sessions']}"
    remedy = (
        "raise max_connections, or close sessions: SELECT application_name, count(*) FROM pg_stat_activity GROUP BY 1"
    )
    if row["sessions"] >= limits.used_up * row["max_sessions"]:
        return [failing(text, remedy)]
    if row["sessions"] >= limits.used * row["max_sessions"]:
        return [warning(text, remedy)]
    return fine(text)


async def _daemons(seen: Evidence) -> Iterable[Finding]:
    number = (await seen.server())["daemons"]
    if not number:
        return [failing("no daemon is connected to this database", Remedy.make("start_daemon"))]
    silent = [
        warning(
            f"daemon {one.name} (pid {one.pid}, at {', '.join(one.addresses)}) is {one.state}",
            "it was killed or cannot reach Postgres: start it again. It is left out after an hour",
        )
        for one in await seen.daemons()
        if not one.alive
    ]
    return silent or fine(f"{counted(number, 'daemon is', 'daemons are')} connected")


async def _troubles(seen: Evidence) -> Iterable[Finding]:
    found = [one for one in await seen.troubles() if one.kind not in ("stream", "tube")]
    problems = [warning(f"{one.daemon}: {one.kind} {one.name}: {one.reason}", "see the daemon's log") for one in found]
    return problems or fine("no daemon reports a trouble of itself")


async def _disk(seen: Evidence) -> Iterable[Finding]:
    if seen.folder is None or not seen.folder.exists():
        return fine("not checked: only the disk of an embedded Postgres is known to be of this machine")
    usage, limits = shutil.disk_usage(seen.folder), seen.thresholds
    free = usage.free / usage.total
    text = f"{usage.free / (1 << 30):,.1f} GiB ({free:.0%}) are free below {seen.folder}"
    if free < limits.disk_full:
        return [failing(text, "free some, now: Postgres stops when there is none")]
    if free < limits.disk:
        return [warning(text, "free some, or move the folder")]
    return fine(text)


async def _clock(seen: Evidence) -> Iterable[Finding]:
    await seen.server()
    text = f"the database's clock is {abs(seen.skew):.1f} s {'ahead of' if seen.skew > 0 else 'behind'} this machine's"
    if abs(seen.skew) > seen.thresholds.clock:
        return [warning(f"{text}; ages that are shown are wrong by as much", "run NTP on both")]
    return fine(text)


async def _clients(seen: Evidence) -> Iterable[Finding]:
    if seen.daemon is None:
        return fine("not checked: give --http with the address of a daemon's `serve --http`")
    cuts = seen.daemon().get("cuts", [])
    found = [
        warning(
            f"client {cut['name'] or cut['peer']} was cut {cut['ago_s']:.0f} s ago ({cut['reason']}): {cut['why']}",
            "`replicad clients` lists all; docs/limits.md has each limit",
        )
        for cut in cuts
        if cut["ago_s"] < RECENT
    ]
    return found or fine("no client was cut in the last hour")


RECENT = 3600.0  # seconds for which a cut is reported

DATABASE_CHECKS = (
    Check(
        "database",
        "whether Postgres answers, its version, and how fast",
        None,
        "it does not answer, refuses us, or is older than 15",
        "start it, or mend --database (REPLICAD_DATABASE)",
        _database,
        needs=None,
    ),
    Check(
        "standby",
        "whether the server can be written to",
        None,
        "it is a standby, or this user may only read",
        "name the primary; RESET default_transaction_read_only",
        _standby,
    ),
    Check(
        "schema",
        "which versions of replicad's SQL are installed",
        "another build than this program is installed, or a newer version that serves it",
        "a part is missing, too old or too new",
        "start `replicad serve` of the right version once, or run what `replicad sql up` prints",
        _schema,
    ),
    Check(
        "rights",
        "what this user may read; run it as the daemon's user",
        "other users' sessions cannot be seen",
        "a stream's table, sequence or columns cannot be read, or row security can hide rows of it",
        "the GRANT or the other statement that is printed",
        _rights,
        needs="schema",
    ),
    Check(
        "owners",
        "with whose rights code on tables runs",
        "triggers of a tube run with another role's than the owner's, as after ALTER TABLE ... OWNER TO; or a table "
        "that is read with the daemon's has a type or a function of a third role",
        None,
        "attach the table again; give the table and the type to one owner ([access.md](access.md))",
        _owners,
        needs="schema",
    ),
    Check(
        "sessions",
        "how many sessions the server has",
        "80 % of max_connections are used",
        "95 % are used",
        "raise max_connections, or close sessions",
        _sessions,
    ),
    Check(
        "daemons",
        "whether daemons are connected to the database, and send their beats",
        "one is silent",
        "there is none",
        "start `replicad serve`",
        _daemons,
    ),
    Check(
        "troubles",
        "what running daemons report of their own services",
        "a service fails",
        None,
        "the daemon's log has the reason",
        _troubles,
        needs="schema",
    ),
    Check(
        "disk",
        "the free space below the embedded Postgres",
        "less than 10 % are free",
        "less than 3 % are free",
        "free some, or move the folder",
        _disk,
        needs=None,
    ),
    Check(
        "clock",
        "the clocks of the database and of this machine (nothing depends on them but the ages that are shown)",
        "they differ by more than 5 s",
        None,
        "run NTP on both",
        _clock,
    ),
    Check(
        "clients",
        "which clients a daemon has cut, with --http",
        "one was cut in the last hour",
        "the daemon does not answer over HTTP",
        "`replicad clients`; docs/limits.md has each limit and its setting",
        _clients,
        needs=None,
    ),
)


# --- streams: what cannot be served, what holds them back, and their sequences ---


async def _streams(seen: Evidence) -> Iterable[Finding]:
    found = []
    streams = (await seen.streams()).streams
    for one in streams:
        if one.state in (status.OK, "denied"):  # `rights` has the latter
            continue
        text = f"stream {one.stream.name} ({one.state}): {one.problem}"
        level = Level.WARNING if one.state in _WAITS else Level.FAILING
        found.append(Finding(level, text, Remedy.make("show_stream", stream=word(one.stream.name))))
    return found or fine(f"{counted(len(streams), 'stream can', 'streams can')} be served")


async def _holders(seen: Evidence) -> Iterable[Finding]:
    found, limits = [], seen.thresholds
    for one in (await seen.streams()).streams:
        holder = one.held_by
        age = None if holder is None else holder.age_s if holder.age_s is not None else one.lag_seconds
        if holder is None or age is None or age < limits.held:
            continue
        text = f"stream {one.stream.name} is held back for {age:.0f} s by {who(holder)}"
        found.append((failing if age >= limits.held_long else warning)(text, remedy_for(holder, one.stream.name)))
    for row in await seen.partitions():
        if row["partition"] == 0 and (row["writer_s"] or 0) >= limits.held:
            text = f"tube {row['tube']} is held back for {row['writer_s']:.0f} s by {row['writer']}"
            pid = int(row["writer"].split()[1]) if row["writer"].startswith("pid ") else None
            gid = None if pid is not None else row["writer"].removeprefix("prepared transaction ")
            remedy = remedy_for(Holder(HolderKind.TRANSACTION, pid=pid, gid=gid))
            found.append((failing if row["writer_s"] >= limits.held_long else warning)(text, remedy))
    return found or fine(f"nothing has held a stream or tube back for {limits.held:.0f} s")


async def _lag(seen: Evidence) -> Iterable[Finding]:
    limits = seen.thresholds
    streams = (await seen.streams()).streams
    found = [
        warning(
            f"stream {one.stream.name}: {one.lag_rows:,} rows have waited for up to {one.lag_seconds or 0:.0f} s",
            Remedy.make("show_stream", stream=word(one.stream.name)),
        )
        for one in streams
        if one.lag_rows and (one.lag_seconds or 0) >= limits.lag and one.held_by is None and one.state == status.OK
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
    if unseen := sum(row["hidden"] for row in rows):
        return found or fine(f"not checked: this role may not read {counted(unseen, 'sequence')}")
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


# --- tubes: obstacles to serving, readers, parked ids, and backfills ---


async def _tubes(seen: Evidence) -> Iterable[Finding]:
    found = [
        failing(f"tube {name}: {why}", Remedy.make("list_tubes")) for name, why in (await seen.tube_faults()).items()
    ]
    tubes = {row["tube"] for row in await seen.partitions()}
    return found or fine(f"{counted(len(tubes), 'tube can', 'tubes can')} be served")


async def _paused(seen: Evidence) -> Iterable[Finding]:
    found = [
        warning(
            f"tube {one.name}: {one.paused}; no reader gets its pods", Remedy.make("resume_tube", tube=word(one.name))
        )
        for one in await seen.tubes()
        if one.paused is not None
    ]
    return found or fine("no tube is paused")


async def _readers(seen: Evidence) -> Iterable[Finding]:
    found = []
    paused = {one.name for one in await seen.tubes() if one.paused is not None}
    rows = [row for row in await seen.partitions() if row["tube"] not in paused]
    uncounted = {row["tube"] for row in rows if row["pods"] is None}
    for row in rows:
        where = f"tube {row['tube']}, partition {row['partition']}"
        if row["pods"] and row["holder"] is None:
            age, pods = row["lag_s"] or 0, counted(row["pods"], "pod waits", "pods wait")
            late = failing if age >= seen.thresholds.lag else warning
            found.append(
                late(f"{where}: {pods} for up to {age:.0f} s, and no worker has the lease", Remedy.make("start_worker"))
            )
        elif (row["lag_s"] or 0) >= seen.thresholds.lag:
            text = f"{where}: the oldest pod is {row['lag_s']:.0f} s old; {row['holder']} reads it"
            found.append(warning(text, "see the worker's log; more partitions allow more workers"))
    if uncounted:  # `tubes` has the reason, or this role only looks
        return found or fine(
            f"not checked: the pods of {counted(len(uncounted), 'tube')} cannot be counted by this role"
        )
    return found or fine("every partition with pods has a reader that keeps up")


async def _leases(seen: Evidence) -> Iterable[Finding]:
    expired = {(one.name, one.cause): one for one in await seen.troubles() if one.code == LEASE_EXPIRED}
    found = [
        warning(f"tube {name}, {one.reason.partition('; ')[0]}", Remedy.make("start_worker"))
        for (name, _), one in expired.items()
    ]
    return found or fine("no lease has expired")


async def _parked(seen: Evidence) -> Iterable[Finding]:
    parked: defaultdict[str, int] = defaultdict(int)
    for row in await seen.partitions():
        parked[row["tube"]] += row["parked"] or 0
    found = [
        warning(
            f"tube {name}: {counted(number, 'pod is', 'pods are')} parked", Remedy.make("list_parked", tube=word(name))
        )
        for name, number in parked.items()
        if number
    ]
    return found or fine("no pod of a tube is parked")


async def _backfills(seen: Evidence) -> Iterable[Finding]:
    found = []
    for row in await seen.backfills():
        if row["idle_s"] >= seen.thresholds.backfill:
            text = f"the backfill of {row['table']} into tube {row['tube']} has added nothing for {row['idle_s']:.0f} s"
            found.append(
                warning(f"{text} ({row['ids']:,} ids are in)", "a daemon continues it: `replicad serve`, and its log")
            )
    for row in await seen.partitions():
        if row["backfill_pods"] and row["holder"] is None:
            where = f"tube {row['tube']}, partition {row['partition']}"
            text = f"{where}: {counted(row['backfill_pods'], 'pod of a backfill waits', 'pods of a backfill wait')}"
            found.append(warning(f"{text}, and no worker has the lease", Remedy.make("start_worker")))
    return found or fine("no backfill is stuck")


TUBE_CHECKS = (
    Check(
        "tubes",
        "whether each tube can be served, and records all changes",
        None,
        "its table is missing or cannot be read, or a trigger is missing",
        "what the sentence says",
        _tubes,
        needs="schema",
    ),
    Check(
        "paused",
        "tubes whose pods no reader gets",
        "one is paused",
        None,
        "`replicad tubes resume TUBE`",
        _paused,
        needs="schema",
    ),
    Check(
        "readers",
        "pods that wait",
        "they wait without a reader, or the reader is a minute behind",
        "they have waited for a minute without a reader",
        "start a worker",
        _readers,
        needs="schema",
    ),
    Check(
        "leases",
        "leases whose holders are silent, as the daemons see them",
        "one has expired",
        None,
        "start the worker again",
        _leases,
        needs="schema",
    ),
    Check(
        "parked",
        "pods that failed too often",
        "some are parked",
        None,
        "`replicad tubes parked list TUBE`, then `replay` or `drop`",
        _parked,
        needs="schema",
    ),
    Check(
        "backfills",
        "backfills that are not finished",
        "one has added nothing for five minutes, or its pods have no reader",
        None,
        "start a daemon, or a worker",
        _backfills,
        needs="schema",
    ),
)


# --- senders: whether they run, and what their destinations refuse or do not take ---


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
            found.append(failing(text, Remedy.make("start_sender", stream=word(stream))))
        if row["parked"]:
            number = (
                f"{row['parked']:,} or more items are"
                if row["parked"] >= MOST_PARKED
                else counted(row["parked"], "item is", "items are")
            )
            remedy = Remedy.make("list_sender_parked", stream=word(stream))
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


CHECKS: tuple[Check, ...] = (*DATABASE_CHECKS[:5], *STREAM_CHECKS, *TUBE_CHECKS, *SENDER_CHECKS, *DATABASE_CHECKS[5:])


# --- running them ---


async def examine(
    seen: Evidence, checks: Sequence[Check] = CHECKS, *, longest: float = LONGEST
) -> AsyncIterator[tuple[Check, Finding]]:
    """The findings of all checks. A check whose `needs` has failed is left out: it would repeat the reason."""
    failed: set[str] = set()
    for check in checks:
        if check.needs in failed:
            failed.add(check.name)
            continue
        found = await _run(check, seen, longest)
        if any(one.level is Level.FAILING for one in found):
            failed.add(check.name)
        for one in found:
            yield check, one


async def _run(check: Check, seen: Evidence, longest: float) -> list[Finding]:
    """A check that cannot be made fails where it can fail, else it warns."""
    report = failing if Level.FAILING in check.levels else warning
    try:
        with trio.fail_after(longest):
            return [replace(one, by=await seen.others_who_may(one.remedy)) for one in await check.run(seen)]
    except trio.TooSlowError:
        return [
            report(f"no answer within {longest:g} s", "see what Postgres waits for: SELECT * FROM pg_stat_activity")
        ]
    except ReplicadError as error:
        return [report(str(error), check.remedy)]
    except Exception as error:  # noqa: BLE001 - a defect in one check hides no finding of another
        return [report(f"the check itself failed: {type(error).__name__}: {error}", "please report it")]
