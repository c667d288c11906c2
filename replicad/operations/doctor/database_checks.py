"""Checks of the database, of its schema and of what daemons need of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from replicad.errors import DatabaseRefused, SchemaMissing, SchemaTooNew
from replicad.operations.doctor.declared import Check, Finding, counted, failing, fine, warning
from replicad.operations.doctor.seen import Evidence
from replicad.postgres import schema
from replicad.tubes.untouched import attach_command


async def _database(seen: Evidence) -> Iterable[Finding]:
    row = await seen.server()
    where = f"{seen.db.target}, as {row['role']}"
    return fine(f"PostgreSQL {row['version']} at {where}, answers in {seen.answered_in * 1000:.1f} ms")


async def _standby(seen: Evidence) -> Iterable[Finding]:
    row = await seen.server()
    if row["standby"]:
        return [failing("the server is a standby; daemons cannot serve it", "name the primary with --database")]
    if row["read_only"]:
        remedy = f'ALTER ROLE "{row["role"]}" RESET default_transaction_read_only, or that of the database'
        return [failing(f"user {row['role']} may only read here", remedy)]
    return fine("the server is a primary, and this user may write")


async def _rights(seen: Evidence) -> Iterable[Finding]:
    row = await seen.server()
    found = [
        failing(
            f"stream {one.stream.name}: {one.stream.denied}",
            "run what the sentence says, as the owner of the table or as a superuser",
        )
        for one in (await seen.streams()).streams
        if one.stream.denied is not None
    ]
    if not row["sees_sessions"]:
        role = row["role"].replace('"', '""')
        text = f"user {row['role']} cannot see what other users' sessions do, so holders have no age and no query"
        found.append(warning(text, f'GRANT pg_read_all_stats TO "{role}"'))
    return found or fine(f"user {row['role']} may read all streams, and see all sessions")


async def _owners(seen: Evidence) -> Iterable[Finding]:
    found = [
        warning(
            f"tube {row['tube']}: the triggers of {row['root']} run with the rights of role {row['runs_as']}, and the "
            f"table belongs to role {row['owner']}",
            f"attach it again: {attach_command(row, row['root'])}",
        )
        for row in await seen.misowned_triggers()
    ]
    found += [
        warning(
            f"table {row['table']} of role {row['table_owner']} is read with the daemon's rights, and runs code of "
            f"role {row['owner']}: {row['what']}",
            f"ALTER {row['what']} OWNER TO {row['table_owner']}, or ALTER TABLE {row['table']} OWNER TO {row['owner']}",
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
        return [failing("no daemon is connected to this database", "start `replicad serve`")]
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
            "`replicad clients` lists all; docs/operating.md has each limit",
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
        "`replicad clients`; docs/operating.md has each limit and its setting",
        _clients,
        needs=None,
    ),
)
