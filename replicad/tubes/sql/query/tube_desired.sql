-- For `replicad plan`: the tubes and their tables, named by schema and table.
SELECT t.tube, t.partitions, t.predicate,
    CASE WHEN c.oid IS NOT NULL THEN format('%I.%I', n.nspname, c.relname) END AS tbl,
    t.shard, t.table_predicate, t.routing
FROM {schema}.tube_list() AS t
LEFT JOIN pg_class AS c ON c.oid = t.tbl
LEFT JOIN pg_namespace AS n ON n.oid = c.relnamespace
