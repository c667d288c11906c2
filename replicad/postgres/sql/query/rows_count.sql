-- How many rows a range has, counted no further than the limit.
SELECT count(*) FROM (SELECT FROM {table} AS t WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint LIMIT $3) counted
