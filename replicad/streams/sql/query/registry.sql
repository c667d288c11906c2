-- What the daemon and the commands read of the registry of streams.

-- name: stream_viewer
-- The name of this role if it could not serve streams and may only look; else NULL.
SELECT CASE WHEN NOT has_table_privilege('{schema}.stream_daemon', 'UPDATE') THEN current_user::text END

-- name: stream_load
-- Registered streams, all of them or those that are named, with what serving them needs. Each of `readers` is what
-- stream_reader(stream_runs_as()) gives, once for all streams.
WITH home (schema) AS (
    SELECT c.relnamespace FROM pg_class c WHERE c.oid = (SELECT x.tableoid FROM {schema}.stream x LIMIT 1)
), missing (name) AS (
    SELECT format('%I.stream_reader_missing', n.nspname) FROM home JOIN pg_namespace n ON n.oid = home.schema
), readers (owner, name) AS MATERIALIZED (
    SELECT r.oid, coalesce((
        SELECT format('%I.%I', n.nspname, p.proname)
        FROM home JOIN pg_namespace n ON n.oid = home.schema JOIN pg_proc p ON p.pronamespace = n.oid
        WHERE p.proowner = r.oid AND p.proname ~ '^reader_1_[0-9a-f]{{32}}$' AND has_function_privilege(p.oid, 'EXECUTE')
        LIMIT 1), missing.name)
    FROM pg_roles r, missing
    WHERE NOT r.rolsuper AND r.rolname <> current_user AND r.oid IN (
        SELECT c.relowner FROM {schema}.stream s JOIN pg_class c ON c.oid IN (s.relation, s.sequence, s.positions))
)
SELECT s.number::integer AS number,
    s.name,
    CASE WHEN tc.oid IS NOT NULL THEN format('%I.%I', tn.nspname, tc.relname) END AS table,
    s.relation::oid::bigint AS table_oid,
    s.id_column::text AS id_column,
    s.instance_column::text AS instance_column,
    s.row_sql AS row,
    s.row_type,
    s.method,
    CASE WHEN qc.oid IS NOT NULL THEN format('%I.%I', qn.nspname, qc.relname) END AS sequence,
    s.sequence::oid::bigint AS sequence_oid,
    CASE WHEN pc.oid IS NOT NULL THEN format('%I.%I', pn.nspname, pc.relname) END AS positions_table,
    s.positions::oid::bigint AS positions_oid,
    (SELECT quote_ident(n.nspname) FROM home JOIN pg_namespace n ON n.oid = home.schema) AS home,
    s.relation_named,
    s.sequence_named,
    s.positions_named,
    s.fed,
    s.also_feeds <> '{{}}' AS shares_sequence,
    -- one row per id, by a unique index that covers all partitions; an index of a parent does not cover its heirs
    EXISTS (
        SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
        WHERE i.indrelid = s.relation AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indnkeyatts = 1
            AND a.attname = s.id_column
            AND (tc.relkind = 'p' OR NOT EXISTS (SELECT FROM pg_inherits h WHERE h.inhparent = s.relation))
    ) AS unique_ids,
    coalesce(tc.relkind = 'r' AND has_table_privilege(tc.oid, 'SELECT'), false) AS plain,
    tr.name AS reader,
    qr.name AS sequence_reader,
    pr.name AS positions_reader,
    coalesce(g.id, '') AS epoch,
    coalesce({schema}.stream_continues(s, g), false) AS continues,
    g.file::bigint AS sequence_file,
    (SELECT p.position FROM {schema}.stream_position p WHERE p.stream = s.number AND p.writer = 0) AS noted,
    {schema}.stream_fault(s) AS fault,
    nullif(concat_ws('. ', {schema}.stream_denied(s), CASE missing.name
        WHEN tr.name THEN {schema}.stream_reader_wanted(s.relation)
        WHEN qr.name THEN {schema}.stream_reader_wanted(s.sequence)
        WHEN pr.name THEN {schema}.stream_reader_wanted(s.positions) END), '') AS denied,
    -- where the proofs of reservations can be checked; NULL: this role may not, so every lock counts
    (SELECT format('%I.%I', kn.nspname, kc.relname)
        FROM home JOIN pg_namespace kn ON kn.oid = home.schema JOIN pg_class kc ON kc.relnamespace = kn.oid
        WHERE kc.relname = 'stream_reservation_key' AND has_table_privilege(kc.oid, 'SELECT')) AS proof_key,
    s.trimmed_upto,
    s.keep_for,
    s.keep_rows,
    s.max_row,
    ARRAY(SELECT k.id FROM {schema}.stream_skip k WHERE k.stream = s.number ORDER BY k.id)::bigint[] AS skipped,
    s.created_at,
    (SELECT format('%I.%I', n.nspname, k.relname) FROM {schema}.stream_changes x
        JOIN pg_class k ON k.oid = x.source JOIN pg_namespace n ON n.oid = k.relnamespace WHERE x.stream = s.number) AS source,
    {schema}.stream_changes_fault(s) AS unrecorded,
    (SELECT {schema}.stream_filter_columns(x)::text[] FROM {schema}.stream_changes x WHERE x.stream = s.number) AS filters,
    ARRAY(SELECT w.name FROM {schema}.stream_writer w WHERE w.stream = s.number AND w.retired_at IS NULL
        ORDER BY w.number) AS writer_names,
    ARRAY(SELECT w.number FROM {schema}.stream_writer w WHERE w.stream = s.number AND w.retired_at IS NULL
        ORDER BY w.number) AS writer_numbers
