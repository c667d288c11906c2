-- The last id of each writer in a range.
SELECT {instance} AS writer, max(t.{id})::bigint AS token
FROM {table} AS t
WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint
GROUP BY 1
