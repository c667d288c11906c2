-- tube_table_ensure_attached(tube, tbl, shard, predicate, routing, path): attaches the table, so that from now on
-- changes of its rows touch the tube, or alters the attachment; writes nothing if the attachment is already so.
--   shard      of all its rows; default: the number at the end of the name of the table's schema, or the present shard
--   predicate  SQL on a row, in addition to the tube's own: other rows are neither touched nor backfilled
--   routing    SQL on a row that gives its shard, an integer; shard replaces a NULL, and the sign bit of a negative
--              number is cleared. With a routing, the last default of shard is 0
--   path       where names of predicate and routing are looked up; by default the caller's search_path
-- Partitions and heirs are attached with their table. A statement on the table also touches the rows that it writes to
-- partitions that were created later. Statements on such a partition itself are missed until this function is called
-- again (tube_list().unattached shows them). Raises RT001, RT005. Writes tube_attachment, {table}_touch, and the
-- triggers {table}_{tube}_{after_insert,after_update,after_delete,before_truncate}_trigger, for which writers wait.
CREATE OR REPLACE FUNCTION tube_table_ensure_attached(
    tube text, tbl regclass, shard integer = NULL, predicate text = NULL, routing text = NULL,
    path name[] = current_schemas(false)
) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry;
    before tube_attachment;
    wanted tube_attachment;
    function text;
    member regclass;
BEGIN
    IF tbl IS NULL THEN
        PERFORM tube_refuse('RT005', 'no table to attach was named', 'name one');
    END IF;
    t := tube_lock(tube);
    PERFORM tube_lock_table(tbl);
    PERFORM tube_check_table(tube, tbl);
    SELECT * INTO before FROM tube_attachment a WHERE a.tube = t.tube AND a.tbl = tube_table_ensure_attached.tbl;
    wanted := (t.tube, tbl, tbl,
        coalesce(shard, tube_infer_shard(tbl), before.shard, CASE WHEN routing IS NOT NULL THEN 0 END),
        predicate, routing,
        CASE WHEN predicate IS NULL AND routing IS NULL THEN '{}' ELSE tube_safe_path(path) END);
    IF wanted.shard IS NULL OR wanted.shard < 0 THEN
        PERFORM tube_refuse('RT005',
            CASE WHEN shard IS NULL
                THEN format('no number ends the name of the schema of %s, so its shard is unknown', tbl)
                ELSE format('shard %s: a shard is a whole number from 0 up', shard) END,
            'give the shard as the third argument');
    END IF;
    PERFORM tube_reader_ensure(tbl);
    PERFORM tube_check_expression(tbl, 'predicate', t.predicate, t.path);
    PERFORM tube_check_expression(tbl, 'predicate', predicate, t.path || wanted.path);
    PERFORM tube_check_expression(tbl, 'routing', routing, t.path || wanted.path);
    function := tube_trigger_ensure(t.tube, predicate, routing, wanted.path, tbl);
    FOR member IN SELECT m FROM tube_members(tbl) m LOOP
        PERFORM tube_triggers_ensure(t.tube, member, function, wanted.shard);
        wanted.tbl := member;
        INSERT INTO tube_attachment SELECT wanted.* ON CONFLICT ON CONSTRAINT tube_attachment_pkey DO UPDATE
            SET shard = excluded.shard, predicate = excluded.predicate, routing = excluded.routing,
                path = excluded.path;
    END LOOP;
    FOR member IN SELECT a.tbl FROM tube_attachment a
        WHERE a.tube = t.tube AND a.root = tube_table_ensure_attached.tbl AND a.tbl NOT IN (SELECT tube_members(a.root))
    LOOP
        PERFORM tube_member_detach(t.tube, member);
    END LOOP;
    PERFORM tube_trigger_sweep(t.tube);
    PERFORM tube_table_touch_sweep();
    PERFORM tube_table_touch_ensure(tbl);
END
$$;
COMMENT ON FUNCTION tube_table_ensure_attached(text, regclass, integer, text, text, name[])
    IS 'Attaches a table to a tube, or alters the attachment to be as asked';
