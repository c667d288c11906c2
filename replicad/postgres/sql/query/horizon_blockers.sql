-- Who keeps us from reading sequences (ALTER SEQUENCE, TRUNCATE ... RESTART IDENTITY, DROP) or positions tables (LOCK,
-- ALTER TABLE, VACUUM FULL), in a transaction that is still open or that waits for others (we would wait behind it).
-- $1 oid[]: sequences. $2 oid[]: tables. One row per relation and culprit.
SELECT
    l.relation,
    l.virtualtransaction AS holder,
    l.pid,
    a.application_name,
    CASE
        WHEN getdatabaseencoding() <> 'SQL_ASCII' THEN left(a.query, 200)
        ELSE regexp_replace(left(a.query, 200), '[^\x01-\x7f]', '?', 'g')  -- where every byte may stand in a text
    END AS query,
    CASE WHEN getdatabaseencoding() <> 'SQL_ASCII' THEN p.gid ELSE regexp_replace(p.gid, '[^\x01-\x7f]', '?', 'g') END AS gid,
    extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared))::float8 AS age
FROM pg_locks AS l
LEFT JOIN pg_stat_get_activity(NULL) AS a ON a.pid = l.pid
LEFT JOIN pg_locks AS x
    ON l.pid IS NULL AND x.locktype = 'transactionid' AND x.virtualtransaction = l.virtualtransaction AND x.pid IS NULL
LEFT JOIN pg_prepared_xact() AS p ON p.transaction = x.transactionid
WHERE l.locktype = 'relation'
    AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
    AND (
        l.relation = ANY ($1::oid[])
        AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
        OR l.relation = ANY ($2::oid[]) AND l.mode = 'AccessExclusiveLock'
    )
