-- Tables with a backfill in the order of column $2 in tube $1 that is scheduled or running, which have more than 100,000
-- rows by the planner's statistics and no valid index that begins with the column. At most three.
SELECT b.tbl
FROM {schema}.tube_backfills($1::text) AS b
JOIN pg_class AS c ON c.oid = to_regclass(b.tbl)
WHERE b.order_col = $2::text AND c.reltuples > 100000 AND NOT EXISTS (
    SELECT FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = c.oid AND i.indisvalid AND i.indpred IS NULL AND a.attname = $2::text)
ORDER BY b.tbl
LIMIT 3
