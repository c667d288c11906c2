-- The last id in a range of a stream that has one writer; answered by the index alone. RS005 where the name leads to
-- another table.
SELECT max(t.{id})::bigint FROM {table} AS t WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint AND {same}
