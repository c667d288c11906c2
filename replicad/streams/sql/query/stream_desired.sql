-- For `replicad plan`: of each stream whether its table is one of replicad's own, and whether its sequence was the one that
-- feeds the column when it was added.
SELECT s.name, s.fed, coalesce(c.relnamespace = home.relnamespace, false) AS ours
FROM {schema}.stream AS s
LEFT JOIN pg_class AS c ON c.oid = s.relation
LEFT JOIN pg_class AS home ON home.oid = s.tableoid
