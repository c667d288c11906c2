"""What operators do to tables, sequences and settings every day, as SQL."""

from __future__ import annotations

from collections.abc import Sequence

from .tables import PART, Table

# Each is done to a table that is written to. Commands of one string are one transaction.
DDL: dict[str, tuple[str, ...]] = {
    "type": (
        "ALTER TABLE {t} ALTER part TYPE bigint USING part + 0",
        "ALTER TABLE {t} ALTER part TYPE int USING part + 0",
    ),
    "type of the body": ("ALTER TABLE {t} ALTER body TYPE varchar(50)", "ALTER TABLE {t} ALTER body TYPE text"),
    "type of the id": ("ALTER TABLE {t} ALTER id TYPE bigint USING id + 0",),
    "add": ("ALTER TABLE {t} ADD COLUMN IF NOT EXISTS a int DEFAULT 1",),
    "add volatile": ("ALTER TABLE {t} ADD COLUMN v float8 DEFAULT random()", "ALTER TABLE {t} DROP COLUMN v"),
    "drop": ("ALTER TABLE {t} ADD COLUMN d text", "ALTER TABLE {t} DROP COLUMN d"),
    "default": ("ALTER TABLE {t} ALTER part SET DEFAULT 7", "ALTER TABLE {t} ALTER part SET NOT NULL"),
    "rename a column": ("ALTER TABLE {t} RENAME part TO p; ALTER TABLE {t} RENAME p TO part",),
    "rename the table": ("ALTER TABLE {t} RENAME TO {t}_x; ALTER TABLE {t}_x RENAME TO {t}",),
    "schema": ("CREATE SCHEMA IF NOT EXISTS x; ALTER TABLE {t} SET SCHEMA x; ALTER TABLE x.{t} SET SCHEMA public",),
    "index": ("CREATE INDEX {t}_i ON {t} (part)", "DROP INDEX {t}_i"),
    "index concurrently": ("CREATE INDEX CONCURRENTLY {t}_c ON {t} (part)", "DROP INDEX CONCURRENTLY IF EXISTS {t}_c"),
    "reindex": ("REINDEX TABLE CONCURRENTLY {t}",),
    "primary key": (
        "CREATE UNIQUE INDEX {t}_k ON {t} (id)",
        "ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD CONSTRAINT {t}_pkey PRIMARY KEY USING INDEX {t}_k",
    ),
    "vacuum full": ("VACUUM FULL {t}",),
    "cluster": ("CLUSTER {t} USING {t}_pkey",),
    "unlogged": (
        "ALTER TABLE {t} SET UNLOGGED; ALTER TABLE {t} SET LOGGED; SELECT setval('{s}', nextval('{s}'));"
        "SELECT replicad.stream_sequence_changed('{t}', 'same')",
    ),
    "check": (
        "ALTER TABLE {t} ADD CONSTRAINT c CHECK (id > 0) NOT VALID",
        "ALTER TABLE {t} VALIDATE CONSTRAINT c",
        "ALTER TABLE {t} DROP CONSTRAINT c",
    ),
    "trigger": (
        "CREATE FUNCTION {t}_f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN new; END $$;"
        "CREATE TRIGGER z BEFORE INSERT ON {t} FOR EACH ROW EXECUTE FUNCTION {t}_f()",
        "ALTER TABLE {t} DISABLE TRIGGER z; ALTER TABLE {t} ENABLE TRIGGER z",
        "DROP FUNCTION {t}_f() CASCADE",
    ),
    "storage": ("ALTER TABLE {t} SET (fillfactor = 70), REPLICA IDENTITY FULL, ALTER part SET STATISTICS 50",),
    "the same rows, removed and inserted": (
        "LOCK {t} IN ACCESS EXCLUSIVE MODE; CREATE TEMP TABLE s AS TABLE {t}; TRUNCATE {t}; INSERT INTO {t} TABLE s;"
        "DROP TABLE s",
    ),
}

