-- One row per tube and partition: waiting pods, their lag, the lease (its holder, its partitions as daemons name them in
-- their troubles, its beat and time to live), the progress of backfills, parked
-- ids. moved_in and moved_out count the pods of the whole tube since its table was made. writer is the transaction that
-- has been writing pods for the longest: later pods wait until it ends. report is the last report of any reader of the
-- tube, such as a pipeline.
SELECT s.tube, s.partition, s.inc_count AS pods, s.inc_ids AS ids, s.backfill_count AS backfill_pods, s.estimated,
    greatest(extract(epoch FROM clock_timestamp() - s.inc_min_ts), 0)::float8 AS lag_s,
    greatest(extract(epoch FROM clock_timestamp() - s.backfill_min_ts), 0)::float8 AS backfill_lag_s,
    h.holder, h.lease, h.beat, h.ttl,
    (SELECT sum(b.ids) FROM {schema}.tube_backfill b
        WHERE b.tube = s.tube AND NOT b.finished AND b.shard % r.partitions = s.partition)::bigint AS backfill_done,
    (SELECT sum(b.approx_ids) FROM {schema}.tube_backfill b
        WHERE b.tube = s.tube AND NOT b.finished AND b.shard % r.partitions = s.partition)::bigint AS backfill_of,
    (SELECT count(*) FROM {schema}.tube_parked p WHERE p.tube = s.tube AND p.shard % r.partitions = s.partition) AS parked,
    t.n_tup_ins AS moved_in, t.n_tup_del AS moved_out, w.writer, w.writer_s,
    p.reporter, p.counts::text AS report, extract(epoch FROM clock_timestamp() - p.reported_at)::float8 AS report_s
FROM {schema}.tube_stats() s
JOIN {schema}.tube_registry r USING (tube)
LEFT JOIN LATERAL (
    SELECT split_part(l.holder, ' ', 1) AS holder, format('lease %s/%s', l.partition, l.partitions) AS lease, l.beat,
        extract(epoch FROM l.ttl)::float8 AS ttl
    FROM {schema}.tube_lease l
    WHERE l.tube = s.tube AND s.partition % l.partitions = l.partition AND r.partitions % l.partitions = 0
    ORDER BY l.term DESC LIMIT 1
) AS h ON true
LEFT JOIN pg_stat_user_tables t ON t.relid = to_regclass(format('{schema}.%I', s.tube))
LEFT JOIN LATERAL (
    SELECT CASE WHEN a.pid IS NOT NULL THEN format('pid %s (%s)', a.pid, a.application_name)
            ELSE format('prepared transaction %L', x.gid) END AS writer,
        extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, x.prepared))::float8 AS writer_s
    FROM pg_locks l
    LEFT JOIN pg_stat_activity a ON a.pid = l.pid
    LEFT JOIN pg_locks own ON l.pid IS NULL AND own.virtualtransaction = l.virtualtransaction AND own.locktype = 'transactionid'
    LEFT JOIN pg_prepared_xacts x ON x.transaction = own.transactionid
    WHERE l.locktype = 'relation' AND l.granted AND l.mode = 'RowExclusiveLock' AND l.relation = t.relid
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    ORDER BY writer_s DESC NULLS LAST LIMIT 1
) AS w ON true
LEFT JOIN LATERAL (
    SELECT * FROM {schema}.tube_report x WHERE x.tube = s.tube ORDER BY x.reported_at DESC LIMIT 1
) AS p ON true
ORDER BY s.tube, s.partition
