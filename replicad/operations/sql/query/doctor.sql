-- What `replicad doctor` reads. `replicad status` and `/status` read parts of it too.

-- name: doctor_server
-- The server and this session, in one row. `daemons`: how many serve this database. Each has two sessions that read
-- positions, or one for a moment.
SELECT
    current_setting('server_version') AS version,
    pg_is_in_recovery() AS standby,
    current_setting('transaction_read_only') = 'on' AS read_only,
    (SELECT coalesce((
        SELECT CASE WHEN d.setrole = 0 THEN '' ELSE 'ROLE ' || quote_ident(current_user) END
            || CASE WHEN d.setrole = 0 THEN 'DATABASE ' || quote_ident(current_database())
                WHEN d.setdatabase = 0 THEN '' ELSE ' IN DATABASE ' || quote_ident(current_database()) END
        FROM pg_db_role_setting AS d
        WHERE d.setrole IN (0, current_user::regrole) AND 'default_transaction_read_only=on' = ANY (d.setconfig)
            AND (d.setdatabase = 0 OR d.setdatabase = (SELECT b.oid FROM pg_database AS b WHERE b.datname = current_database()))
        ORDER BY d.setrole = 0, d.setdatabase = 0
        LIMIT 1), 'SYSTEM')) AS read_only_by,
    current_user::text AS role,
    extract(epoch FROM clock_timestamp())::float8 AS now,
    pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS sees_sessions,
    (SELECT count(*) FROM pg_stat_get_activity(NULL) AS a WHERE a.client_port IS NOT NULL)::integer AS sessions,
    current_setting('max_connections')::integer AS max_sessions,
    (SELECT (count(*) + 1) / 2 FROM pg_stat_get_activity(NULL) AS a
        WHERE a.application_name = 'replicad positions'
            AND a.datid = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()))::integer AS daemons

-- name: doctor_may
-- Whether this role may run a remedy, and the role that may. $1 text: who, a name of replicad.remedies.Who. $2 text: of what: a
-- table, a process id or the name of a prepared transaction. $3 text: replicad's schema.
WITH target AS (
    SELECT CASE $1::text
        WHEN 'KEEPER' THEN (SELECT n.nspowner FROM pg_namespace AS n WHERE n.nspname = $3::text)
        WHEN 'OWNER' THEN (SELECT c.relowner FROM pg_class AS c WHERE c.oid = to_regclass($2::text))
        WHEN 'SESSION' THEN (SELECT a.usesysid FROM pg_stat_get_activity(NULL) AS a WHERE a.pid::text = $2::text)
        WHEN 'PREPARER' THEN (SELECT r.oid FROM pg_prepared_xacts AS p JOIN pg_roles AS r ON r.rolname = p.owner
            WHERE p.gid = $2::text)
    END AS role
)
SELECT r.rolname::text AS role,
    me.rolsuper OR coalesce(pg_has_role(me.oid, r.oid, 'USAGE'), false)
        OR ($1::text = 'SESSION' AND pg_has_role(me.oid, 'pg_signal_backend', 'USAGE') AND NOT coalesce(r.rolsuper, false)) AS may
FROM target AS t
JOIN pg_roles AS me ON me.rolname = current_user
LEFT JOIN pg_roles AS r ON r.oid = t.role

-- name: doctor_sequences
-- How far each stream's sequence is used up: its last value, and the highest that it, or a reservation, can give. `hidden`:
-- this role may not read it.
SELECT s.name, CASE WHEN r.may THEN pg_sequence_last_value(s.sequence) END AS last, NOT r.may AS hidden,
    CASE WHEN s.method = 'reservation' THEN least(q.seqmax, (1::bigint << 48) - 1) ELSE q.seqmax END AS most
FROM {schema}.stream AS s
JOIN pg_sequence AS q ON q.seqrelid = s.sequence
CROSS JOIN LATERAL (
    SELECT has_sequence_privilege(s.sequence::oid, 'SELECT') OR has_sequence_privilege(s.sequence::oid, 'USAGE') AS may
) AS r
ORDER BY s.name

-- name: doctor_strangers
-- Code of a third role in tables that are read directly, because they belong to a superuser or to the asking role: types of
-- columns (whoever owns a type can define its cast to json), and functions in indexes, statistics and policies.
-- $1 bigint[]: tables of streams; those of tubes are found here. {schema}: that of the tubes.
WITH tables AS (
    SELECT c.oid, c.relowner, format('%I.%I', n.nspname, c.relname) AS name
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace JOIN pg_roles AS o ON o.oid = c.relowner
    WHERE (o.rolsuper OR o.rolname = current_user)
        AND (c.oid = ANY ($1::bigint[]::oid[]) OR c.oid IN (SELECT a.tbl FROM {schema}.tube_attachment AS a))
), parts AS (
    SELECT t.oid, 'pg_class'::regclass AS class, i.indexrelid AS part FROM tables AS t JOIN pg_index AS i ON i.indrelid = t.oid
    UNION ALL SELECT t.oid, 'pg_statistic_ext'::regclass, s.oid FROM tables AS t JOIN pg_statistic_ext AS s ON s.stxrelid = t.oid
    UNION ALL SELECT t.oid, 'pg_policy'::regclass, p.oid FROM tables AS t JOIN pg_policy AS p ON p.polrelid = t.oid
), used AS (
    SELECT t.oid, 'TYPE ' || format_type(coalesce(nullif(y.typelem, 0), y.oid), NULL) AS what, y.typowner AS owner
    FROM tables AS t
    JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
    JOIN pg_type AS y ON y.oid = a.atttypid
    UNION
    SELECT parts.oid, 'FUNCTION ' || p.oid::regprocedure, p.proowner
    FROM parts
    JOIN pg_depend AS d ON d.classid = parts.class AND d.objid = parts.part AND d.refclassid = 'pg_proc'::regclass
    JOIN pg_proc AS p ON p.oid = d.refobjid
)
SELECT t.name AS table, u.what, r.rolname::text AS owner, pg_get_userbyid(t.relowner)::text AS table_owner
FROM used AS u JOIN tables AS t ON t.oid = u.oid JOIN pg_roles AS r ON r.oid = u.owner
WHERE NOT r.rolsuper AND u.owner <> t.relowner AND r.rolname <> current_user
ORDER BY 1, 2

