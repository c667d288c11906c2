-- tube_stats(exact): one row per tube and partition. inc_ columns are about regular pods, backfill_ columns about pods
-- of op B. Control pods count in one of them and in control_count. Times are those of the pods with the lowest and
-- highest seq. shards are those of attached tables in the partition. inc_ids and backfill_ids count ids. If a partition
-- has more than exact pods of a kind, their number is estimated from a sample of about 200 pages, and estimated is
-- true. If the table of a tube cannot be read, these columns are NULL. Writes nothing.
CREATE OR REPLACE FUNCTION tube_stats(exact integer = 10000) RETURNS TABLE (
    tube text, predicate text, partition integer, shards integer[],
    inc_count bigint, inc_min_seq bigint, inc_max_seq bigint, inc_min_ts timestamptz, inc_max_ts timestamptz,
    backfill_count bigint, backfill_min_seq bigint, backfill_max_seq bigint,
    backfill_min_ts timestamptz, backfill_max_ts timestamptz,
    control_count bigint, inc_ids bigint, backfill_ids bigint, estimated boolean
)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT r.tube, r.predicate, p, ARRAY(
            SELECT DISTINCT a.shard FROM tube_attachment a
            WHERE a.tube = r.tube AND a.shard % r.partitions = p ORDER BY 1),
        inc.pods, inc.min_seq, inc.max_seq, inc.min_ts, inc.max_ts,
        bf.pods, bf.min_seq, bf.max_seq, bf.min_ts, bf.max_ts,
        tube_count_control(CASE WHEN s.fault IS NULL THEN r.tube END, r.partitions, p), inc.ids, bf.ids,
        inc.estimated OR bf.estimated
    FROM (SELECT x AS one, tube_fault(x.tube) AS fault FROM tube_registry x OFFSET 0) AS s
        JOIN tube_registry r ON r.tube = (s.one).tube, generate_series(0, r.partitions - 1) AS p,
        tube_count(CASE WHEN s.fault IS NULL THEN s.one END, p, false, exact) AS inc,
        tube_count(CASE WHEN s.fault IS NULL THEN s.one END, p, true, exact) AS bf
    ORDER BY r.tube, p
$$;
COMMENT ON FUNCTION tube_stats(integer) IS 'What is in each partition of each tube';
