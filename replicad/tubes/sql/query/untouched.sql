-- Attached tables whose changes are not recorded by triggers, or not all of them.

-- name: tube_unseen
-- Writes that no trigger records although all triggers are in place, one row for each tube, kind and table (at most three
-- of a kind for each tube). Reads tube_attachment and catalogs only.
--   partition     a partition or heir of an attached table was made or attached later: statements on it are missed
--   subscription  an attached table is the target of a logical replication: Postgres fires no trigger of a statement for it
--   setting       a user or database has session_replication_role = replica: triggers do not fire in such sessions
WITH tables AS (
    SELECT a.tube, a.shard, a.predicate, a.routing, a.key, a.root, i.inhrelid AS tbl, 'partition' AS kind, NULL::text AS who,
        NULL::text AS whose
    FROM {schema}.tube_attachment AS a
    JOIN pg_inherits AS i ON i.inhparent = a.tbl
    WHERE NOT EXISTS (SELECT FROM {schema}.tube_attachment AS x WHERE x.tube = a.tube AND x.tbl = i.inhrelid)
    UNION ALL
    SELECT a.tube, a.shard, a.predicate, a.routing, a.key, a.root, a.tbl, 'subscription', string_agg(s.subname, ', '), NULL
    FROM {schema}.tube_attachment AS a
    JOIN pg_subscription_rel AS r ON r.srrelid = a.tbl
    JOIN pg_subscription AS s ON s.oid = r.srsubid
    GROUP BY 1, 2, 3, 4, 5, 6, 7
    UNION ALL
    SELECT DISTINCT a.tube, 0, NULL, NULL, NULL::name[], NULL::oid, d.setrole, 'setting', coalesce(
            'user ' || pg_get_userbyid(nullif(d.setrole, 0)), 'database ' || b.datname),
        concat_ws(' IN ', 'ROLE ' || quote_ident(pg_get_userbyid(nullif(d.setrole, 0))), 'DATABASE ' || quote_ident(b.datname))
    FROM pg_db_role_setting AS d
    LEFT JOIN pg_database AS b ON b.oid = d.setdatabase
    CROSS JOIN {schema}.tube_attachment AS a
    WHERE 'session_replication_role=replica' = ANY (d.setconfig) AND (d.setdatabase = 0 OR b.datname = current_database())
), numbered AS (
    SELECT t.*, row_number() OVER (PARTITION BY t.tube, t.kind ORDER BY t.tbl, t.who) AS number,
        count(*) OVER (PARTITION BY t.tube, t.kind) AS tables
    FROM tables AS t
)
SELECT u.tube, u.kind, u.who, u.whose, u.shard, u.predicate, u.routing, u.key, u.tables,
    (SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.oid = u.tbl) AS name,
    (SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.oid = u.root) AS root
FROM numbered AS u
WHERE u.number <= 3
ORDER BY u.tube, u.kind, u.number

-- name: tube_untouched
-- Attached tables whose changes are not recorded: a trigger is missing, disabled or calls another function, or the
-- table was dropped. At most three for each tube, and their number. $1 text: the schema's name. Reads tube_attachment
-- and catalogs only. A dropped partition is left out, because its rows were dropped with it.
WITH functions AS MATERIALIZED (
    SELECT p.oid, p.proname = 'tube_truncate_trigger' AS truncates, d.description
    FROM pg_namespace AS n
    JOIN pg_proc AS p ON p.pronamespace = n.oid AND p.prorettype = 'trigger'::regtype
    LEFT JOIN pg_description AS d ON d.objoid = p.oid AND d.classoid = 'pg_proc'::regclass AND d.objsubid = 0
    WHERE n.nspname = $1::text
), present AS (
    SELECT a.tube, a.tbl, bit_or(g.tgtype::integer) AS events
    FROM {schema}.tube_attachment AS a
    JOIN pg_trigger AS g ON g.tgrelid = a.tbl
    JOIN functions AS f ON f.oid = g.tgfoid
    WHERE NOT g.tgisinternal AND g.tgenabled IN ('O', 'A') AND g.tgqual IS NULL
        AND CASE WHEN f.truncates
            THEN g.tgtype = 34 AND g.tgargs = convert_to(a.tube, getdatabaseencoding()) || decode('00', 'hex')
            ELSE g.tgtype IN (4, 8, 16) AND f.description = 'replicad: touches tube ' || a.tube END
    GROUP BY a.tube, a.tbl
), untouched AS (
    SELECT a.*, c.oid IS NULL AS dropped, coalesce(p.events, 0) AS events,
        row_number() OVER (PARTITION BY a.tube ORDER BY a.tbl::oid) AS number,
        count(*) OVER (PARTITION BY a.tube) AS tables
    FROM {schema}.tube_attachment AS a
    LEFT JOIN pg_class AS c ON c.oid = a.tbl
    LEFT JOIN present AS p ON p.tube = a.tube AND p.tbl = a.tbl
    WHERE coalesce(p.events, 0) & 60 <> 60 AND (c.oid IS NOT NULL OR a.tbl = a.root)
)
SELECT u.tube, u.tbl::oid::bigint AS table_oid, u.dropped, u.shard, u.predicate, u.routing, u.key, u.tables,
    CASE WHEN NOT u.dropped THEN (
        SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.oid = u.tbl) END AS name,
    (SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.oid = u.root) AS root,
    ARRAY(SELECT e.name FROM (VALUES (4, 'INSERT'), (16, 'UPDATE'), (8, 'DELETE'), (32, 'TRUNCATE')) AS e (bit, name)
        WHERE u.events & e.bit = 0) AS missing,
    -- The name of a dropped table is unknown, but its {{table}}_touch function may remain; no attached table has it.
    CASE WHEN u.dropped THEN ARRAY(
        SELECT format('%I.%I', n.nspname, left(p.proname, -6)) FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
        WHERE p.proname LIKE '%\_touch'
            AND strpos(p.prosrc, format(E'\n-- replicad: touches the tubes of schema %I\n', $1::text)) = 1
            AND strpos(p.prosrc, format('%I.%I(', $1::text, {schema}.tube_object_name(u.tube, '_touch'))) > 0
            AND NOT EXISTS (
                SELECT FROM {schema}.tube_attachment AS x JOIN pg_class AS c ON c.oid = x.tbl
                WHERE x.tbl = x.root AND c.relnamespace = p.pronamespace
                    AND {schema}.tube_object_name(c.relname, '_touch') = p.proname)
        ORDER BY 1) END AS perhaps
