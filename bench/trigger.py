"""What a tube on a table costs those who write to it: single rows, many rows in a statement, and COPY; beside pg-tube.

The same table five times, measured in turns: without a tube, attached to a tube of ours, attached to one of pg-tube
(https://github.com/clickup/pg-tube), whose SQL is read from the checkout that the variable PG_TUBE names, and with two
triggers that show what Postgres itself takes: one that does nothing, and one that only inserts the ids of the
statement into a table without an index. It shows the throughput, and the processor time of Postgres for each
statement, which other load on the machine disturbs less. `--only builtin` measures pgbench's own scripts alone.

The limit for single rows is the trigger that only inserts the ids: a trigger in plpgsql with one INSERT cannot be
cheaper, and it keeps about as much as the goal asks for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.report import Figure, Spread, rates
from bench.system import Options, System, system
from replicad.postgres.programs import find_programs

ROWS = 100_000
SECONDS = 4.0  # for each measurement
COPIED = 20_000  # rows in a COPY
PARTITIONS = 4
SCALE = 10  # of pgbench's tables: a million accounts
LIMITS = {  # what the triggers do that show what Postgres takes
    "nothing": ("a trigger that does nothing", ""),
    "plainest": (
        "a trigger that only inserts the ids",
        "INSERT INTO pods (shard, ids) SELECT 1, array_agg(id) FROM written;",
    ),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to write: a script for pgbench, by so many clients, and the share of the throughput that should be kept."""

    what: str
    script: str
    clients: int
    goal: float | None = None


@dataclass(slots=True)
class Found:
    """What was measured of one table by round: statements per second, and microseconds of processor time of each."""

    rates: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{rates(self.rates, '/s')}, {Spread.of(self.costs).middle:.0f} us"


def run(options: Options) -> list[Figure]:
    """Throughput with a tube to that without, and to that with pg-tube, for each kind of write."""
    with system() as ours:
        ours.sql("CREATE SCHEMA shard_0001")
        with ours.daemon():  # it installs the tubes
            ours.sql(f"SELECT tube.tube_ensure_exists('bench', {PARTITIONS})")
        tables = ["plain", "attached", *LIMITS, *(["peer"] if _install_pg_tube(ours) else [])]
        for table in tables:
            ours.sql(
                f"CREATE TABLE shard_0001.{table} (id bigserial PRIMARY KEY, body text NOT NULL, n int DEFAULT 0) "
                "WITH (fillfactor = 80)",
                f"INSERT INTO shard_0001.{table} (body) SELECT md5(g::text) FROM generate_series(1, {ROWS}) AS g",
            )
        ours.sql("SELECT tube.tube_table_ensure_attached('bench', 'shard_0001.attached')")
        _make_limits(ours)
        if "peer" in tables:
            ours.sql("SET search_path = peer; SELECT tube_table_ensure_attached('bench', 'shard_0001.peer', 1)")
        found: list[Figure] = []
        if options.picks("own"):
            found += [figure for kind in _kinds(ours) for figure in _figures(options, ours, kind, tables)]
        if options.picks("builtin"):
            found += _builtin(options, ours)
        return found


def _builtin(options: Options, ours: System) -> list[Figure]:
    """Two of the scripts that pgbench brings, in two databases: with a tube on its table of accounts, and without."""
    pgbench, databases = str(find_programs() / "pgbench"), {}
    for name in ("without", "attached"):
        ours.sql(f"CREATE DATABASE {name}")
        databases[name] = replace(ours, url=ours.url.replace("/postgres?", f"/{name}?", 1))
        command = [pgbench, "-i", "-q", "-s", str(SCALE), databases[name].url]
        subprocess.run(command, capture_output=True, check=True)
    databases["attached"].install()
    databases["attached"].sql(
        f"SELECT tube.tube_ensure_exists('bench', {PARTITIONS})",
        "SELECT tube.tube_table_ensure_attached('bench', 'pgbench_accounts')",
    )
    figures = []
    seconds = max(1, round(SECONDS * min(1, options.scale)))
    for script in ("simple-update", "tpcb-like"):
        found: dict[str, list[float]] = {name: [] for name in databases}
        for _ in range(options.runs):
            for name, database in databases.items():
                command = [pgbench, "-b", script, "-c", "4", "-j", "2", "-T", str(seconds), database.url]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[name].append(float(done.stdout.rpartition("tps = ")[2].split()[0]))
            databases["attached"].sql("TRUNCATE tube.bench")
        ratio = Spread.of_ratios(found["attached"], found["without"])
        beside = f"without a tube {rates(found['without'], '/s')}"
        figures.append(Figure(f"pgbench's {script}, 4 clients", rates(found["attached"], "/s"), beside, ratio))
    return figures


