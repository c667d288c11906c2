-- One row per tube and partition: pods and ids that wait, the age of the oldest pod in seconds, the same for pods of
-- backfills, and parked pods. Counts above 1000 pods of a kind are estimated; parked ones are counted up to 100,000 in
-- all. A tube whose table cannot be read has NULLs. Only the figures of `serve --http` use it.
WITH parked AS MATERIALIZED (
    SELECT p.tube, p.shard, count(*) AS pods
    FROM (SELECT x.tube, x.shard FROM {schema}.tube_parked AS x LIMIT 100000) AS p
    GROUP BY p.tube, p.shard
)
SELECT s.tube, s.partition, s.inc_count AS pods, s.inc_ids AS ids,
    greatest(extract(epoch FROM clock_timestamp() - s.inc_min_ts), 0)::float8 AS age_s,
    s.backfill_count AS backfill_pods,
    greatest(extract(epoch FROM clock_timestamp() - s.backfill_min_ts), 0)::float8 AS backfill_age_s,
    coalesce((SELECT sum(p.pods) FROM parked AS p WHERE p.tube = s.tube AND p.shard % r.partitions = s.partition), 0)::bigint AS parked
FROM {schema}.tube_stats(1000) AS s
JOIN {schema}.tube_registry AS r USING (tube)
