-- tube_backfill_schedule(tube, order_col, shard_from, shard_to): schedules a backfill of the attached tables with a
-- shard from shard_from to shard_to: it inserts a control pod backfill_schedule for each table that is neither being
-- backfilled nor scheduled, and returns how many. Raises RT001, RT005. Writes the tube.
CREATE OR REPLACE FUNCTION tube_backfill_schedule(tube text, order_col text, shard_from integer, shard_to integer)
RETURNS integer
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_lock(tube);
    a tube_attachment;
    scheduled integer := 0;
    more integer;
BEGIN
    FOR a IN SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl
        WHERE x.tube = t.tube AND x.tbl = x.root AND x.shard BETWEEN shard_from AND shard_to
        ORDER BY x.shard, x.tbl::oid
    LOOP
        PERFORM tube_attached(a.tube, a.tbl, order_col);
        CONTINUE WHEN tube_backfilling(a.tube, a.tbl, a.shard);
        EXECUTE format('INSERT INTO %1$I (op, shard, ids, payload) SELECT ''B'', $1, ''{}'', $2 WHERE NOT EXISTS ('
            'SELECT FROM %1$I p WHERE cardinality(p.ids) = 0 AND p.shard = $1'
            ' AND p.payload ->> ''type'' = $2 ->> ''type'''
            ' AND p.payload ->> ''tbl'' = $2 ->> ''tbl'')', t.tube)
            USING a.shard, jsonb_build_object(
                'type', 'backfill_schedule', 'tbl', tube_qualified(a.tbl), 'order_col', order_col);
        GET DIAGNOSTICS more = ROW_COUNT;
        scheduled := scheduled + more;
    END LOOP;
    RETURN scheduled;
END
$$;
COMMENT ON FUNCTION tube_backfill_schedule(text, text, integer, integer) IS 'Asks for backfills of a range of shards';