# Changes after which the sequence gives out the next ids as before.
SEQUENCES: dict[str, str] = {
    "AS bigint": "ALTER SEQUENCE {s} AS bigint",
    "MAXVALUE": "ALTER SEQUENCE {s} MAXVALUE 9000000000",
    "INCREMENT": "ALTER SEQUENCE {s} INCREMENT 1",
    "CACHE": "ALTER SEQUENCE {s} CACHE 1",
    "NO CYCLE": "ALTER SEQUENCE {s} NO CYCLE",
    "renamed": "ALTER SEQUENCE {s} RENAME TO {s}_x; ALTER SEQUENCE {s}_x RENAME TO {s}",
    "higher": "SELECT setval('{s}', nextval('{s}') + 20)",
}

# Of the database; those of readers begin with the next session.
SETTINGS: dict[str, tuple[str, ...]] = {
    "extra_float_digits": ("-5", "0", "3"),
    "IntervalStyle": ("iso_8601", "sql_standard", "postgres_verbose"),
    "bytea_output": ("escape",),
    "DateStyle": ("SQL, DMY", "German"),
    "TimeZone": ("Asia/Tokyo",),
    "idle_session_timeout": ("200ms",),
    "idle_in_transaction_session_timeout": ("300ms",),
    "lock_timeout": ("50ms",),
    "statement_timeout": ("2s",),
    "default_transaction_isolation": ("serializable", "repeatable read"),
    "synchronous_commit": ("off",),
    "row_security": ("off",),
    "jit": ("on",),
    "client_min_messages": ("debug1",),
    "standard_conforming_strings": ("off",),
    "enable_seqscan": ("off",),
}

SECURITY = {
    "on": "ALTER TABLE {t} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY; CREATE POLICY p ON {t} USING (false)",
    "off": "DROP POLICY IF EXISTS p ON {t}; ALTER TABLE {t} DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY",
}

SWAP = (
    "CREATE TABLE {t}_new (LIKE {t} INCLUDING ALL)",
    "LOCK {t} IN ACCESS EXCLUSIVE MODE; INSERT INTO {t}_new TABLE {t}; ALTER TABLE {t} RENAME TO {t}_old;"
    "ALTER TABLE {t}_new RENAME TO {t}; ALTER SEQUENCE {s} OWNED BY {t}.id",
)
SWAP_DONE = (
    "SELECT replicad.stream_alter('{t}', '{t}', true)",
    "DROP TABLE {t}_old",
)

ROTATIONS = ("drop", "detach", "truncate", "delete", "replace")


PARTS = "SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = '{t}'::regclass"


def rotation(table: Table, last: int, parts: Sequence[str], how: str) -> tuple[str, ...]:
    """Partitions for the next ids, and the end of the oldest of the `parts`. `replace`: by a copy of it."""
    now = last // PART
    made = tuple(table.create_part(number) for number in range(now + 1, now + 4))
    numbers = sorted(int(number) for _, _, number in (part.rpartition("_") for part in parts) if number.isdecimal())
    if not numbers or numbers[0] >= now:
        return made
    old = f"{table.name}_{numbers[0]}"
    bounds = f"FOR VALUES FROM ({numbers[0] * PART}) TO ({(numbers[0] + 1) * PART})"
    return (
        *made,
        {
            "drop": f"DROP TABLE {old}",
            "detach": f"ALTER TABLE {table.name} DETACH PARTITION {old}; DROP TABLE {old}",
            "truncate": f"TRUNCATE {old}",
            "delete": f"DELETE FROM {old}",
            "replace": f"CREATE TABLE {old}_x (LIKE {old} INCLUDING ALL); LOCK {old} IN ACCESS EXCLUSIVE MODE;"
            f"INSERT INTO {old}_x TABLE {old}; ALTER TABLE {table.name} DETACH PARTITION {old}; DROP TABLE {old};"
            f"ALTER TABLE {old}_x RENAME TO {old}; ALTER TABLE {table.name} ATTACH PARTITION {old} {bounds}",
        }[how],
    )
