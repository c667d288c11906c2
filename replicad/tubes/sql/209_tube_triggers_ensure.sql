-- tube_infer_shard(tbl): the number at the end of the name of the table's schema, or NULL. Writes nothing.
CREATE OR REPLACE FUNCTION tube_infer_shard(tbl regclass) RETURNS integer
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN digits::numeric <= 2147483647 THEN digits::numeric::integer END
    FROM (
        SELECT substring(n.nspname FROM '[0-9]+$') AS digits
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl
    ) AS schema_name
$$;
COMMENT ON FUNCTION tube_infer_shard(regclass) IS 'The number that ends the name of a table''s schema';

-- tube_check_table(tube, tbl): raises RT005 if a table or one of its partitions cannot be attached. Writes nothing.
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

-- tube_triggers_ensure(tube, tbl, function, shard): creates those of the tube's four triggers on one table that are
-- missing or different. Writes triggers.
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
