-- How many pods wait in the tubes named in $1, by partition and kind, and the age of the oldest in seconds. For tubes with
-- many pods: in a large table they are estimated from a sample. Only the figures of `serve --http` use it.
SELECT r.tube AS name, f.partition, f.backfill, f.pods, extract(epoch FROM clock_timestamp() - f.min_ts)::float8 AS age_s
FROM {schema}.tube_registry AS r
CROSS JOIN LATERAL {schema}.tube_figures(r, 10000) AS f
WHERE r.tube = ANY ($1::text[])
