-- How many rows of (after, upto] there are in each of the parts that some ids divide it into: part n has the ids above the
-- n-th of them and up to the next one. $1 bigint: after. $2 bigint: upto. $3 bigint[]: these ids, each with 1 added. $4 integer: rows to
-- read at most, from the lower end. {apart}: the start of a condition that leaves out rows, or nothing.
SELECT found.part, count(*) AS rows
FROM (
    SELECT pg_catalog.width_bucket(t.{id}::bigint, $3::bigint[]) AS part
    FROM {table} AS t WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint{apart} ORDER BY t.{id} LIMIT $4
) AS found
GROUP BY found.part
