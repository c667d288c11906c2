-- tube_stats_of(name, exact): one row per partition of a tube. inc_ columns are about regular pods, backfill_ columns
-- about pods of op B. Control pods count in one of them and in control_count. Times are those of the pods with the lowest and
-- highest seq. shards are those of attached tables in the partition. inc_ids and backfill_ids count ids. If the
-- tube's table has more than exact / 4 pages (20 MB by default), numbers of more than exact / 2 / partitions pods, and of
-- their ids, are estimated from a sample of exact / 10 pages, and estimated is true; all else is exact. If the table cannot
-- be read, these columns are NULL. Raises RT001. Writes nothing.
CREATE OR REPLACE FUNCTION tube_stats_of(name text, exact integer = 10000) RETURNS TABLE (
    tube text, predicate text, partition integer, shards integer[],
    inc_count bigint, inc_min_seq bigint, inc_max_seq bigint, inc_min_ts timestamptz, inc_max_ts timestamptz,
    backfill_count bigint, backfill_min_seq bigint, backfill_max_seq bigint,
    backfill_min_ts timestamptz, backfill_max_ts timestamptz,
    control_count bigint, inc_ids bigint, backfill_ids bigint, estimated boolean
)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    WITH one AS MATERIALIZED (
        SELECT found.t, tube_fault((found.t).tube) AS fault FROM (SELECT tube_find(name) AS t OFFSET 0) AS found
    ), figures AS MATERIALIZED (
        SELECT f.* FROM one, tube_figures(CASE WHEN one.fault IS NULL THEN one.t END, exact) AS f
    ), attached AS (
        SELECT a.shard % (one.t).partitions AS p, array_agg(DISTINCT a.shard ORDER BY a.shard) AS shards
        FROM one, tube_attachment a WHERE a.tube = (one.t).tube GROUP BY 1
    )
    SELECT (one.t).tube, (one.t).predicate, p, coalesce(a.shards, '{}'),
        inc.pods, inc.min_seq, inc.max_seq, inc.min_ts, inc.max_ts,
        bf.pods, bf.min_seq, bf.max_seq, bf.min_ts, bf.max_ts,
        inc.control + bf.control, inc.ids, bf.ids, inc.estimated OR bf.estimated
    FROM one CROSS JOIN LATERAL generate_series(0, (one.t).partitions - 1) AS p
        LEFT JOIN attached a USING (p)
        LEFT JOIN figures inc ON inc.partition = p AND NOT inc.backfill
        LEFT JOIN figures bf ON bf.partition = p AND bf.backfill
    ORDER BY p
$$;
COMMENT ON FUNCTION tube_stats_of(text, integer) IS 'The contents of each partition of a tube';

-- tube_stats(exact): the same for all tubes, by name and partition.
CREATE OR REPLACE FUNCTION tube_stats(exact integer = 10000) RETURNS TABLE (
    tube text, predicate text, partition integer, shards integer[],
    inc_count bigint, inc_min_seq bigint, inc_max_seq bigint, inc_min_ts timestamptz, inc_max_ts timestamptz,
    backfill_count bigint, backfill_min_seq bigint, backfill_max_seq bigint,
    backfill_min_ts timestamptz, backfill_max_ts timestamptz,
    control_count bigint, inc_ids bigint, backfill_ids bigint, estimated boolean
)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT s.* FROM tube_registry r, tube_stats_of(r.tube, exact) AS s ORDER BY s.tube, s.partition
$$;
COMMENT ON FUNCTION tube_stats(integer) IS 'The contents of each partition of each tube';