FROM {schema}.stream s
LEFT JOIN LATERAL {schema}.stream_generation_now(s) g ON true
LEFT JOIN pg_class tc ON tc.oid = s.relation
LEFT JOIN pg_namespace tn ON tn.oid = tc.relnamespace
LEFT JOIN pg_class qc ON qc.oid = s.sequence
LEFT JOIN pg_namespace qn ON qn.oid = qc.relnamespace
LEFT JOIN pg_class pc ON pc.oid = s.positions
LEFT JOIN pg_namespace pn ON pn.oid = pc.relnamespace
LEFT JOIN readers tr ON tr.owner = tc.relowner
LEFT JOIN readers qr ON qr.owner = qc.relowner
LEFT JOIN readers pr ON pr.owner = pc.relowner
CROSS JOIN missing
WHERE $1::text[] IS NULL OR s.name = ANY ($1)
ORDER BY s.name

-- name: stream_marks
-- The streams whose entry in the registry may have changed since it was loaded (store.py). A mark is a hash of the
-- versions (xmin, ctid) of the rows that describe a stream: another mark means that one of them was written.
-- $1 text[]: the streams that are known. $2 bigint[]: their marks of our own tables, of the server and of the memberships of roles. $3 bigint[]: their
-- marks of the catalogs (NULL: not known). $4 bigint[]: their noted positions. $5 text[]: those whose catalogs are looked at (NULL: all).
-- $6 bigint: the mark of all our tables together at the last look. While that is the same, only the streams of $5 are looked at.
-- `own` is NULL for a stream that was removed. One more row, without a name, has the present mark of our tables as `own`, and as `catalogs`
-- how many rows of the catalogs were written so far, by the statistics: a hint that comes seconds late.
WITH home AS MATERIALIZED (
    SELECT concat_ws(' ', {schema}.stream_incarnation(), (
        SELECT bit_xor(hashtextextended(concat_ws(' ', m.xmin, m.ctid), 0)) FROM pg_auth_members m
    )) AS incarnation
), part AS MATERIALIZED (
    SELECT w.stream, concat_ws(' ', 'w', w.xmin, w.ctid) AS version FROM {schema}.stream_writer w
    UNION ALL
    SELECT k.stream, concat_ws(' ', 'k', k.xmin, k.ctid) FROM {schema}.stream_skip k
), parts AS MATERIALIZED (
    SELECT part.stream, bit_xor(hashtextextended(part.version, 0)) AS version FROM part GROUP BY part.stream
), whole AS MATERIALIZED (
    SELECT bit_xor(hashtextextended(row.version, 0)) AS version
    FROM (
        SELECT home.incarnation AS version FROM home
        UNION ALL
        SELECT part.version FROM part
        UNION ALL
        SELECT concat_ws(' ', 's', s.xmin, s.ctid) FROM {schema}.stream s
        UNION ALL
        SELECT concat_ws(' ', 'p', p.xmin, p.ctid) FROM {schema}.stream_position p WHERE p.writer = 0
        UNION ALL
        SELECT concat_ws(' ', 'g', g.xmin, g.ctid) FROM {schema}.stream_generation g
    ) AS row
), marks AS (
    SELECT s.name, p.position AS noted,
        hashtextextended(concat_ws(' ', home.incarnation, s.xmin, s.ctid, parts.version, g.number), 0) AS own,
        CASE WHEN $5::text[] IS NULL OR s.name = ANY ($5) THEN (
            SELECT coalesce(hashtextextended(string_agg(version.text, ' '), 0), 0)
            FROM (
                SELECT concat_ws(' ', 'c', c.xmin, c.ctid, n.xmin, n.ctid) AS text
                FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE c.oid IN (s.relation, s.sequence, s.positions)
                UNION ALL
                SELECT concat_ws(' ', 'q', q.xmin, q.ctid) FROM pg_sequence q WHERE q.seqrelid = s.sequence
                UNION ALL
                SELECT concat_ws(' ', 'a', a.xmin, a.ctid) FROM pg_attribute a
                WHERE a.attrelid = s.relation AND a.attname IN (s.id_column, s.instance_column)
                UNION ALL
                SELECT concat_ws(' ', 'i', i.xmin, i.ctid) FROM pg_index i WHERE i.indrelid = s.relation
                UNION ALL
                SELECT concat_ws(' ', 'h', h.xmin, h.ctid) FROM pg_inherits h WHERE h.inhparent = s.relation
                UNION ALL
                SELECT concat_ws(' ', 'b', {schema}.stream_bearer(s.relation_named)::oid,
                    {schema}.stream_bearer(s.sequence_named)::oid, {schema}.stream_bearer(s.positions_named)::oid)
                UNION ALL
                SELECT concat_ws(' ', 'd', d.objid) FROM pg_depend d
                WHERE d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = s.sequence
                UNION ALL
                SELECT concat_ws(' ', 'f', f.oid, f.xmin) FROM pg_attrdef f WHERE f.adrelid = s.relation
                ORDER BY 1
            ) AS version
        ) END AS catalogs
    FROM home CROSS JOIN {schema}.stream s
    LEFT JOIN parts ON parts.stream = s.number
    LEFT JOIN {schema}.stream_position p ON p.stream = s.number AND p.writer = 0
    LEFT JOIN LATERAL (
        SELECT x.number FROM {schema}.stream_generation x WHERE x.stream = s.number ORDER BY x.number DESC LIMIT 1
    ) AS g ON TRUE
    WHERE $5 IS NULL OR s.name = ANY ($5) OR (SELECT whole.version FROM whole) IS DISTINCT FROM $6::bigint
), known AS (
    SELECT k.*
    FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[]) AS k (name, own, catalogs, noted)
    WHERE $5 IS NULL OR k.name = ANY ($5) OR (SELECT whole.version FROM whole) IS DISTINCT FROM $6::bigint
)
SELECT NULL AS name, whole.version AS own, (
        SELECT sum(pg_stat_get_tuples_inserted(c) + pg_stat_get_tuples_updated(c) + pg_stat_get_tuples_deleted(c))::bigint
        FROM unnest(ARRAY[
            'pg_class', 'pg_namespace', 'pg_sequence', 'pg_attribute', 'pg_index', 'pg_inherits', 'pg_depend', 'pg_attrdef'
        ]::regclass[]) AS c
    ) AS catalogs, NULL::bigint AS noted
