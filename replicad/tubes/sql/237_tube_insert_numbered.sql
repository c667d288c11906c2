-- tube_progress(first, last, every, total): true; raises a NOTICE if there is a multiple of every between the numbers
-- of the first and the last id of a pod. total is approximate, or NULL. Writes nothing.
CREATE OR REPLACE FUNCTION tube_progress(first bigint, last bigint, every integer, total bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    IF last / every > first / every THEN
        RAISE NOTICE '% ids%', last / every * every,
            coalesce(' of about ' || total || ' (' || least(100, 100 * last / nullif(total, 0)) || ' %)', '');
    END IF;
    RETURN true;
END
$$;

-- tube_insert_numbered(tubes, query, path, shard, op, total, every, chunk): puts the ids of a query into pods of chunk
-- ids in each of the tubes; returns how many ids. The query returns id and n, from 0 without gaps, which is the order
-- of the pods. If shard is NULL, it also returns shard, and n counts per shard. It runs under the search_path path.
-- Reports its progress with tube_progress. Memory is bounded by work_mem. Writes the tubes.
CREATE OR REPLACE FUNCTION tube_insert_numbered(
    tubes text[], query text, path text, shard integer, op character, total bigint, every integer, chunk integer
) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT SET jit = off AS $$
DECLARE
    statement text := format($sql$
        WITH pods AS MATERIALIZED (
            SELECT counted.shard, counted.pod, counted.ids
            FROM (
                SELECT placed.*, sum(cardinality(placed.ids)) OVER (ORDER BY placed.shard, placed.pod)::bigint AS upto
                FROM (
                    SELECT %1$s AS shard, numbered.n / %2$s AS pod, array_agg(numbered.id ORDER BY numbered.n) AS ids
                    FROM (%3$s) AS numbered GROUP BY 1, 2
                ) AS placed
            ) AS counted
            WHERE %4$I.tube_progress(counted.upto - cardinality(counted.ids), counted.upto, $2, $3)
            ORDER BY counted.shard, counted.pod
        )
        $sql$, coalesce(shard::text, 'numbered.shard'), chunk, query, current_schema());
    inserts text;
    inserted bigint;
BEGIN
    SELECT string_agg(format(', into%s AS (INSERT INTO %s (op, shard, ids) SELECT %s, pods.shard, pods.ids FROM pods'
            ' ORDER BY pods.shard, pods.pod RETURNING cardinality(ids) AS ids)',
            g.n, tube_relation(g.tube), tube_op_sql('$1')), '' ORDER BY g.n)
        INTO inserts FROM unnest(tubes) WITH ORDINALITY AS g(tube, n);
    PERFORM set_config('search_path', path, true);
    EXECUTE statement || inserts || ' SELECT coalesce(sum(ids), 0) FROM into1' INTO inserted USING op, every, total;
    RETURN inserted;
END
$$;

-- tube_split(tube_or_tubes): the tube of that name, or the tubes of a list with commas. Raises RT001.
-- Writes nothing.
CREATE OR REPLACE FUNCTION tube_split(tube_or_tubes text) RETURNS text[]
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT array_agg((tube_find(name)).tube ORDER BY n)
    FROM unnest(CASE WHEN EXISTS (SELECT FROM tube_registry r WHERE r.tube = tube_or_tubes) THEN ARRAY[tube_or_tubes]
        ELSE regexp_split_to_array(btrim(tube_or_tubes, ' {}'), ' *, *') END) WITH ORDINALITY AS g(name, n)
$$;
