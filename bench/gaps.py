"""Readers that go by ids, while eight writers commit out of order: the rows that each misses, and what it waits.

Writers insert rows of a table with an id from a sequence: single rows, rows that are rolled back, and now and then a
transaction that stays open for up to 2.5 s after its INSERT. They are procedures that commit in a loop, at 8,000
commits/s at most, and wait neither for a client nor for the disk. A transaction on another table is open for 5 s at a
time.
Each reader wants every row once, in one run beside the others:

- max(id): reads what is above the highest id that it has seen
- gap time-out: delivers up to the first missing id, and passes over one that has been missing for a second
- xmin: orders by the transaction (xid8), and reads those below the oldest running one
- LISTEN: one commit in fifty notifies (NOTIFY makes commits wait for each other); the reader then reads what is above
  the highest id, and at the latest after 20 ms
- lock-watch: a client of replicad over TCP
- lock-watch, writers named: the same for a stream with a column that names the writer, so that an open transaction
  delays the rows of its writer only

The delay is that of rows that were committed at once, from the INSERT to the reader. A row is lost for a reader that
has it not when it has the last row of all.
"""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psycopg

from bench.readers import processes
from bench.report import Bar, Figure, Spread
from bench.system import Daemon, Options, System, connect, process, system
from replicad.postgres.programs import find_programs

COMMITS = 200_000  # at --scale 1; --scale 50 is the long form
WRITERS = 8
RATE = 8000  # transactions a second of all writers, at most
POLL = 0.02  # seconds between two looks
GAP = 1.0  # seconds until a missing id is passed over
LOCKS = "lock-watch"
END = "e"  # the kind of the last row, at which readers end
REST = 60.0  # seconds after the writers have ended in which it must arrive, and as long again as they took
TABLE = """
CREATE TABLE gaps (
    id bigserial PRIMARY KEY, kind "char" NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp(),
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(), writer text NOT NULL DEFAULT current_setting('application_name')
) WITH (autovacuum_enabled = false);
CREATE INDEX gaps_xid ON gaps (xid, id);
CREATE TABLE elsewhere (n int);
CREATE FUNCTION gaps_notify() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NOTIFY gaps; RETURN NULL; END $$;
CREATE TRIGGER gaps_notify AFTER INSERT ON gaps FOR EACH ROW WHEN (NEW.id % 50 = 0) EXECUTE FUNCTION gaps_notify();
CREATE PROCEDURE gaps_write(transactions int, rate float8) LANGUAGE plpgsql AS $$
DECLARE
    begun timestamptz := clock_timestamp();
    chance int;
BEGIN
    FOR number IN 1..transactions LOOP
        chance := floor(random() * 5000);
        IF chance = 0 THEN
            INSERT INTO gaps (kind) VALUES ('l');
            PERFORM pg_sleep(0.1 + 2.4 * random());
            COMMIT;
        ELSIF chance < 500 THEN
            INSERT INTO gaps (kind) VALUES ('r');
            ROLLBACK;
        ELSE
            INSERT INTO gaps (kind) VALUES ('s');
            COMMIT;
        END IF;
        IF number % 20 = 0 THEN
            PERFORM pg_sleep(number / rate - extract(epoch FROM clock_timestamp() - begun));
            COMMIT;
        END IF;
    END LOOP;
END $$;
"""
OTHER = "BEGIN;\nINSERT INTO elsewhere VALUES (1);\n\\sleep 5 s\nCOMMIT;\n\\sleep 1 s\n"
ROW = "json_build_array(t.id, extract(epoch FROM t.at), t.kind)"
_RDATA = re.compile(rb"^RDATA \S+ \S+ \S+ \[(\d+), ([0-9.]+), \"(.)\"\]$", re.MULTILINE)
_COLUMNS = "id, extract(epoch FROM at)::float8, kind::text"

Row = tuple[int, float, str]


