-- The list of tubes, and how many pods wait in each tube.

-- tube_list(tbl): the tubes and the tables attached to them, or the tubes of one table. A tube without tables has
-- NULLs. table_predicate and routing are the expressions of the attachment, key has the columns that name a row. unattached are partitions of the table that
-- were created after the attachment and have no triggers; attach the table again to add them. Writes nothing.
CREATE OR REPLACE FUNCTION tube_list(tbl regclass = NULL) RETURNS TABLE (
    tube text, predicate text, partitions integer, tbl regclass, shard integer,
    table_predicate text, routing text, unattached regclass[], key name[], keys text
)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    WITH RECURSIVE attached AS MATERIALIZED (
        SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl
        WHERE x.tbl = x.root AND ($1 IS NULL OR x.tbl = $1)
    ), tree (root, member, depth) AS (  -- of all tables at once: one by one, a thousand tables take seconds
        SELECT DISTINCT a.tbl::oid, a.tbl::oid, 0 FROM attached a
        UNION
        SELECT tree.root, i.inhrelid, tree.depth + 1 FROM tree JOIN pg_inherits i ON i.inhparent = tree.member
    ), without AS MATERIALIZED (
        SELECT m.tube, m.root, array_agg(m.member::regclass ORDER BY m.depth, m.member) AS members
        FROM (
            SELECT a.tube, tree.root, tree.member, min(tree.depth) AS depth
            FROM attached a JOIN tree ON tree.root = a.tbl GROUP BY 1, 2, 3
        ) AS m LEFT JOIN tube_attachment x ON x.tube = m.tube AND x.tbl = m.member
        WHERE x.tbl IS NULL GROUP BY 1, 2
    )
    SELECT r.tube, r.predicate, r.partitions, a.tbl, a.shard, a.predicate, a.routing,
        CASE WHEN a.tbl IS NOT NULL THEN coalesce(w.members, '{}') END, a.key, r.keys
    FROM tube_registry r LEFT JOIN attached a ON a.tube = r.tube LEFT JOIN without w ON w.tube = a.tube AND w.root = a.tbl
    WHERE $1 IS NULL OR a.tbl = $1
    ORDER BY r.tube, a.shard, a.tbl
$$;
COMMENT ON FUNCTION tube_list(regclass) IS 'Tubes and the tables attached to them';

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

-- tube_figures(t, exact): the pods in each partition of a tube, a row for each kind of pods (backfill or not): their
-- number, their ids, how many are control pods, and the lowest and highest seq with their times. The cost is bounded: one
-- pass over the table if it has at most exact / 4 pages. Otherwise up to exact / 2 / partitions pods of each partition and
-- kind are counted, and where there are more, all are estimated from a sample of exact / 10 pages: estimated is true then.
-- So dead pods that VACUUM may not remove cost nothing while few wait. Seqs and times are always exact. Writes nothing.
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

-- tube_stats_of(name, exact): one row per partition of a tube. inc_ columns are about regular pods, backfill_ columns about
-- pods of op B. Control pods count in one of the two groups and in control_count. Times belong to the pods with the lowest
-- and highest seq. shards are the shards of attached tables in the partition. inc_ids and backfill_ids count ids. If the
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

-- tube_stats(exact): as tube_stats_of, for all tubes, by name and partition.
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
