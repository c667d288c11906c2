-- What the watched tables and sequences are like: when a watch begins, after a reconnection, and every few seconds.
-- $1 oid[]: tables. $2 oid[]: sequences. One row for each that exists; `readable` is whether we may read a sequence.
SELECT
    c.oid,
    format('%I.%I', n.nspname, c.relname) AS name,
    c.relpersistence::text AS persistence,
    s.seqincrement AS increment,
    s.seqcache AS cache,
    s.seqcycle AS cycle,
    CASE WHEN s.seqrelid IS NOT NULL THEN has_sequence_privilege(c.oid, 'SELECT') END AS readable
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
LEFT JOIN pg_sequence AS s ON s.seqrelid = c.oid
WHERE c.oid = ANY ($1::oid[] || $2::oid[])
