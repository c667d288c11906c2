-- The last id of each writer in a range. RS005 where the name leads to another table.
SELECT {instance} AS writer, max(t.{id})::bigint AS token
FROM {table} AS t
WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint{skip} AND {same}
GROUP BY 1
