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

-- tube_figures(t, exact): what is in each partition of a tube, a row for each kind of pods (backfill or not): their
-- number, their ids, how many are control pods, and the lowest and highest seq with their times. The cost is bounded: one
-- pass over the table if it has at most exact / 4 pages. Otherwise up to exact / 2 / partitions pods of each partition and
-- kind are counted, and where there are more, all are estimated from a sample of exact / 10 pages: estimated is true
-- then. So dead pods that VACUUM may not remove cost nothing while few wait. Seqs and times are always exact. Writes
-- nothing.
CREATE OR REPLACE FUNCTION tube_figures(t tube_registry, exact integer) RETURNS TABLE (
    partition integer, backfill boolean, pods bigint, ids bigint, control bigint,
    min_seq bigint, max_seq bigint, min_ts timestamptz, max_ts timestamptz, estimated boolean
)
LANGUAGE plpgsql STABLE STRICT SET search_path FROM CURRENT SET jit = off AS $$
DECLARE
    pages bigint := pg_relation_size(tube_relation(t.tube)) / current_setting('block_size')::integer;
    large boolean := pages > greatest(exact / 4, 200);
    share numeric := CASE WHEN large THEN 100 * greatest(exact / 10, 200) / pages::numeric ELSE 100 END;  -- per cent
    few bigint := CASE WHEN large THEN greatest(exact / 2 / t.partitions, 1) ELSE 9223372036854775806 END;
BEGIN
    RETURN QUERY EXECUTE format($sql$
        WITH parts AS MATERIALIZED (
            SELECT numbers.p, kinds.k, tube_low_of(%6$L, %2$s, numbers.p, kinds.k = 1) AS low
            FROM generate_series(0, %2$s - 1) AS numbers (p) CROSS JOIN (VALUES (0), (1)) AS kinds (k)
        ), counted AS MATERIALIZED (
            SELECT parts.p, parts.k, few.pods, few.ids
            FROM parts CROSS JOIN LATERAL (
                SELECT count(*) AS pods, sum(cardinality(x.ids)) AS ids FROM (
                    SELECT x.ids FROM %1$s AS x
                    WHERE (x.shard %% %2$s) = parts.p AND ((x.op = 'B')::integer) = parts.k
                        AND x.seq > parts.low AND x.seq <= 9223372036854775807
                    ORDER BY x.seq LIMIT %7$s + 1
                ) AS x
            ) AS few
            WHERE %5$L
        ), scanned AS MATERIALIZED (
            SELECT shard %% %2$s AS p, (op = 'B')::integer AS k, count(*) * 100 / %4$s AS pods,
                sum(cardinality(ids)) * 100 / %4$s AS ids
            FROM %1$s %3$s
            WHERE NOT %5$L OR (SELECT bool_or(counted.pods > %7$s) FROM counted)
            GROUP BY 1, 2
        ), controls AS MATERIALIZED (
            SELECT shard %% %2$s AS p, (op = 'B')::integer AS k, count(*) AS pods
            FROM %1$s WHERE cardinality(ids) = 0 GROUP BY 1, 2
        )
        SELECT parts.p, parts.k = 1,
            CASE WHEN oldest.seq IS NULL THEN 0 WHEN c.pods <= %7$s THEN c.pods ELSE greatest(s.pods, c.pods, 1) END::bigint,
            CASE WHEN oldest.seq IS NULL THEN 0 WHEN c.pods <= %7$s THEN c.ids
                ELSE greatest(s.ids, c.ids, 0) END::bigint,
            coalesce(o.pods, 0), oldest.seq, newest.seq, oldest.ts, newest.ts, coalesce(c.pods > %7$s, false)
        FROM parts
        LEFT JOIN counted AS c ON c.p = parts.p AND c.k = parts.k
        LEFT JOIN scanned AS s ON s.p = parts.p AND s.k = parts.k
        LEFT JOIN controls AS o ON o.p = parts.p AND o.k = parts.k
        LEFT JOIN LATERAL (
            SELECT x.seq, x.ts FROM %1$s AS x
            WHERE coalesce(c.pods, s.pods) > 0
                AND (x.shard %% %2$s) = parts.p AND ((x.op = 'B')::integer) = parts.k
                AND x.seq > parts.low AND x.seq <= 9223372036854775807
            ORDER BY x.seq LIMIT 1
        ) AS oldest ON true
        LEFT JOIN LATERAL (
            SELECT x.seq, x.ts FROM %1$s AS x
            WHERE oldest.seq IS NOT NULL AND (x.shard %% %2$s) = parts.p AND ((x.op = 'B')::integer) = parts.k
                AND x.seq > parts.low AND x.seq <= 9223372036854775807
            ORDER BY x.seq DESC LIMIT 1
        ) AS newest ON true
        ORDER BY 1, 2
    $sql$, tube_relation(t.tube), t.partitions,
        CASE WHEN large THEN format('TABLESAMPLE SYSTEM (%s)', share) END, share, large, t.tube, few);
END
$$;