FROM whole
UNION ALL
SELECT name, m.own, m.catalogs, m.noted
FROM marks m FULL JOIN known USING (name)
WHERE m.own IS DISTINCT FROM known.own OR m.noted IS DISTINCT FROM known.noted
    OR (m.catalogs IS NOT NULL AND m.catalogs IS DISTINCT FROM known.catalogs)

-- name: stream_published
-- What was published last, per stream, with the writers' positions side by side.
SELECT s.name,
    max(p.position) FILTER (WHERE p.writer = 0) AS position,
    max(p.published_at) FILTER (WHERE p.writer = 0) AS published_at,
    coalesce(array_agg(w.name ORDER BY w.number) FILTER (WHERE w.name IS NOT NULL), '{{}}') AS writers,
    coalesce(array_agg(p.position ORDER BY w.number) FILTER (WHERE w.name IS NOT NULL), '{{}}') AS positions
FROM {schema}.stream s
JOIN {schema}.stream_position p ON p.stream = s.number
LEFT JOIN {schema}.stream_writer w ON w.stream = s.number AND w.number = p.writer
GROUP BY s.name

-- name: stream_lineage
-- The generations of all streams, or of the one that is named, in their order.
SELECT s.name, g.number, g.id, g.began_at, g.writers, g.positions, g.reason, g.created_at
FROM {schema}.stream_generation g
JOIN {schema}.stream s ON s.number = g.stream
WHERE $1::text IS NULL OR s.name = $1
ORDER BY g.stream, g.number

-- name: stream_taken
-- The last value of the sequence ($1, an oid): whatever is committed already is not above it, but ids up to it may be given
-- out again, on this server or on another one.
-- NULL where we may not look, which must not pass for "none yet".
-- `file` is the sequence's file, read after that.
SELECT
    coalesce(
        pg_sequence_last_value(s.seqrelid),
        CASE WHEN has_sequence_privilege(s.seqrelid, 'USAGE, SELECT') THEN s.seqstart - 1 END
    ) AS upto,
    pg_relation_filenode(s.seqrelid)::bigint AS file
