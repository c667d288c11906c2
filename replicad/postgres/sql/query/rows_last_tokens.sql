-- The last id of each writer in a range.
SELECT {instance} AS writer, max(t.{id})::bigint AS token
FROM {table} AS t
WHERE t.{id} > $1 AND t.{id} <= $2
GROUP BY 1
