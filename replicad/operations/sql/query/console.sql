-- What the console reads besides what daemons keep in memory.

-- name: console_parked
-- The oldest parked pods of a tube ($1), $2 at most, for people: the first 20 ids of each (as texts: numbers of
-- JavaScript hold 53 bits; 200 characters of each), and the start of its error.
SELECT p.parked AS number, p.shard, p.op::text AS op,
    ARRAY(SELECT left(u.id, 200) FROM unnest(coalesce(p.keys, p.ids::text[])) WITH ORDINALITY AS u (id, n)
        WHERE u.n <= 20 ORDER BY u.n) AS ids,
    cardinality(coalesce(p.keys, p.ids::text[])) AS id_count, p.tries,
    extract(epoch FROM p.parked_at)::float8 AS at, left(p.error, 1000) AS error
FROM {schema}.tube_parked AS p
WHERE p.tube = $1
ORDER BY p.parked
LIMIT $2
