-- tube_backfill_schedule(tube, order_col, shard_from, shard_to): schedules a backfill of the attached tables with a
-- shard from shard_from to shard_to: it inserts a control pod backfill_schedule for each table that is neither being
-- backfilled nor scheduled, and returns how many. A backfill in another order, scheduled or begun, is replaced. Raises
-- RT001, RT005. Writes the tube, tube_backfill and tube_shard.
CREATE OR REPLACE FUNCTION tube_backfill_schedule(tube text, order_col text, shard_from integer, shard_to integer)
RETURNS integer
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_lock(tube);
    a tube_attachment;
    scheduled integer := 0;
    present boolean;
BEGIN
    FOR a IN SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl
        WHERE x.tube = t.tube AND x.tbl = x.root AND x.shard BETWEEN shard_from AND shard_to
        ORDER BY x.shard, x.tbl::oid
    LOOP
        PERFORM tube_attached(a.tube, a.tbl, order_col);
        IF EXISTS (SELECT FROM tube_backfill b WHERE b.tube = a.tube AND b.tbl = a.tbl AND NOT b.finished
                AND b.order_col <> tube_backfill_schedule.order_col) THEN
            PERFORM tube_backfill_stop(a.tube, a.tbl);
        END IF;
        CONTINUE WHEN tube_backfilling(a.tube, a.tbl, a.shard);
        EXECUTE format('SELECT EXISTS (SELECT FROM %I p WHERE cardinality(p.ids) = 0 AND p.shard = $1'
            ' AND p.payload ->> ''type'' = ''backfill_schedule'' AND p.payload ->> ''oid'' = $2'
            ' AND p.payload ->> ''order_col'' = $3)', t.tube) INTO present USING a.shard, a.tbl::oid::text, order_col;
        CONTINUE WHEN present;
        PERFORM tube_backfill_unschedule(a.tube, a.tbl);
        EXECUTE format('INSERT INTO %I (op, shard, ids, payload) VALUES (''B'', $1, ''{}'', $2)', t.tube)
            USING a.shard, jsonb_build_object('type', 'backfill_schedule', 'tbl', tube_qualified(a.tbl),
                'oid', a.tbl::oid::text, 'order_col', order_col);
        scheduled := scheduled + 1;
    END LOOP;
    RETURN scheduled;
END
$$;
COMMENT ON FUNCTION tube_backfill_schedule(text, text, integer, integer) IS 'Asks for backfills of a range of shards';
