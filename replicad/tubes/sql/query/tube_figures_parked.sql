-- How many parked pods each partition of each tube has; counted up to 100,000 in all. For the figures of `serve --http`.
SELECT p.tube AS name, p.shard % r.partitions AS partition, count(*) AS pods
FROM (SELECT x.tube, x.shard FROM {schema}.tube_parked AS x LIMIT 100000) AS p
JOIN {schema}.tube_registry AS r USING (tube)
GROUP BY 1, 2
