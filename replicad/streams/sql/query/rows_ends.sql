-- The first and the last id of a range; NULL where it is empty. RS005 where the name leads to another table.
SELECT min(t.{id})::bigint AS first, max(t.{id})::bigint AS last
FROM {table} AS t
WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint AND {same}
