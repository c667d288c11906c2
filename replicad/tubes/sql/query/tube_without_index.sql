-- Which of the tables $1 (text[]) with more than 100,000 rows have no valid index that begins with the column $2 (text[], one
-- for each table): a backfill in this order reads and sorts the whole table for each 100,000 ids. rows is an estimate,
-- from the planner's statistics or, without any, from the size of the table. partitioned: CREATE INDEX CONCURRENTLY is
-- not possible.
SELECT g.tbl, g.col, sized.rows, c.relkind = 'p' AS partitioned
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS g (tbl, col, n)
JOIN pg_class AS c ON c.oid = to_regclass(g.tbl)
CROSS JOIN LATERAL (
    SELECT sum(CASE WHEN m.reltuples < 0 THEN pg_relation_size(m.oid) / 100 ELSE m.reltuples END)::bigint AS rows
    FROM {schema}.tube_members(c.oid) AS o JOIN pg_class AS m ON m.oid = o
    WHERE m.relkind <> 'p'
) AS sized
WHERE sized.rows > 100000 AND NOT EXISTS (
    SELECT FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = c.oid AND i.indisvalid AND i.indpred IS NULL AND a.attname = g.col)
ORDER BY g.n
