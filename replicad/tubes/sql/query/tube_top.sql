-- One row per tube and partition: waiting pods, their lag, the lease (its holder, its partitions as daemons name them in
-- their troubles, its beat and time to live), the progress of backfills, parked
-- ids. moved_in and moved_out count the pods of the whole tube since its table was made. writer is the transaction that
-- has been writing pods for the longest: later pods wait until it ends. report is the last report of any reader of the
-- tube, such as a pipeline. What concerns a whole tube is read once for it, not for each partition.
WITH leases AS (
    SELECT DISTINCT ON (r.tube, p.partition) r.tube, p.partition, split_part(l.holder, ' ', 1) AS holder,
        format('lease %s/%s', l.partition, l.partitions) AS lease, l.beat, extract(epoch FROM l.ttl)::float8 AS ttl
    FROM {schema}.tube_lease l
    JOIN {schema}.tube_registry r ON r.tube = l.tube AND r.partitions % l.partitions = 0
    CROSS JOIN LATERAL generate_series(l.partition, r.partitions - 1, l.partitions) AS p (partition)
    ORDER BY r.tube, p.partition, l.beat DESC
), backfills AS (
    SELECT r.tube, b.shard % r.partitions AS partition, sum(b.ids)::bigint AS done, sum(b.approx_ids)::bigint AS total
    FROM {schema}.tube_backfill b JOIN {schema}.tube_registry r USING (tube) WHERE NOT b.finished GROUP BY 1, 2
), parked AS (
    SELECT r.tube, p.shard % r.partitions AS partition, count(*) AS pods
    FROM (SELECT x.tube, x.shard FROM {schema}.tube_parked x LIMIT 100000) AS p JOIN {schema}.tube_registry r USING (tube)
    GROUP BY 1, 2
), tubes AS MATERIALIZED (
    SELECT r.tube, to_regclass(format('{schema}.%I', r.tube)) AS relid FROM {schema}.tube_registry r
), writers AS (
    SELECT DISTINCT ON (u.tube) u.tube,
        CASE WHEN a.pid IS NOT NULL THEN format('pid %s (%s)', a.pid, a.application_name)
            ELSE format('prepared transaction %L', x.gid) END AS writer,
        extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, x.prepared))::float8 AS writer_s
    FROM pg_locks l
    JOIN tubes u ON u.relid = l.relation
    LEFT JOIN pg_stat_activity a ON a.pid = l.pid
    LEFT JOIN pg_locks own ON l.pid IS NULL AND own.virtualtransaction = l.virtualtransaction AND own.locktype = 'transactionid'
    LEFT JOIN pg_prepared_xacts x ON x.transaction = own.transactionid
    WHERE l.locktype = 'relation' AND l.granted AND l.mode = 'RowExclusiveLock'
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    ORDER BY u.tube, writer_s DESC NULLS LAST
), reports AS (
    SELECT DISTINCT ON (x.tube) x.* FROM {schema}.tube_report x ORDER BY x.tube, x.reported_at DESC
)
SELECT s.tube, s.partition, s.inc_count AS pods, s.inc_ids AS ids, s.backfill_count AS backfill_pods, s.estimated,
    greatest(extract(epoch FROM clock_timestamp() - s.inc_min_ts), 0)::float8 AS lag_s,
    greatest(extract(epoch FROM clock_timestamp() - s.backfill_min_ts), 0)::float8 AS backfill_lag_s,
    h.holder, h.lease, h.beat, h.ttl, b.done AS backfill_done, b.total AS backfill_of, coalesce(k.pods, 0) AS parked,
    t.n_tup_ins AS moved_in, t.n_tup_del AS moved_out, w.writer, w.writer_s,
    p.reporter, p.counts::text AS report, extract(epoch FROM clock_timestamp() - p.reported_at)::float8 AS report_s
FROM {schema}.tube_stats() s
JOIN tubes u USING (tube)
LEFT JOIN leases h USING (tube, partition)
LEFT JOIN backfills b USING (tube, partition)
LEFT JOIN parked k USING (tube, partition)
LEFT JOIN pg_stat_user_tables t ON t.relid = u.relid
LEFT JOIN writers w USING (tube)
LEFT JOIN reports p USING (tube)
ORDER BY s.tube, s.partition
