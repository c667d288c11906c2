-- What the daemon and the commands read of tubes.

-- name: tube_load
-- The tubes, and the fault of each (NULL: none). `denied`: the right on its table that a daemon needs and this role lacks;
-- `looks`: this role could not serve tubes in any case. $1 text: the schema's name. Reads tube_registry and catalogs only, so
-- that a tube whose table is locked, broken or missing does not hide the others.
SELECT
    r.tube AS name,
    r.partitions,
    c.oid::bigint AS table_oid,
    s.oid::bigint AS sequence_oid,
    (extract(epoch FROM r.created_at) * 1000000)::bigint AS made,
    r.keys,
    CASE WHEN r.paused_at IS NOT NULL THEN format('paused since %s UTC%s',
        to_char(r.paused_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS'), ': ' || r.paused_why) END AS paused,
    extract(epoch FROM r.paused_at)::float8 AS paused_at,
    CASE
        WHEN c.oid IS NULL THEN format(
            'its table %1$I.%2$I is missing: it was dropped, renamed or moved. Restore it, or create an empty one: '
            'replicad tubes create %2$s --partitions %3$s', $1::text, r.tube, r.partitions)
        WHEN s.oid IS NULL THEN format('sequence %I.tube_seq, which numbers the pods, is missing: restore it', $1::text)
        WHEN c.relkind <> 'r' OR (
            SELECT count(*) FROM pg_attribute AS a
            WHERE a.attrelid = c.oid AND a.attname IN ('seq', 'op', 'shard', 'ids', 'payload', 'ts') AND NOT a.attisdropped
        ) < 6 THEN format(
            '%1$I.%2$I is not the table that replicad made: it needs the columns seq, op, shard, ids, payload and ts. '
            'Restore the old one, or drop this one and create it again: replicad tubes create %2$s --partitions %3$s',
            $1::text, r.tube, r.partitions)
    END AS fault,
    CASE WHEN NOT (has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'DELETE')) THEN format(
        'this user may not read and delete pods in its table: GRANT SELECT, INSERT, UPDATE, DELETE ON %I.%I TO %I',
        $1::text, r.tube, current_user) END AS denied,
    NOT has_table_privilege('{schema}.tube_lease', 'UPDATE') AS looks
FROM {schema}.tube_registry AS r
LEFT JOIN pg_namespace AS n ON n.nspname = $1::text
LEFT JOIN pg_class AS c ON c.relname = r.tube AND c.relnamespace = n.oid
LEFT JOIN pg_class AS s ON s.relname = 'tube_seq' AND s.relnamespace = n.oid AND s.relkind = 'S'
ORDER BY r.tube

-- name: tube_parked_counts
-- The tubes with parked pods, and their numbers; 10,000 are counted of all tubes.
SELECT p.tube, count(*)::integer AS parked FROM (SELECT x.tube FROM {schema}.tube_parked AS x LIMIT 10000) AS p GROUP BY p.tube

-- name: tube_history
-- The present generation, which begins here if history has forked; the number of the last note; and the last numbers of the
-- sequences, to notice that the database was set back. $1 boolean: this is the first look of the daemon. missed: tubes may have missed changes.
SELECT g.number, g.id, g.reason, EXISTS (SELECT FROM {schema}.tube_missed AS m WHERE m.healed_at IS NULL) AS missed,
    coalesce((SELECT n.number FROM {schema}.tube_noted AS n), 0) AS note,
    coalesce(pg_sequence_last_value('{schema}.tube_seq'), 0) AS last_seq,
    coalesce(pg_sequence_last_value('{schema}.tube_term_seq'), 0) AS last_term
FROM {schema}.tube_continue($1) AS g

-- name: tube_top
-- One row per tube and partition: waiting pods, their lag, the lease (its holder, its partitions as daemons name them in
-- their troubles, its beat and time to live), the progress of backfills, parked
-- ids. moved_in and moved_out count the pods of the whole tube since its table was made. writer is the transaction that
-- has been writing pods for the longest: later pods wait until it ends. report is the last report of any reader of the
-- tube, such as a pipeline. What concerns a whole tube is read once for it, not for each partition.
WITH leases AS (
    SELECT DISTINCT ON (r.tube, p.partition) r.tube, p.partition, split_part(l.holder, ' ', 1) AS holder,
        format('lease %s/%s', l.partition, l.partitions) AS lease, l.beat, extract(epoch FROM l.ttl)::float8 AS ttl
    FROM {schema}.tube_lease l
    JOIN {schema}.tube_registry r ON r.tube = l.tube AND r.partitions % l.partitions = 0
    CROSS JOIN LATERAL generate_series(l.partition, r.partitions - 1, l.partitions) AS p (partition)
    ORDER BY r.tube, p.partition, l.beat DESC
), backfills AS (
    SELECT r.tube, b.shard % r.partitions AS partition, sum(b.ids)::bigint AS done, sum(b.approx_ids)::bigint AS total
    FROM {schema}.tube_backfill b JOIN {schema}.tube_registry r USING (tube) WHERE NOT b.finished GROUP BY 1, 2
), parked AS (
    SELECT r.tube, p.shard % r.partitions AS partition, count(*) AS pods
    FROM (SELECT x.tube, x.shard FROM {schema}.tube_parked x LIMIT 100000) AS p JOIN {schema}.tube_registry r USING (tube)
    GROUP BY 1, 2
), tubes AS MATERIALIZED (
    SELECT r.tube, to_regclass(format('{schema}.%I', r.tube)) AS relid FROM {schema}.tube_registry r
), writers AS (
    SELECT DISTINCT ON (u.tube) u.tube,
        CASE WHEN a.pid IS NOT NULL THEN format('pid %s (%s)', a.pid, a.application_name)
            ELSE format('prepared transaction %L', x.gid) END AS writer,
        extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, x.prepared))::float8 AS writer_s
    FROM pg_locks l
    JOIN tubes u ON u.relid = l.relation
    LEFT JOIN pg_stat_activity a ON a.pid = l.pid
    LEFT JOIN pg_locks own ON l.pid IS NULL AND own.virtualtransaction = l.virtualtransaction AND own.locktype = 'transactionid'
    LEFT JOIN pg_prepared_xacts x ON x.transaction = own.transactionid
    WHERE l.locktype = 'relation' AND l.granted AND l.mode = 'RowExclusiveLock'
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    ORDER BY u.tube, writer_s DESC NULLS LAST
), reports AS (
    SELECT DISTINCT ON (x.tube) x.* FROM {schema}.tube_report x ORDER BY x.tube, x.reported_at DESC
)
SELECT s.tube, s.partition, s.inc_count AS pods, s.inc_ids AS ids, s.backfill_count AS backfill_pods, s.estimated,
    greatest(extract(epoch FROM clock_timestamp() - s.inc_min_ts), 0)::float8 AS lag_s,
    greatest(extract(epoch FROM clock_timestamp() - s.backfill_min_ts), 0)::float8 AS backfill_lag_s,
    h.holder, h.lease, h.beat, h.ttl, b.done AS backfill_done, b.total AS backfill_of, coalesce(k.pods, 0) AS parked,
    t.n_tup_ins AS moved_in, t.n_tup_del AS moved_out, w.writer, w.writer_s,
    p.reporter, p.counts::text AS report, extract(epoch FROM clock_timestamp() - p.reported_at)::float8 AS report_s