@dataclass(slots=True)
class Kept:
    """What one reader has got."""

    ids: array[int]
    delays: array[float]  # of rows that were committed at once
    ended: bool = False  # the last row is among them

    def take(self, rows: Sequence[Row]) -> None:
        """They have arrived now."""
        now = time.time()
        for id_, at, kind in rows:
            self.ids.append(id_)
            if kind == "s":
                self.delays.append(now - at)
            elif kind == END:
                self.ended = True


def run(options: Options) -> list[Figure]:
    """A figure for each reader."""
    commits = options.sized(COMMITS)
    with system() as ours, ours.daemon() as daemon:
        ours.install()
        ours.sql(TABLE)
        for name, more in (("gaps", []), ("named", ["--instance-column", "writer"])):
            ours.replicad("streams", "add", name, "--table", "public.gaps", "--id", "id", "--row", ROW, *more)
        found, seconds, there = _race(ours, daemon, commits)
    return [_figure(name, kept, there, seconds) for name, kept in found.items()]


def _race(ours: System, daemon: Daemon, commits: int) -> tuple[dict[str, Kept], float, Any]:
    """What each reader got, how long the writers took, and the ids that are in the table."""
    readers: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
        "max(id)": (follow, (by_highest, ours.url)),
        f"gap time-out of {GAP:g} s": (follow, (by_gaps, ours.url)),
        "xmin": (follow, (by_xmin, ours.url)),
        "LISTEN and max(id)": (follow, (by_listening, ours.url)),
        LOCKS: (follow_daemon, (daemon.host, daemon.port, "gaps")),
        f"{LOCKS}, writers named": (follow_daemon, (daemon.host, daemon.port, "named")),
    }
    with ExitStack() as stack:
        pipes = stack.enter_context(processes(list(readers.values())))
        stack.enter_context(process(ours.pgbench(OTHER, "-T", "100000", clients=1)))
        began = time.monotonic()
        _write(ours, commits)
        seconds = time.monotonic() - began
        ours.sql(f"INSERT INTO gaps (kind) VALUES ('{END}')")
        found = {}
        for name, pipe in zip(readers, pipes, strict=True):
            if not pipe.poll(max(0.0, began + 2 * seconds + REST - time.monotonic())):
                raise RuntimeError(f"{name} has not got the last row {seconds + REST:.0f} s after it was written")
            found[name] = pipe.recv()
    with psycopg.connect(ours.url) as connection:
        there = np.array([id_ for (id_,) in connection.execute("SELECT id FROM gaps")], dtype=np.int64)
    return found, seconds, there


def _write(ours: System, commits: int) -> None:
    """Each writer is a program of its own, with a name."""
    call = f"CALL gaps_write({max(1, commits // WRITERS)}, {RATE / WRITERS})"
    command = [str(find_programs() / "psql"), "-X", "-q", "-c", call, ours.url]
    names = [f"w{number}" for number in range(WRITERS)]
    with ExitStack() as stack:
        started = [
            stack.enter_context(process(command, PGAPPNAME=name, PGOPTIONS="-c synchronous_commit=off"))
            for name in names
        ]
        if any(psql.wait() for psql in started):
            raise RuntimeError("psql failed")


def _figure(name: str, kept: Kept, there: Any, seconds: float) -> Figure:
    seen = np.frombuffer(kept.ids, dtype=np.int64) if len(kept.ids) else np.array([], dtype=np.int64)
    lost = len(np.setdiff1d(there, seen))
    twice = len(seen) - len(np.unique(seen))
    p50, p99, longest = (np.quantile(np.frombuffer(kept.delays), (0.5, 0.99, 1.0)) * 1000).tolist()
    text = f"{lost:,} lost{f', {twice:,} twice' if twice else ''}; {p50:.1f} / {p99:.1f} / {longest:.0f} ms"
    what = f"{name}: rows lost of {len(there):,}; delay p50 / p99 / longest ({len(there) / seconds:,.0f} commits/s)"
    shown = Bar("Rows lost", "", name, float(lost)), Bar("Delay, p99, in ms", "", name, p99)
    if name.startswith(LOCKS):
        return Figure(what, text, "", Spread.of([float(lost)]), at_most=0.0, bars=shown)
    return Figure(what, "", text, bars=shown)