-- name: doctor_triggers
-- Attached tables whose trigger functions run with the rights of another role than the owner of the table, as after ALTER TABLE
-- ... OWNER TO. $1 text: the schema's name. A table of a superuser, or of the owner of the schema, is theirs in common.
SELECT DISTINCT a.tube, format('%I.%I', n.nspname, c.relname) AS root, a.shard, a.predicate, a.routing, a.key,
    pg_get_userbyid(c.relowner)::text AS owner, pg_get_userbyid(p.proowner)::text AS runs_as
FROM {schema}.tube_attachment AS a
JOIN pg_class AS c ON c.oid = a.tbl
JOIN pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_roles AS mine ON mine.oid = c.relowner
JOIN pg_namespace AS home ON home.nspname = $1::text
JOIN pg_trigger AS g ON g.tgrelid = a.tbl AND NOT g.tgisinternal
JOIN pg_proc AS p ON p.oid = g.tgfoid AND p.pronamespace = home.oid
JOIN pg_roles AS other ON other.oid = p.proowner
JOIN pg_description AS d ON d.objoid = p.oid AND d.classoid = 'pg_proc'::regclass
    AND d.description = 'replicad: touches tube ' || a.tube
WHERE a.tbl = a.root AND p.proowner <> c.relowner
    AND NOT ((mine.rolsuper OR mine.oid = home.nspowner) AND (other.rolsuper OR other.oid = home.nspowner))
ORDER BY 1, 2

-- name: doctor_backfills
-- Backfills that have not put all ids into their tubes: how many, and since when nothing was added.
SELECT b.tube, b.tbl::text AS table, b.ids, b.approx_ids,
    greatest(extract(epoch FROM clock_timestamp() - b.updated_at), 0)::float8 AS idle_s
FROM {schema}.tube_backfill AS b
WHERE NOT b.finished
ORDER BY b.tube, b.tbl

-- name: doctor_senders
-- For each source of senders: the senders on its list that are not running, whether something is outstanding, how far
-- those that do not run have recorded each stream (name, a blank, token), what is
-- parked (of all sources, $1 items at most), and the destination that has failed for longest while something is.
SELECT s.source,
    ARRAY(
        SELECT DISTINCT e.name FROM {schema}.federation_sender e
        WHERE e.source = s.source
            AND NOT EXISTS (SELECT FROM {schema}.federation_source_running(s.source) r WHERE r.name = e.name)
        ORDER BY e.name
    ) AS absent,
    EXISTS (SELECT FROM {schema}.federation_destination_room r WHERE r.source = s.source)
        OR EXISTS (SELECT FROM {schema}.federation_edu u WHERE u.source = s.source) AS outstanding,
    ARRAY(
        SELECT e.stream || ' ' || e.token FROM {schema}.federation_sender e
        WHERE e.source = s.source AND e.token IS NOT NULL
            AND NOT EXISTS (SELECT FROM {schema}.federation_source_running(s.source) r WHERE r.name = e.name)
    ) AS recorded,
    (SELECT count(*) FROM (SELECT FROM {schema}.federation_parked p WHERE p.source = s.source LIMIT $1) x) AS parked,
    f.number AS failing, f.name AS first, f.last_error, f.failing_s
FROM (SELECT e.source FROM {schema}.federation_sender e UNION SELECT p.source FROM {schema}.federation_parked p) s
LEFT JOIN LATERAL (
    SELECT d.name, d.last_error, extract(epoch FROM clock_timestamp() - d.failing_since)::float8 AS failing_s,
        count(*) OVER () AS number
    FROM {schema}.federation_destination d
    WHERE d.source = s.source AND d.failures > 0 AND d.failing_since < clock_timestamp() - make_interval(secs => $2)
        AND (d.txn_id IS NOT NULL
            OR (SELECT true FROM {schema}.federation_destination_room r
                WHERE r.source = d.source AND r.destination = d.name LIMIT 1)
            OR (SELECT true FROM {schema}.federation_edu u
                WHERE u.source = d.source AND u.destination = d.name LIMIT 1))
    ORDER BY d.failing_since
    LIMIT 1
) f ON true
ORDER BY s.source
