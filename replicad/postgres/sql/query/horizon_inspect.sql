-- What the watched tables and sequences are like: when a watch begins, after a reconnection, and every few seconds.
-- $1 oid[]: tables. $2 oid[]: sequences. One row for each that exists. `readable`: we may read the sequence, or some
-- column of the table; `feeds`: the sum of the oids of the column defaults that draw from the sequence; `reachable`: we may use its schema. Reads catalogs only, so that no lock on a watched table or
-- sequence makes it wait.
SELECT
    c.oid,
    format('%I.%I', n.nspname, c.relname) AS name,
    c.relpersistence::text AS persistence,
    s.seqincrement AS increment,
    s.seqcache AS cache,
    s.seqcycle AS cycle,
    CASE WHEN s.seqrelid IS NOT NULL THEN (
        SELECT coalesce(sum(d.objid::bigint), 0)::bigint FROM pg_depend AS d
        WHERE d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid AND d.classid = 'pg_attrdef'::regclass
    ) END AS feeds,
    CASE WHEN s.seqrelid IS NOT NULL THEN has_sequence_privilege(c.oid, 'SELECT')
        ELSE has_any_column_privilege(c.oid, 'SELECT') END AS readable,
    has_schema_privilege(n.oid, 'USAGE') AS reachable,
    quote_ident(n.nspname) AS schema,
    quote_ident(current_user) AS role
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
LEFT JOIN pg_sequence AS s ON s.seqrelid = c.oid
WHERE c.oid = ANY ($1::oid[] || $2::oid[])