# --- readers, each in a process of its own ---


def follow(pipe: Connection, how: Callable[[psycopg.Connection], Iterator[list[Row]]], url: str) -> None:
    """Read in one way until the last row."""
    kept = Kept(array("q"), array("d"))
    with psycopg.connect(url, autocommit=True, application_name="bench reader") as connection:
        looks = how(connection)
        next(looks)
        pipe.send("ready")
        while not kept.ended:
            rows = next(looks)
            kept.take(rows)
            if not rows:
                time.sleep(POLL)
    pipe.send(kept)


def by_highest(connection: psycopg.Connection) -> Iterator[list[Row]]:
    """Above the highest id that was seen."""
    last = 0
    while True:
        rows = _above(connection, last)
        last = rows[-1][0] if rows else last
        yield rows


def by_listening(connection: psycopg.Connection) -> Iterator[list[Row]]:
    """The same, when a notification has come, and after POLL."""
    connection.execute("LISTEN gaps")
    looks = by_highest(connection)
    yield next(looks)
    while True:
        for _ in connection.notifies(timeout=POLL, stop_after=1):
            pass
        yield next(looks)


def by_gaps(connection: psycopg.Connection) -> Iterator[list[Row]]:
    """In the order of ids, up to the first one that is missing and was first missed less than GAP seconds ago."""
    highest, waiting = 0, dict[int, Row]()
    missing: dict[int, float] = {}  # in ascending order
    while True:
        late = connection.execute(f"SELECT {_COLUMNS} FROM gaps WHERE id = ANY (%s)", (list(missing),)).fetchall()
        for row in late:
            waiting[row[0]] = row
            del missing[row[0]]
        now = time.monotonic()
        for row in _above(connection, highest):
            missing.update(dict.fromkeys(range(highest + 1, row[0]), now))
            highest, waiting[row[0]] = row[0], row
        for id_ in [id_ for id_, at in missing.items() if now - at > GAP]:
            del missing[id_]
        upto = min(missing, default=highest + 1)
        ready = [waiting.pop(id_) for id_ in sorted(id_ for id_ in waiting if id_ < upto)]
        yield ready


def by_xmin(connection: psycopg.Connection) -> Iterator[list[Row]]:
    """In the order of transactions, those below the oldest that runs."""
    query = (
        f"SELECT {_COLUMNS}, xid::text FROM gaps WHERE (xid, id) > (%s::xid8, %s) "
        "AND xid < pg_snapshot_xmin(pg_current_snapshot()) ORDER BY gaps.xid, id LIMIT 20000"
    )
    at = ("0", 0)
    while True:
        rows = connection.execute(query, at).fetchall()
        if rows:
            at = (rows[-1][3], rows[-1][0])
        yield [(id_, sent, kind) for id_, sent, kind, _ in rows]


def _above(connection: psycopg.Connection, last: int) -> list[Row]:
    query = f"SELECT {_COLUMNS} FROM gaps WHERE id > %s ORDER BY id LIMIT 20000"
    return connection.execute(query, (last,)).fetchall()


def follow_daemon(pipe: Connection, host: str, port: int, stream: str) -> None:
    """Read a stream of a daemon until the last row."""
    kept = Kept(array("q"), array("d"))
    with connect(host, port, f"REPLICATE {stream} EARLIEST\n".encode()) as link:
        rest = b""
        while b"POSITION" not in rest:
            rest += link.recv(1 << 16)
        pipe.send("ready")
        while not kept.ended:
            if not (data := link.recv(1 << 18)):
                raise ConnectionError(f"the daemon has closed the connection: {rest[-300:]!r}")
            lines, newline, rest = (rest + data).rpartition(b"\n")
            kept.take([(int(id_), float(at), kind.decode()) for id_, at, kind in _RDATA.findall(lines + newline)])
    pipe.send(kept)
