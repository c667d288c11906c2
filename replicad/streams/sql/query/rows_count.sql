-- How many rows a range has, counted no further than the limit. RS005 where the name leads to another table.
SELECT count(*)
FROM (SELECT FROM {table} AS t WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint AND {same} LIMIT $3) counted