FROM pg_sequence AS s
WHERE s.seqrelid = $1

-- name: stream_writers_numbered
-- The writers of a stream ($1, its number) that have these numbers ($2).
SELECT w.number, w.name, NULL::bigint AS position, w.created_at, w.retired_at
FROM {schema}.stream_writer w
WHERE w.stream = $1 AND w.number = ANY ($2::integer[])

-- name: stream_daemons
-- Whether a daemon is connected to this database: its sessions bear this name.
SELECT EXISTS (
    SELECT FROM pg_stat_get_activity(NULL) AS a
    WHERE a.application_name = 'replicad'
        AND a.datid = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
)

-- name: stream_position_at
-- The age counts back from the server's clock.
SELECT {schema}.stream_position_at($1, clock_timestamp() - $2::interval)

-- name: stream_trim_kept
SELECT k.partitions, k.removed FROM {schema}.stream_trim_kept($1, $2) AS k

-- name: stream_add
-- The casts keep what text and oids mean in SQL: a name that is too long is cut, and an oid may stand for its table.
SELECT {schema}.stream_add($1, $2::bigint::oid::regclass, $3::text::name, $4::text::name, $5, $6,
    $7::bigint::oid::regclass, $8::bigint::oid::regclass, $9)

-- name: stream_alter
-- The casts: an oid stands for its table.
SELECT {schema}.stream_alter($1, $2::bigint::oid::regclass, $3, $4::bigint::oid::regclass, $5::bigint::oid::regclass)

-- name: stream_lockers
-- Who keeps us from reading the tables of streams ($1 oid[]; partitions and heirs count too): an open transaction that
-- holds a lock which no reader gets past, or that waits for one, since we would wait behind it. The oldest first.
WITH RECURSIVE tree (root, member) AS (
    SELECT o, o FROM unnest($1::oid[]) AS o
    UNION
    SELECT t.root, i.inhrelid FROM tree AS t JOIN pg_inherits AS i ON i.inhparent = t.member
)
SELECT
    t.root::bigint AS watched,
    l.pid,
    a.application_name,
    CASE
        WHEN getdatabaseencoding() <> 'SQL_ASCII' THEN left(a.query, 200)
        ELSE regexp_replace(left(a.query, 200), '[^\x01-\x7f]', '?', 'g')  -- where every byte may stand in a text
    END AS query,
    CASE WHEN getdatabaseencoding() <> 'SQL_ASCII' THEN p.gid ELSE regexp_replace(p.gid, '[^\x01-\x7f]', '?', 'g') END AS gid,
    extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared))::float8 AS age
FROM pg_locks AS l
JOIN tree AS t ON t.member = l.relation
LEFT JOIN pg_stat_get_activity(NULL) AS a ON a.pid = l.pid
LEFT JOIN pg_locks AS x
    ON l.pid IS NULL AND x.locktype = 'transactionid' AND x.virtualtransaction = l.virtualtransaction AND x.pid IS NULL
LEFT JOIN pg_prepared_xact() AS p ON p.transaction = x.transactionid
WHERE l.locktype = 'relation'
    AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
    AND l.mode = 'AccessExclusiveLock'
ORDER BY l.granted DESC, age DESC NULLS LAST

-- name: stream_desired
-- For `replicad plan`: of each stream whether its table is one of replicad's own, and whether its sequence was the one that
-- feeds the column when it was added.
SELECT s.name, s.fed, coalesce(c.relnamespace = home.relnamespace, false) AS ours
FROM {schema}.stream AS s
LEFT JOIN pg_class AS c ON c.oid = s.relation
LEFT JOIN pg_class AS home ON home.oid = s.tableoid

-- name: stream_relation
-- For `replicad plan`: the name of the relation $1 as SQL wants it, and of the sequence that feeds its column $2.
SELECT format('%I.%I', n.nspname, c.relname) AS name,
    (SELECT format('%I.%I', qn.nspname, q.relname) FROM pg_class AS q JOIN pg_namespace AS qn ON qn.oid = q.relnamespace
     WHERE q.oid = {schema}.stream_sequence(c.oid::regclass, $2::name)) AS feeding
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = $1::bigint::oid

-- name: relay_key
SELECT {schema}.stream_relay_channel() AS channel, {schema}.stream_relay_secret() AS secret,
    extract(epoch FROM clock_timestamp())::float8 AS clock
