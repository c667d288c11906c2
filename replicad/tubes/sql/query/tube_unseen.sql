-- Writes that no trigger records although all triggers are in place, one row for each tube, kind and table (at most three
-- of a kind for each tube). Reads tube_attachment and catalogs only.
--   partition     a partition or heir of an attached table was made or attached later: statements on it are missed
--   subscription  an attached table is the target of a logical replication: Postgres fires no trigger of a statement for it
--   setting       a user or database has session_replication_role = replica: triggers do not fire in such sessions
WITH tables AS (
    SELECT a.tube, a.shard, a.predicate, a.routing, a.root, i.inhrelid AS tbl, 'partition' AS kind, NULL::text AS who
    FROM {schema}.tube_attachment AS a
    JOIN pg_inherits AS i ON i.inhparent = a.tbl
    WHERE NOT EXISTS (SELECT FROM {schema}.tube_attachment AS x WHERE x.tube = a.tube AND x.tbl = i.inhrelid)
    UNION ALL
    SELECT a.tube, a.shard, a.predicate, a.routing, a.root, a.tbl, 'subscription', string_agg(s.subname, ', ')
    FROM {schema}.tube_attachment AS a
    JOIN pg_subscription_rel AS r ON r.srrelid = a.tbl
    JOIN pg_subscription AS s ON s.oid = r.srsubid
    GROUP BY 1, 2, 3, 4, 5, 6
    UNION ALL
    SELECT DISTINCT a.tube, 0, NULL, NULL, NULL::oid, d.setrole, 'setting', coalesce(
            'user ' || pg_get_userbyid(nullif(d.setrole, 0)), 'database ' || b.datname)
    FROM pg_db_role_setting AS d
    LEFT JOIN pg_database AS b ON b.oid = d.setdatabase
    CROSS JOIN {schema}.tube_attachment AS a
    WHERE 'session_replication_role=replica' = ANY (d.setconfig) AND (d.setdatabase = 0 OR b.datname = current_database())
), numbered AS (
    SELECT t.*, row_number() OVER (PARTITION BY t.tube, t.kind ORDER BY t.tbl, t.who) AS number,
        count(*) OVER (PARTITION BY t.tube, t.kind) AS tables
    FROM tables AS t
)
SELECT u.tube, u.kind, u.who, u.shard, u.predicate, u.routing, u.tables,
    (SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.oid = u.tbl) AS name,
    (SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.oid = u.root) AS root
FROM numbered AS u
WHERE u.number <= 3
ORDER BY u.tube, u.kind, u.number
