-- How many pods wait in the tubes named in $1, by partition and kind, and the age of the oldest in seconds. For tubes with
-- many pods: above 1000 they are estimated. Only the figures of `serve --http` use it.
SELECT r.tube AS name, p.partition, k.backfill, c.pods,
    extract(epoch FROM clock_timestamp() - c.min_ts)::float8 AS age_s
FROM {schema}.tube_registry AS r
CROSS JOIN LATERAL generate_series(0, r.partitions - 1) AS p (partition)
CROSS JOIN (VALUES (false), (true)) AS k (backfill)
CROSS JOIN LATERAL {schema}.tube_count(r, p.partition, k.backfill, 1000) AS c
WHERE r.tube = ANY ($1::text[])
