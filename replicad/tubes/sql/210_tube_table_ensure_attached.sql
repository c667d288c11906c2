-- tube_infer_shard(tbl): the number that ends the name of the table's schema; NULL where none does. Writes nothing.
CREATE OR REPLACE FUNCTION tube_infer_shard(tbl regclass) RETURNS integer
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN digits::numeric <= 2147483647 THEN digits::numeric::integer END
    FROM (
        SELECT substring(n.nspname FROM '[0-9]+$') AS digits
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl
    ) AS schema_name
$$;
COMMENT ON FUNCTION tube_infer_shard(regclass) IS 'The number that ends the name of a table''s schema';

-- tube_check_table(tube, tbl): raises RT005 where a table or one of its partitions cannot be attached. Writes nothing.
CREATE OR REPLACE FUNCTION tube_check_table(tube text, tbl regclass) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    fault text;
BEGIN
    SELECT CASE
            WHEN c.relnamespace = quote_ident(current_schema())::regnamespace THEN 'it lies in the schema of the tubes'
            WHEN c.relpersistence = 't' THEN 'it is temporary'
            WHEN c.relkind NOT IN ('r', 'p') THEN 'it is no ordinary or partitioned table'
            WHEN i.atttypid IS NULL THEN 'it has no column called id'
            WHEN i.atttypid NOT IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype) THEN
                format('its id is %s and not bigint', format_type(i.atttypid, i.atttypmod))
            WHEN c.oid <> tube_check_table.tbl AND a.root = a.tbl THEN 'it is attached by itself'
            WHEN a.root <> tube_check_table.tbl THEN format('it is attached through %s', a.root)
            WHEN NOT has_table_privilege(f.proowner, c.oid, 'SELECT') THEN
                format('%s, who owns these functions, may not read it', f.proowner::regrole)
        END || CASE WHEN c.oid <> tube_check_table.tbl THEN format(' (partition %s)', c.oid::regclass) ELSE '' END
        INTO fault
        FROM tube_members(tbl) m JOIN pg_class c ON c.oid = m
            JOIN pg_proc f ON f.oid = to_regprocedure('tube_truncate_trigger()')
            LEFT JOIN pg_attribute i ON i.attrelid = c.oid AND i.attname = 'id' AND NOT i.attisdropped
            LEFT JOIN tube_attachment a ON a.tube = tube_check_table.tube AND a.tbl = c.oid
        ORDER BY 1 LIMIT 1;
    IF fault IS NOT NULL THEN
        PERFORM tube_refuse('RT005', format('table %s cannot be attached to tube %L: %s', tbl, tube, fault),
            'a table of a tube is ordinary or partitioned, has an id of type bigint, integer or smallint, may be read'
            ' by the owner of the tubes, and is attached to a tube once');
    END IF;
END
$$;
COMMENT ON FUNCTION tube_check_table(text, regclass) IS 'Refuses tables that cannot be attached';

-- tube_trigger_name(tbl, tube, moment): {table}_{tube}_{moment}_trigger. Writes nothing.
CREATE OR REPLACE FUNCTION tube_trigger_name(tbl regclass, tube text, moment text) RETURNS name
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT tube_object_name(format('%s_%s', c.relname, tube), format('_%s_trigger', moment))
    FROM pg_class c WHERE c.oid = tbl
$$;
COMMENT ON FUNCTION tube_trigger_name(regclass, text, text) IS 'The name of a tube''s trigger on a table';

-- tube_triggers_ensure(tube, tbl, function, shard): makes the tube's four triggers on one table, where they are not as
-- wanted. Writes triggers.
CREATE OR REPLACE FUNCTION tube_triggers_ensure(tube text, tbl regclass, function text, shard integer) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    wanted record;
    present text[];
BEGIN
    SELECT array_agg(format('%s|%s|%s', g.tgname, g.tgfoid, encode(g.tgargs, 'hex'))) INTO present
        FROM pg_trigger g WHERE g.tgrelid = tbl AND g.tgenabled IN ('O', 'A');  -- replacing a trigger enables it
    FOR wanted IN
        SELECT tube_trigger_name(tbl, tube, w.moment) AS name, w.*
        FROM (VALUES
            ('after_insert', 'AFTER INSERT', 'REFERENCING NEW TABLE AS tube_new_rows', function, shard::text),
            ('after_update', 'AFTER UPDATE', 'REFERENCING NEW TABLE AS tube_new_rows OLD TABLE AS tube_old_rows',
                function, shard::text),
            ('after_delete', 'AFTER DELETE', 'REFERENCING OLD TABLE AS tube_old_rows', function, shard::text),
            ('before_truncate', 'BEFORE TRUNCATE', '', format('%I.tube_truncate_trigger', current_schema()), tube)
        ) AS w (moment, event, transitions, function, argument)
    LOOP
        CONTINUE WHEN format('%s|%s|%s', wanted.name, to_regprocedure(wanted.function || '()')::oid,
            encode(convert_to(wanted.argument, getdatabaseencoding()) || decode('00', 'hex'), 'hex')) = ANY (present);
        EXECUTE format('CREATE OR REPLACE TRIGGER %I %s ON %s %s FOR EACH STATEMENT EXECUTE FUNCTION %s(%L)',
            wanted.name, wanted.event, tube_qualified(tbl), wanted.transitions, wanted.function, wanted.argument);
    END LOOP;
END
$$;
COMMENT ON FUNCTION tube_triggers_ensure(text, regclass, text, integer) IS 'Makes a tube''s triggers on one table';

-- tube_table_ensure_attached(tube, tbl, shard, predicate, routing, path): from now on what is written to the table
-- touches the tube; or alters an attachment to be as asked; nothing is written where it is so already.
--   shard      of all its rows; left out: the number that ends the name of the table's schema, else the present one
--   predicate  SQL on a row, on top of the tube's own: other rows are neither touched nor backfilled
--   routing    SQL on a row that yields its shard, an integer; NULL falls back to shard, a negative number loses its
--              sign. With it shard may be left out anywhere (then 0)
--   path       where names of predicate and routing are looked up; by default the caller's search_path
-- Partitions and heirs are attached with their table. A statement on the table touches also what it writes to
-- partitions made later; statements that name such a partition itself are missed until this function is called again
-- (tube_list().unattached shows them). Raises RT001, RT005. Writes tube_attachment, {table}_touch, and the triggers
-- {table}_{tube}_{after_insert,after_update,after_delete,before_truncate}_trigger, for which writers wait.
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
    PERFORM tube_check_expression(tbl, 'predicate', t.predicate, t.path);
    PERFORM tube_check_expression(tbl, 'predicate', predicate, t.path || wanted.path);
    PERFORM tube_check_expression(tbl, 'routing', routing, t.path || wanted.path);
    function := tube_trigger_ensure(t.tube, predicate, routing, wanted.path);
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
