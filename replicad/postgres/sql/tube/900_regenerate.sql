-- The functions that are made per tube and per table, and the triggers, as this version makes them.
DO $regenerate$
DECLARE
    r tube_registry;
    a tube_attachment;
BEGIN
    FOR r IN SELECT * FROM tube_registry ORDER BY tube FOR NO KEY UPDATE LOOP
        PERFORM tube_index_ensure(r.tube, r.partitions);
        PERFORM tube_touch_ensure(r.tube);
        PERFORM tube_trigger_ensure(r.tube, NULL, NULL, '{}');
        FOR a IN SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl
            WHERE x.tube = r.tube ORDER BY x.tbl::oid
        LOOP
            PERFORM tube_triggers_ensure(
                r.tube, a.tbl, tube_trigger_ensure(r.tube, a.predicate, a.routing, a.path), a.shard);
        END LOOP;
    END LOOP;
    PERFORM tube_table_touch_sweep();
    PERFORM tube_table_touch_ensure(x.tbl) FROM tube_attachment x WHERE x.tbl = x.root GROUP BY x.tbl;
END
$regenerate$;