FROM {schema}.tube_stats() s
JOIN tubes u USING (tube)
LEFT JOIN leases h USING (tube, partition)
LEFT JOIN backfills b USING (tube, partition)
LEFT JOIN parked k USING (tube, partition)
LEFT JOIN pg_stat_user_tables t ON t.relid = u.relid
LEFT JOIN writers w USING (tube)
LEFT JOIN reports p USING (tube)
ORDER BY s.tube, s.partition

-- name: tube_figures
-- How many pods wait in the tubes named in $1, by partition and kind, and the age of the oldest in seconds. For tubes with
-- many pods: in a large table they are estimated from a sample. Only the figures of `serve --http` use it.
SELECT r.tube AS name, f.partition, f.backfill, f.pods, extract(epoch FROM clock_timestamp() - f.min_ts)::float8 AS age_s
FROM {schema}.tube_registry AS r
CROSS JOIN LATERAL {schema}.tube_figures(r, 10000) AS f
WHERE r.tube = ANY ($1::text[])

-- name: tube_figures_parked
-- How many parked pods each partition of each tube has; counted up to 100,000 in all. For the figures of `serve --http`.
SELECT p.tube AS name, p.shard % r.partitions AS partition, count(*) AS pods
FROM (SELECT x.tube, x.shard FROM {schema}.tube_parked AS x LIMIT 100000) AS p
JOIN {schema}.tube_registry AS r USING (tube)
GROUP BY 1, 2

-- name: tube_figures_tables
-- The attached tables of each tube by name, at most $1 of a tube, partitions left out. For the console.
SELECT a.tube, array_agg(a.name ORDER BY a.name) AS tables
FROM (
    SELECT x.tube, format('%I.%I', n.nspname, c.relname) AS name,
        row_number() OVER (PARTITION BY x.tube ORDER BY n.nspname, c.relname) AS number
    FROM {schema}.tube_attachment AS x
    JOIN pg_class AS c ON c.oid = x.tbl
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE x.tbl = x.root
) AS a
WHERE a.number <= $1::integer
GROUP BY 1

