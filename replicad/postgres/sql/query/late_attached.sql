-- The rows of one table, without its children, at or below a position. $1 bigint: the position. $2 integer: rows to count
-- at most, from the lower end. One row.
SELECT count(*) AS rows, min(found.id) AS first, max(found.id) AS last
FROM (SELECT t.{id}::bigint AS id FROM ONLY {table} AS t WHERE t.{id} <= $1 ORDER BY t.{id} LIMIT $2) AS found
