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
