"""A row that is not found counts as deleted only where the session is proven to see every row, as of its pod or later.

Each test is a situation in which a look-up finds no row, or an old one, although the row exists.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from helpers import PODS, make_pods

from replicad.errors import DatabaseRefused, RowsUnproven, UsageError
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.postgres.programs import find_programs
from replicad.spark.database import connection, forget
from replicad.spark.enrich import EnrichedRows, Enricher
from replicad.spark.pipeline import make_enricher
from replicad.spark.pipeline_config import PipelineConfig
from replicad.spark.sinks.parquet import ParquetSink
from replicad.spark.tables import Known, TableRule, WantedColumns, find_layout
from replicad.spark.touches import TOUCH_SCHEMA, deduplicate
from tests.conftest import PATIENCE, install, psql
from tests.poolers import pgbouncer

DOCS = (
    "CREATE TABLE docs (id bigint PRIMARY KEY, body text); INSERT INTO docs SELECT n, 'b' FROM generate_series(1, 9) n"
)
READER = "proof_reader"


@pytest.fixture
def url(database_url: str) -> Iterator[str]:
    psql(database_url, DOCS)
    make_pods(database_url, 9)
    yield database_url
    forget(database_url)


@pytest.fixture
def reader(url: str) -> Iterator[str]:
    """A role that may read `docs` and the pods."""
    psql(url, f"DROP ROLE IF EXISTS {READER}", f"CREATE ROLE {READER} LOGIN")
    psql(url, f"GRANT USAGE ON SCHEMA tube, public TO {READER}; GRANT SELECT ON docs, {PODS} TO {READER}")
    role = url.replace("postgres@", f"{READER}@", 1)
    assert role != url
    yield role
    forget(role)
    psql(url, f"DROP OWNED BY {READER} CASCADE", f"DROP ROLE {READER}")


def enricher(url: str, table: str = "public.docs") -> Enricher:
    return Enricher(url, find_layout(url, [TableRule(table)], WantedColumns("id")), PODS, patience=1)


def look_up(made: Enricher, *ids: int, seq: int = 1) -> EnrichedRows:
    touched = [{"shard": 1, "id": one, "seq": seq} for one in ids]
    (change,) = made.changes(deduplicate(pa.Table.from_pylist(touched, TOUCH_SCHEMA)))
    return change


def test_a_delete_that_the_pod_proves_is_one(url: str) -> None:
    psql(url, "DELETE FROM docs WHERE id = 3")
    found = look_up(enricher(url), 2, 3)
    assert (found.writes.column("id").to_pylist(), found.deletes.column("id").to_pylist()) == ([2], [3])
    psql(url, "DELETE FROM docs")
    assert look_up(enricher(url), 2, 3).deletes.num_rows == 2


@pytest.mark.parametrize("id_", [1, 77])
def test_a_database_that_does_not_see_the_pod_proves_nothing(url: str, id_: int) -> None:
    """Of another primary, a logical replica or a restored copy: the row may be missing there, or be old."""
    made = enricher(url)
    with pytest.raises(
        RowsUnproven, match=r"sees 0 of 1 pods \(10 to 10\) in tube.t, so .* no row was deleted or written"
    ):
        look_up(made, id_, seq=10)
    psql(url, f"INSERT INTO {PODS} (seq, op, shard, ids) VALUES (10, 'T', 1, '{{}}')")
    look_up(made, id_, seq=10)


def test_a_snapshot_that_is_older_than_the_pod_proves_nothing(url: str) -> None:
    """As of a pooler that keeps a transaction open, or a database with a default of repeatable read."""
    made = enricher(url)
    driver = connection(url)
    with driver.cursor() as cursor:
        cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT count(*) FROM docs")
        cursor.fetchall()
    psql(
        url,
        f"INSERT INTO docs VALUES (50, 'new'); INSERT INTO {PODS} (seq, op, shard, ids) VALUES (50, 'I', 1, '{{50}}')",
    )
    with pytest.raises(RowsUnproven, match="sees 0 of 1 pods"):
        look_up(made, 50, seq=50)
    forget(url)
    assert look_up(made, 50, seq=50).writes.column("body").to_pylist() == ["new"]


def test_rows_that_row_security_hides_are_not_deleted(url: str, reader: str) -> None:
    made = enricher(reader)
    assert look_up(made, 1).writes.num_rows == 1
    psql(url, "ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY nobody ON docs USING (false)")
    with pytest.raises(DatabaseRefused, match="row-level security policy for table"):
        look_up(made, 1)


@pytest.mark.parametrize("invoker", [False, True])
def test_rows_that_row_security_hides_below_a_view_are_not_deleted(url: str, reader: str, invoker: bool) -> None:
    psql(
        url,
        "ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY nobody ON docs USING (false)",
        f"CREATE VIEW seen WITH (security_invoker = {invoker}) AS SELECT * FROM docs; GRANT SELECT ON seen TO {READER}",
        *([] if invoker else [f"GRANT {READER} TO CURRENT_USER; ALTER VIEW seen OWNER TO {READER}"]),
    )
    with pytest.raises(DatabaseRefused, match="row-level security policy for table"):
        look_up(enricher(reader, "public.seen"), 1)


def test_a_session_that_does_not_keep_its_settings_proves_nothing(url: str, reader: str) -> None:
    made = enricher(reader)
    psql(url, "ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY nobody ON docs USING (false)")
    with connection(reader).cursor() as cursor:
        cursor.execute("SET row_security = on")
    with pytest.raises(RowsUnproven, match=r"row_security is not `off` in this session, .* pooler"):
        look_up(made, 1)


def test_a_pooler_that_changes_servers_between_transactions_is_refused(url: str) -> None:
    with pgbouncer(url, "transaction") as pooled:
        made = replace(enricher(url), url=pooled)
        assert look_up(made, 1).writes.num_rows == 1
        with connection(pooled).cursor() as cursor:  # what another client of the pooler leaves behind
            cursor.execute("RESET ALL")
        with pytest.raises(RowsUnproven, match="row_security is not `off`"):
            look_up(made, 1)
        forget(pooled)


def test_a_standby_is_refused(postgres_folder: Path, tmp_path: Path) -> None:
    """It may lag by any time. It sees the pod and the row here, and could be behind at the next look-up."""
    copy = postgres_folder / "standby"
    copy.mkdir()
    with EmbeddedPostgres(postgres_folder / "primary") as server:
        install(server.url, "tube")
        psql(server.url, DOCS)
        make_pods(server.url, 9)
        backup = [find_programs() / "pg_basebackup", "-D", copy / "data", "-d", server.url, "-R", "-c", "fast"]
        subprocess.run(backup, check=True, timeout=PATIENCE)
        for lock in (copy / "data").glob(".s.PGSQL*"):
            lock.unlink()
        if os.getuid() == 0:
            owner = (postgres_folder / "primary" / "data").stat()
            for path in [copy, *copy.rglob("*")]:
                os.chown(path, owner.st_uid, owner.st_gid)
        made = enricher(server.url)
        assert look_up(made, 1).writes.num_rows == 1
        with EmbeddedPostgres(copy) as behind:
            with pytest.raises(RowsUnproven, match="is a standby, which may lag behind the tube"):
                look_up(replace(made, url=behind.url), 1)
            with pytest.raises(RowsUnproven, match="is a standby"):
                make_enricher(config(behind.url, tmp_path))
            forget(behind.url)
        forget(server.url)


def config(url: str, folder: Path, table: str = "docs", tube: str = "t") -> PipelineConfig:
    return PipelineConfig(tube, url, table, ParquetSink(folder / "out"), folder / "checkpoint")


def test_a_role_that_may_not_read_the_pods_is_told_the_grant_before_spark_starts(
    url: str, reader: str, tmp_path: Path
) -> None:
    make_enricher(config(reader, tmp_path))
    psql(url, f"REVOKE SELECT ON {PODS} FROM {READER}")
    with pytest.raises(UsageError, match=r"may not read the pods.*GRANT SELECT ON .*GRANT USAGE on its"):
        make_enricher(config(reader, tmp_path))
    with pytest.raises(UsageError, match=r'has no tube "tube"."other", so a row that is missing there may not'):
        make_enricher(config(url, tmp_path, tube="other"))


def test_a_purge_of_a_shard_without_a_table_needs_the_proof_too(url: str) -> None:
    made = enricher(url)
    psql(url, "DROP TABLE docs")
    purging = Enricher(url, made.layout, PODS, purged=frozenset({1}))
    assert look_up(purging, 1).deletes.num_rows == 1
    with pytest.raises(RowsUnproven, match="sees 0 of 1 pods"):
        look_up(purging, 1, seq=99)


@pytest.mark.parametrize(
    ("made", "table", "says"),
    [
        ("CREATE MATERIALIZED VIEW kept AS SELECT * FROM docs", "kept", "table public.kept is a materialized view"),
        (
            "CREATE MATERIALIZED VIEW kept AS SELECT * FROM docs; CREATE VIEW over AS SELECT * FROM kept",
            "over",
            "reads kept, which is a materialized view, whose rows are of its last REFRESH",
        ),
        (
            "CREATE EXTENSION postgres_fdw; CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw;"
            "CREATE TABLE parts (id bigint, body text) PARTITION BY RANGE (id);"
            "CREATE FOREIGN TABLE far_part PARTITION OF parts FOR VALUES FROM (1) TO (9) SERVER far",
            "parts",
            "reads far_part, which is a foreign table",
        ),
    ],
)
def test_a_table_whose_rows_are_of_another_time_or_server_is_refused(
    url: str, made: str, table: str, says: str
) -> None:
    psql(url, made)
    with pytest.raises(UsageError, match=f"{says}.* may not have been deleted"):
        enricher(url, f"public.{table}")


def test_a_name_without_a_schema_stays_the_table_of_the_first_start(url: str) -> None:
    """By another search_path, a lost right to a schema or a temporary table the name would be another table's."""
    first = find_layout(url, [TableRule("docs")], WantedColumns("id"))
    made = Enricher(url, first, PODS, patience=1)
    psql(url, "CREATE SCHEMA app; CREATE TABLE app.docs (id bigint PRIMARY KEY, body text)")
    with connection(url).cursor() as cursor:
        cursor.execute("SET search_path = app, public")
        cursor.execute("CREATE TEMPORARY TABLE docs (id bigint, body text)")
    assert look_up(made, 1).writes.num_rows == 1
    forget(url)
    psql(url, "DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = app, public', current_database()); END$$")
    known = Known(first.known.columns, first.known.whole, first.known.types, first.known.schemas)
    with pytest.raises(UsageError, match=r"table docs was public.docs when .* and is app.docs now"):
        find_layout(url, [TableRule("docs")], WantedColumns("id", known=known))
