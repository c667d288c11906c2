-- tube_table_ensure_detached(tube, tbl): detaches the table and its partitions from the tube (tube NULL: from all
-- tubes): changes of rows no longer touch the tube. Pods in the tube stay. Does nothing if the table is not attached.
-- Raises RT005 for a partition that was attached through its table. Writes tube_attachment, tube_backfill, triggers,
-- functions.
CREATE OR REPLACE FUNCTION tube_table_ensure_detached(tube text, tbl regclass) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    a tube_attachment;
    member regclass;
BEGIN
    PERFORM tube_lock(x.tube) FROM (
        SELECT y.tube FROM tube_attachment y
        WHERE y.tbl = tube_table_ensure_detached.tbl AND y.tube = coalesce(tube_table_ensure_detached.tube, y.tube)
        ORDER BY y.tube
    ) AS x;
    PERFORM tube_lock_table(tbl);
    FOR a IN SELECT x.* FROM tube_attachment x
        WHERE x.tbl = tube_table_ensure_detached.tbl AND x.tube = coalesce(tube_table_ensure_detached.tube, x.tube)
        ORDER BY x.tube
    LOOP
        IF a.root <> a.tbl THEN
            PERFORM tube_refuse('RT005', format('table %s is attached to tube %L through %s', tbl, a.tube, a.root),
                format('detach %s', a.root));
        END IF;
        FOR member IN SELECT x.tbl FROM tube_attachment x WHERE x.tube = a.tube AND x.root = a.tbl LOOP
            PERFORM tube_member_detach(a.tube, member);
        END LOOP;
        PERFORM tube_backfill_unschedule(a.tube, a.tbl);
        PERFORM tube_backfill_stop(a.tube, a.tbl);
        PERFORM tube_shards_note(b.tube, b.shards) FROM tube_backfill b WHERE b.tube = a.tube AND b.tbl = a.tbl;
        DELETE FROM tube_backfill b WHERE b.tube = a.tube AND b.tbl = a.tbl;
        PERFORM tube_trigger_sweep(a.tube);
    END LOOP;
    PERFORM tube_table_touch_sweep();
    IF EXISTS (SELECT FROM tube_attachment x WHERE x.tbl = tube_table_ensure_detached.tbl AND x.root = x.tbl) THEN
        PERFORM tube_table_touch_ensure(tbl);
    END IF;
END
$$;
COMMENT ON FUNCTION tube_table_ensure_detached(text, regclass)
    IS 'Detaches a table from a tube, or from all (tube NULL)';