-- name: tube_blockers
-- The transactions that keep the backend with pid $1 from a lock, at most three, each as a text.
SELECT coalesce(
    (SELECT format('pid %s (%s, user %s, %s, since %s s): %s', a.pid, coalesce(nullif(a.application_name, ''), 'no name'),
        a.usename, a.state, extract(epoch FROM clock_timestamp() - a.xact_start)::integer,
        left(regexp_replace(
            CASE WHEN getdatabaseencoding() <> 'SQL_ASCII' THEN a.query ELSE regexp_replace(a.query, '[^\x01-\x7f]', '?', 'g') END,
            '\s+', ' ', 'g'), 80))
     FROM pg_stat_activity AS a WHERE a.pid = b.pid),
    'a prepared transaction (SELECT * FROM pg_prepared_xacts)') AS blocker
FROM unnest(pg_blocking_pids($1::integer)) AS b (pid)
LIMIT 3

-- name: tube_without_index
-- Which of the tables $1 (text[]) with more than 100,000 rows have no valid index that begins with the column $2 (text[], one
-- for each table): a backfill in this order reads and sorts the whole table for each 100,000 ids. rows is an estimate,
-- from the planner's statistics or, without any, from the size of the table. partitioned: CREATE INDEX CONCURRENTLY is
-- not possible.
SELECT g.tbl AS "table", g.col AS "column", sized.rows, c.relkind = 'p' AS partitioned
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS g (tbl, col, n)
JOIN pg_class AS c ON c.oid = to_regclass(g.tbl)
CROSS JOIN LATERAL (
    SELECT sum(CASE WHEN m.reltuples < 0 THEN pg_relation_size(m.oid) / 100 ELSE m.reltuples END)::bigint AS rows
    FROM {schema}.tube_members(c.oid) AS o JOIN pg_class AS m ON m.oid = o
    WHERE m.relkind <> 'p'
) AS sized
WHERE sized.rows > 100000 AND NOT EXISTS (
    SELECT FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = c.oid AND i.indisvalid AND i.indpred IS NULL AND a.attname = g.col)
ORDER BY g.n

-- name: tube_backfill_states
-- The backfills that are scheduled or running; the names of tables are as those of tube_list.
SELECT b.tube, coalesce(to_regclass(b.tbl)::text, b.tbl) AS tbl, b.order_col, b.state, b.ids, b.approx_ids
FROM {schema}.tube_backfills() AS b

-- name: tables_of_shards
-- The tables called $1 in schemas whose names end in a number, by that number, without partitions. For
-- `replicad tubes ... --shard`.
SELECT format('%I.%I', n.nspname, c.relname) AS tbl, n.nspname AS schema
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relname = $1
  AND c.relkind IN ('r', 'p')
  AND NOT c.relispartition
  AND n.nspname ~ '[0-9]$'
  AND n.nspname !~ '^pg_'
ORDER BY substring(n.nspname FROM '[0-9]+$')::numeric, n.nspname

-- name: tube_pattern
-- The tables that a pattern such as public.film* names: ordinary and partitioned tables, without partitions, tables of extensions
-- and the tables of replicad. $1 text, $2 text: patterns of LIKE for the schema and the name; $3 name[]: the schemas of replicad.
SELECT format('%I.%I', n.nspname, c.relname) AS tbl, n.nspname || '.' || c.relname AS plain,
    {schema}.tube_key_default(c.oid, NULL) IS NOT NULL AS has_key,
    NOT coalesce({schema}.tube_key_kind({schema}.tube_key_types(c.oid, {schema}.tube_key_default(c.oid, NULL))) = 'bigint', false) AS needs_text
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't' AND NOT c.relispartition
    AND n.nspname LIKE $1::text AND c.relname LIKE $2::text
    AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' AND n.nspname <> ALL ($3::name[])
    AND NOT EXISTS (SELECT FROM pg_depend AS d
        WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e')
ORDER BY n.nspname, c.relname

-- name: tube_desired
-- For `replicad plan`: the tubes and their tables, named by schema and table. own_keys: the kind of keys, if it is not the
-- kind that the tables need; key: the key of the table, if it is not the default.
SELECT t.tube, t.partitions, t.predicate, r.on_fork,
    nullif(t.keys, max(CASE WHEN t.key IS NULL THEN 'bigint'
        ELSE {schema}.tube_key_kind({schema}.tube_key_types(t.tbl, t.key)) END) OVER (PARTITION BY t.tube)) AS own_keys,
    CASE WHEN c.oid IS NOT NULL THEN format('%I.%I', n.nspname, c.relname) END AS tbl,
    t.shard, t.table_predicate, t.routing,
    CASE WHEN t.key IS DISTINCT FROM {schema}.tube_key_default(t.tbl, NULL) THEN t.key END AS key
FROM {schema}.tube_list() AS t
JOIN {schema}.tube_registry AS r ON r.tube = t.tube
LEFT JOIN pg_class AS c ON c.oid = t.tbl
LEFT JOIN pg_namespace AS n ON n.oid = c.relnamespace

-- name: tube_relation
-- For `replicad plan`: the name of the relation $1 as SQL wants it, and its schema.
SELECT format('%I.%I', n.nspname, c.relname) AS name, n.nspname::text AS schema
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = $1::bigint::oid
