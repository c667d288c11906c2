-- Creates the functions of each tube and table, and the triggers, in the form of this version. A tube or table for
-- which this fails (e.g. its table was dropped by hand) stays as it is; the others are updated.
DO $regenerate$
DECLARE
    r tube_registry;
    a tube_attachment;
BEGIN
    FOR r IN SELECT * FROM tube_registry ORDER BY tube FOR NO KEY UPDATE LOOP
        BEGIN
            PERFORM tube_triggers_check(r.tube);
            PERFORM tube_index_ensure(r.tube, r.partitions);
            PERFORM tube_touch_ensure(r.tube);
            PERFORM tube_trigger_ensure(r.tube, NULL, NULL, '{}');
            FOR a IN SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl
                WHERE x.tube = r.tube ORDER BY x.tbl::oid
            LOOP
                PERFORM tube_triggers_ensure(
                    r.tube, a.tbl, tube_trigger_ensure(r.tube, a.predicate, a.routing, a.path, a.root, a.key),
                    a.shard);
            END LOOP;
            PERFORM tube_triggers_note(r.tube);
        EXCEPTION WHEN OTHERS THEN
            IF left(SQLSTATE, 2) IN ('40', '53', '54', '55', '57', '58') THEN
                RAISE;  -- a lock, the disk, a deadlock: nothing is wrong with the tube
            END IF;
            RAISE WARNING 'tube % keeps the functions that it had: %', r.tube, SQLERRM;
        END;
    END LOOP;
    PERFORM tube_table_touch_sweep();
    FOR a IN SELECT x.* FROM tube_attachment x WHERE x.tbl = x.root AND x.tube = (
        SELECT min(y.tube) FROM tube_attachment y WHERE y.tbl = x.tbl AND y.tbl = y.root)
    LOOP
        BEGIN
            PERFORM tube_table_touch_ensure(a.tbl);
        EXCEPTION WHEN OTHERS THEN
            IF left(SQLSTATE, 2) IN ('40', '53', '54', '55', '57', '58') THEN
                RAISE;
            END IF;
            RAISE WARNING 'table % keeps its function for touching by hand: %', a.tbl, SQLERRM;
        END;
    END LOOP;
END
$regenerate$;
