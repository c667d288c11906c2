-- tube_fault(tube): why the tube's table cannot be read; NULL if it can. Waits only briefly for its lock and keeps it
-- until the transaction ends, so that later reads do not wait. Writes nothing.
CREATE OR REPLACE FUNCTION tube_fault(tube text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET lock_timeout = '200ms' AS $$
BEGIN
    EXECUTE format('SELECT seq::bigint, (op = ''B'')::integer, shard::integer, cardinality(ids), payload ->> ''type'', ts'
        ' FROM %s LIMIT 0', tube_relation(tube));
    RETURN NULL;
EXCEPTION WHEN OTHERS THEN
    RETURN SQLERRM;
END
$$;
COMMENT ON FUNCTION tube_fault(text) IS 'Why a tube''s table cannot be read';

-- tube_figures(t, exact): what is in each partition of a tube, a row for each kind of pods (backfill or not): their
-- number, their ids, how many are control pods, and the lowest and highest seq with their times. The cost is bounded: one pass over the
-- table if it has at most exact / 4 pages, otherwise a sample of exact / 10 pages, and for each partition a look at
-- the two ends of the index. Seqs and times are always exact. In a sample pods and ids are estimates: estimated is true
-- then, and the number is at least 1 if there is a pod. Writes nothing.
CREATE OR REPLACE FUNCTION tube_figures(t tube_registry, exact integer) RETURNS TABLE (
    partition integer, backfill boolean, pods bigint, ids bigint, control bigint,
    min_seq bigint, max_seq bigint, min_ts timestamptz, max_ts timestamptz, estimated boolean
)
LANGUAGE plpgsql STABLE STRICT SET search_path FROM CURRENT SET jit = off AS $$
DECLARE
    pages bigint := pg_relation_size(tube_relation(t.tube)) / current_setting('block_size')::integer;
    sampled boolean := pages > greatest(exact / 4, 200);
    share numeric := CASE WHEN sampled THEN 100 * greatest(exact / 10, 200) / pages::numeric ELSE 100 END;  -- per cent
BEGIN
    RETURN QUERY EXECUTE format($sql$
        WITH counted AS MATERIALIZED (
            SELECT shard %% %2$s AS p, (op = 'B')::integer AS k, count(*) * 100 / %4$s AS pods,
                sum(cardinality(ids)) * 100 / %4$s AS ids
            FROM %1$s %3$s GROUP BY 1, 2
        ), controls AS MATERIALIZED (
            SELECT shard %% %2$s AS p, (op = 'B')::integer AS k, count(*) AS pods
            FROM %1$s WHERE cardinality(ids) = 0 GROUP BY 1, 2
        )
        SELECT parts.p, kinds.k = 1,
            CASE WHEN oldest.seq IS NULL THEN 0 ELSE greatest(c.pods, 1) END::bigint,
            CASE WHEN oldest.seq IS NULL THEN 0 ELSE coalesce(c.ids, 0) END::bigint,
            coalesce(o.pods, 0), oldest.seq, newest.seq, oldest.ts, newest.ts, %5$L AND oldest.seq IS NOT NULL
        FROM generate_series(0, %2$s - 1) AS parts (p)
        CROSS JOIN (VALUES (0), (1)) AS kinds (k)
        CROSS JOIN LATERAL (SELECT tube_low_of(%6$L, %2$s, parts.p, kinds.k = 1) AS seq) AS low
        LEFT JOIN counted AS c ON c.p = parts.p AND c.k = kinds.k
        LEFT JOIN controls AS o ON o.p = parts.p AND o.k = kinds.k
        LEFT JOIN LATERAL (
            SELECT x.seq, x.ts FROM %1$s AS x
            WHERE (%5$L OR c.pods > 0) AND (x.shard %% %2$s) = parts.p AND ((x.op = 'B')::integer) = kinds.k
                AND x.seq > low.seq AND x.seq <= 9223372036854775807
            ORDER BY x.seq LIMIT 1
        ) AS oldest ON true
        LEFT JOIN LATERAL (
            SELECT x.seq, x.ts FROM %1$s AS x
            WHERE oldest.seq IS NOT NULL AND (x.shard %% %2$s) = parts.p AND ((x.op = 'B')::integer) = kinds.k
                AND x.seq > low.seq AND x.seq <= 9223372036854775807
            ORDER BY x.seq DESC LIMIT 1
        ) AS newest ON true
        ORDER BY 1, 2
    $sql$, tube_relation(t.tube), t.partitions,
        CASE WHEN sampled THEN format('TABLESAMPLE SYSTEM (%s)', share) END, share, sampled, t.tube);
END
$$;
COMMENT ON FUNCTION tube_figures(tube_registry, integer) IS 'Counts or estimates what is in each partition of a tube';
