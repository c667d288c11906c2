-- The tubes, and the fault of each (NULL: none). $1 text: the schema's name. Reads tube_registry and catalogs only, so
-- that a tube whose table is locked, broken or missing does not hide the others.
SELECT
    r.tube AS name,
    r.partitions,
    c.oid::bigint AS table_oid,
    s.oid::bigint AS sequence_oid,
    (extract(epoch FROM r.created_at) * 1000000)::bigint AS made,
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
        WHEN NOT (has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'DELETE')) THEN format(
            'this user may not read and delete pods in its table: GRANT SELECT, INSERT, UPDATE, DELETE ON %I.%I TO %I',
            $1::text, r.tube, current_user)
    END AS fault
FROM {schema}.tube_registry AS r
LEFT JOIN pg_namespace AS n ON n.nspname = $1::text
LEFT JOIN pg_class AS c ON c.relname = r.tube AND c.relnamespace = n.oid
LEFT JOIN pg_class AS s ON s.relname = 'tube_seq' AND s.relnamespace = n.oid AND s.relkind = 'S'
ORDER BY r.tube
