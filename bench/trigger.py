"""What a tube on a table costs those who write to it: single rows, many rows in a statement, and COPY.

The same table twice, once attached to a tube, measured in turns. The goal is pg-tube's: its trigger took 21 % of the
throughput of single-row UPDATEs by 4 clients on this class of machine.
"""

from __future__ import annotations

from bench.report import Figure, Spread, rates
from bench.system import Options, System, system

ROWS = 100_000
SECONDS = 4.0  # for each measurement
COPIED = 20_000  # rows in a COPY
GOALS = {"single-row UPDATE": 1 - 0.21}


def run(options: Options) -> list[Figure]:
    """Throughput with a tube to that without, for each kind of write."""
    with system() as ours:
        ours.sql("CREATE SCHEMA shard_0001")
        with ours.daemon():  # it installs the tubes
            ours.sql("SELECT tube.tube_ensure_exists('bench', 4)")
        for table in ("plain", "attached"):
            ours.sql(
                f"CREATE TABLE shard_0001.{table} (id bigserial PRIMARY KEY, body text NOT NULL, n int DEFAULT 0) "
                "WITH (fillfactor = 80)",
                f"INSERT INTO shard_0001.{table} (body) SELECT md5(g::text) FROM generate_series(1, {ROWS}) AS g",
            )
        ours.sql("SELECT tube.tube_table_ensure_attached('bench', 'shard_0001.attached')")
        return [_figure(options, ours, *kind) for kind in _kinds(ours)]


def _kinds(ours: System) -> list[tuple[str, str, int]]:
    """What is done, as a script for pgbench, by how many clients. Each client of the second has rows of its own."""
    file = ours.folder / "rows.tsv"
    file.write_text("".join(f"{number:032x}\n" for number in range(COPIED)), encoding="ascii")
    ours.folder.chmod(0o755)  # the server, under an account of its own, reads the file
    return [
        (
            "single-row UPDATE",
            f"\\set id random(1, {ROWS})\nUPDATE shard_0001.{{table}} SET n = n + 1 WHERE id = :id;\n",
            4,
        ),
        (
            "UPDATE of 1,000 rows",
            "\\set id :client_id * 25000 + random(0, 23) * 1000\n"
            "UPDATE shard_0001.{table} SET n = n + 1 WHERE id > :id AND id <= :id + 1000;\n",
            4,
        ),
        ("single-row INSERT", "INSERT INTO shard_0001.{table} (body) VALUES ('0123456789abcdef');\n", 4),
        (f"COPY of {COPIED:,} rows", f"COPY shard_0001.{{table}} (body) FROM '{file}';\n", 1),
    ]


def _figure(options: Options, ours: System, what: str, script: str, clients: int) -> Figure:
    plain, attached = [], []
    seconds = max(1.0, SECONDS * min(1, options.scale))
    for _ in range(options.runs):
        for table, found in (("plain", plain), ("attached", attached)):
            found.append(ours.transactions_per_second(script.format(table=table), seconds, clients=clients))
        ours.sql(
            "TRUNCATE tube.bench",
            *(f"DELETE FROM shard_0001.{table} WHERE id > {ROWS}" for table in ("plain", "attached")),
        )
        ours.sql("VACUUM shard_0001.plain", "VACUUM shard_0001.attached", "CHECKPOINT")
    return Figure(
        f"{what}, {clients} client{'s' if clients > 1 else ''}",
        rates(attached, "/s"),
        f"without a tube {rates(plain, '/s')}",
        Spread.of_ratios(attached, plain),
        at_least=GOALS.get(what),
    )