def _make_limits(ours: System) -> None:
    """Make the triggers of LIMITS, and the table `pods` of one of them."""
    ours.sql("CREATE TABLE pods (seq bigserial, shard integer, ids bigint[])")
    for table, (_, does) in LIMITS.items():
        ours.sql(
            f"CREATE FUNCTION {table}() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN {does} RETURN NULL; END'",
            *(
                f"CREATE TRIGGER on_{event} AFTER {event} ON shard_0001.{table} "
                f"REFERENCING NEW TABLE AS written FOR EACH STATEMENT EXECUTE FUNCTION {table}()"
                for event in ("INSERT", "UPDATE")
            ),
        )


def _install_pg_tube(ours: System) -> bool:
    """Install the peer from its own files into a schema of its own; False if they are not here."""
    file = Path(os.environ.get("PG_TUBE", ""), "sql", "pg-tube-up.sql")
    if not file.is_file():
        print(
            "pg-tube is not here and not compared with: git clone https://github.com/clickup/pg-tube, and set PG_TUBE "
            "to the folder",
            file=sys.stderr,
        )
        return False
    ours.sql("CREATE SCHEMA peer")
    steps = [
        "-c",
        "SET search_path = peer",
        "-f",
        str(file),
        "-c",
        f"SELECT tube_ensure_exists('bench', {PARTITIONS})",
    ]
    done = subprocess.run(ours.psql(*steps), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pg-tube could not be installed: {done.stderr.strip()}")
    return True


def _kinds(ours: System) -> list[Kind]:
    """What is done. Each client of the second kind has rows of its own."""
    file = ours.folder / "rows.tsv"
    file.write_text("".join(f"{number:032x}\n" for number in range(COPIED)), encoding="ascii")
    ours.folder.chmod(0o755)  # the server, under an account of its own, reads the file
    return [
        Kind(
            "single-row UPDATE",
            f"\\set id random(1, {ROWS})\nUPDATE shard_0001.{{table}} SET n = n + 1 WHERE id = :id;\n",
            4,
            0.85,
        ),
        Kind(
            "UPDATE of 1,000 rows",
            "\\set id :client_id * 25000 + random(0, 23) * 1000\n"
            "UPDATE shard_0001.{table} SET n = n + 1 WHERE id > :id AND id <= :id + 1000;\n",
            4,
            0.90,
        ),
        Kind("single-row INSERT", "INSERT INTO shard_0001.{table} (body) VALUES ('0123456789abcdef');\n", 4),
        Kind(f"COPY of {COPIED:,} rows", f"COPY shard_0001.{{table}} (body) FROM '{file}';\n", 1, 0.85),
    ]


def _figures(options: Options, ours: System, kind: Kind, tables: list[str]) -> list[Figure]:
    found = {table: Found() for table in tables}
    seconds = max(1.0, SECONDS * min(1, options.scale))
    for number in range(options.runs):
        for table in tables[number % len(tables) :] + tables[: number % len(tables)]:
            before = ours.cpu_of_ended()
            rate = ours.transactions_per_second(kind.script.format(table=table), seconds, clients=kind.clients)
            found[table].rates.append(rate)
            found[table].costs.append((ours.cpu_of_ended() - before) / (rate * max(1, round(seconds))) * 1e6)
        ours.sql(
            "TRUNCATE tube.bench, pods", *(f"DELETE FROM shard_0001.{table} WHERE id > {ROWS}" for table in tables)
        )
        if "peer" in tables:
            ours.sql("TRUNCATE peer.bench")
        ours.sql(*(f"VACUUM shard_0001.{table}" for table in tables), "CHECKPOINT")
    plain, attached = found["plain"], found["attached"]
    figures = [
        Figure(
            f"{kind.what}, {kind.clients} client{'s' if kind.clients > 1 else ''}",
            str(attached),
            f"without a tube {plain}",
            Spread.of_ratios(attached.rates, plain.rates),
            at_least=kind.goal,
        )
    ]
    for table, (what, _) in LIMITS.items():
        limit = found[table]
        kept = Spread.of_ratios(limit.rates, plain.rates).middle
        figures.append(
            Figure(
                f"  to {what}",
                "",
                f"{limit}, which keeps {kept:.2f}",
                Spread.of_ratios(attached.rates, limit.rates),
            )
        )
    if "peer" in tables:
        peer = found["peer"]
        kept = Spread.of_ratios(peer.rates, plain.rates).middle
        figures.append(
            Figure(
                "  to pg-tube's trigger",
                "",
                f"pg-tube {peer}, which keeps {kept:.2f}",
                Spread.of_ratios(attached.rates, peer.rates),
                at_least=1.0,
            )
        )
    return figures