FROM untouched AS u
WHERE u.number <= 3
ORDER BY u.tube, u.number

-- name: tube_parted
-- Attached tables whose name, as it was given, leads to another table by now, which is not attached: what writes by that name
-- is not recorded. At most three for each tube, and their number. Reads tube_attachment and catalogs only.
WITH parted AS (
    SELECT a.*, other.relkind IN ('r', 'p') AS attachable, row_number() OVER (PARTITION BY a.tube ORDER BY a.tbl::oid) AS number,
        count(*) OVER (PARTITION BY a.tube) AS tables
    FROM {schema}.tube_attachment AS a
    JOIN pg_class AS c ON c.oid = a.tbl
    JOIN pg_namespace AS n ON n.nspname = a.given[1]
    CROSS JOIN LATERAL (  -- by the index on both columns: a join by the name alone reads each shard's table for each shard
        SELECT o.oid, o.relkind FROM pg_class AS o WHERE o.relname = a.given[2] AND o.relnamespace = n.oid OFFSET 0
    ) AS other
    WHERE a.tbl = a.root AND other.oid <> a.tbl
        AND NOT EXISTS (SELECT FROM {schema}.tube_attachment AS x WHERE x.tube = a.tube AND x.tbl = other.oid)
)
SELECT p.tube, format('%I.%I', p.given[1], p.given[2]) AS given, {schema}.tube_qualified(p.tbl) AS name, p.shard, p.predicate,
    p.routing, p.key, p.tables, p.attachable
FROM parted AS p
WHERE p.number <= 3
ORDER BY p.tube, p.number

-- name: tube_marks
-- Something that changes with the columns of an attached table, for a part of the tables: $1 integer: how many parts, $2
-- integer: which part. `tries`: whether its expressions are worth a trial, as they may name more than columns. None for a role
-- that could not serve tubes: it may not run code as the owners of tables, and sees what daemons report.
SELECT a.tube, a.tbl::oid::bigint AS table_oid,
    coalesce(a.predicate, a.routing, r.predicate) IS NOT NULL AS tries,
    (SELECT bit_xor(hashtextextended(concat_ws(' ', c.attnum, c.attname, c.atttypid, c.attisdropped, c.attgenerated), 0))
        FROM pg_attribute AS c WHERE c.attrelid = a.tbl AND c.attnum > 0) AS mark
FROM {schema}.tube_attachment AS a
JOIN {schema}.tube_registry AS r ON r.tube = a.tube
JOIN pg_class AS t ON t.oid = a.tbl
WHERE a.tbl = a.root AND a.tbl::oid::bigint % $1::integer = $2::integer AND has_table_privilege('{schema}.tube_lease', 'UPDATE')
ORDER BY a.tube, a.tbl::oid

-- name: tube_failing
-- The tables $2 oid[] of the tubes $1 text[], with `fault`, that of tube_attachment_fault, and what attaches them again.
SELECT a.tube, a.tbl::oid::bigint AS table_oid, {schema}.tube_qualified(a.tbl) AS name, a.shard, a.predicate, a.routing, a.key,
    {schema}.tube_attachment_fault(a.tube, a.tbl) AS fault,
    NOT EXISTS (
        SELECT FROM unnest(a.key) AS k (name) LEFT JOIN pg_attribute AS c
            ON c.attrelid = a.tbl AND c.attname = k.name AND c.attnum > 0 AND NOT c.attisdropped
        WHERE c.attname IS NULL) AS has_key
FROM unnest($1::text[], $2::oid[]) AS w (tube, tbl)
JOIN {schema}.tube_attachment AS a ON a.tube = w.tube AND a.tbl = w.tbl
JOIN pg_class AS c ON c.oid = a.tbl
ORDER BY a.tube, a.tbl::oid
