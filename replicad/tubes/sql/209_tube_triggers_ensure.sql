-- tube_infer_shard(tbl): the number at the end of the name of the table's schema, or NULL. Writes nothing.
CREATE OR REPLACE FUNCTION tube_infer_shard(tbl regclass) RETURNS integer
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN digits::numeric <= 2147483647 THEN digits::numeric::integer END
    FROM (
        SELECT substring(n.nspname FROM '[0-9]+$') AS digits
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl
    ) AS schema_name
$$;

-- tube_check_table(tube, tbl): raises RT005 if a table or one of its partitions cannot be attached. Writes nothing.
CREATE OR REPLACE FUNCTION tube_check_table(tube text, tbl regclass) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    fault text;
BEGIN
    SELECT CASE
            WHEN c.relnamespace = quote_ident(current_schema())::regnamespace AND (
                c.relname IN (SELECT r.tube FROM tube_registry r) OR c.relname IN ('tube_registry', 'tube_attachment',
                    'tube_lease', 'tube_parked', 'tube_backfill', 'tube_report', 'tube_shard', 'tube_low',
                    'tube_version')
            ) THEN 'it is a table of the tubes themselves'
            WHEN c.relpersistence = 't' THEN 'it is temporary'
            WHEN c.relkind NOT IN ('r', 'p') THEN 'it is no ordinary or partitioned table'
            WHEN i.atttypid IS NULL THEN 'it has no column called id'
            WHEN i.atttypid NOT IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype) THEN
                format('its id is %s and not bigint', format_type(i.atttypid, i.atttypmod))
            WHEN c.oid <> tube_check_table.tbl AND a.root = a.tbl THEN 'it is attached by itself'
            WHEN a.root <> tube_check_table.tbl THEN format('it is attached through %s', a.root)
            WHEN NOT has_table_privilege(f.proowner, c.oid, 'SELECT') THEN
                format('%s, who owns these functions, may not read it; run: GRANT %s TO %1$s', f.proowner::regrole, CASE
                    WHEN (SELECT r.rolsuper FROM pg_roles r WHERE r.oid = c.relowner) THEN format('SELECT ON %s', c.oid::regclass)
                    ELSE c.relowner::regrole::text END)
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

-- tube_trigger_name(tbl, tube, moment): {table}_{tube}_{moment}_trigger. Writes nothing.
CREATE OR REPLACE FUNCTION tube_trigger_name(tbl regclass, tube text, moment text) RETURNS name
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT tube_object_name(format('%s_%s', c.relname, tube), format('_%s_trigger', moment))
    FROM pg_class c WHERE c.oid = tbl
$$;

-- tube_triggers_of(tube, tbl): the tube's triggers on one table: name, event (4 INSERT, 16 UPDATE, 8 DELETE, 32 TRUNCATE),
-- the function, its argument, and whether it fires. They are found by the functions that they call, because a table
-- and its triggers can be renamed. Writes nothing.
CREATE OR REPLACE FUNCTION tube_triggers_of(tube text, tbl regclass)
RETURNS TABLE (name name, event integer, function regprocedure, argument text, fires boolean)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT g.tgname, g.tgtype & 60, p.oid::regprocedure,
        CASE WHEN g.tgnargs = 1 THEN
            convert_from(substring(g.tgargs FROM 1 FOR length(g.tgargs) - 1), getdatabaseencoding()) END,
        g.tgenabled IN ('O', 'A') AND g.tgqual IS NULL AND g.tgtype & 1 = 0
    FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
    WHERE g.tgrelid = $2 AND p.pronamespace = quote_ident(current_schema())::regnamespace
        AND (obj_description(p.oid, 'pg_proc') = 'replicad: touches tube ' || $1
            OR p.proname = 'tube_truncate_trigger'
                AND g.tgargs = convert_to($1, getdatabaseencoding()) || decode('00', 'hex'))
$$;

-- tube_triggers_ensure(tube, tbl, function, shard): makes the tube have exactly one trigger for each event on one table:
-- it keeps one that is as wanted, whatever its name, or replaces one, drops others, and creates what is
-- missing, under another name if a trigger that is not the tube's has its name. Writes triggers.
CREATE OR REPLACE FUNCTION tube_triggers_ensure(tube text, tbl regclass, function text, shard integer) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    wanted record;
    present record;
    replaced name;
    kept boolean;
BEGIN
    FOR wanted IN
        SELECT tube_trigger_name(tbl, tube, w.moment) AS name, w.*, to_regprocedure(w.function || '()') AS called
        FROM (VALUES
            (4, 'after_insert', 'AFTER INSERT', 'REFERENCING NEW TABLE AS tube_new_rows', function, shard::text),
            (16, 'after_update', 'AFTER UPDATE', 'REFERENCING NEW TABLE AS tube_new_rows OLD TABLE AS tube_old_rows',
                function, shard::text),
            (8, 'after_delete', 'AFTER DELETE', 'REFERENCING OLD TABLE AS tube_old_rows', function, shard::text),
            (32, 'before_truncate', 'BEFORE TRUNCATE', '', format('%I.tube_truncate_trigger', current_schema()), tube)
        ) AS w (bit, moment, event, transitions, function, argument)
    LOOP
        replaced := NULL;
        kept := false;
        FOR present IN SELECT * FROM (
            SELECT x.*, x.fires AND (x.function, x.argument) = (wanted.called, wanted.argument) AS fits
            FROM tube_triggers_of(tube, tbl) x WHERE x.event = wanted.bit
        ) AS judged ORDER BY judged.fits DESC NULLS LAST, judged.name
        LOOP
            IF kept OR replaced IS NOT NULL THEN
                EXECUTE format('DROP TRIGGER %I ON %s', present.name, tube_qualified(tbl));
            ELSIF present.fits THEN
                kept := true;
            ELSE
                replaced := present.name;
            END IF;
        END LOOP;
        CONTINUE WHEN kept;
        IF replaced IS NULL THEN  -- a trigger of the user may have the name
            SELECT free.name INTO replaced
                FROM generate_series(1, 1000) AS n, LATERAL (
                    SELECT CASE WHEN n = 1 THEN wanted.name
                        ELSE tube_trigger_name(tbl, tube, wanted.moment || '_' || n) END AS name) AS free
                WHERE NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = tbl AND g.tgname = free.name)
                ORDER BY n LIMIT 1;
        END IF;
        -- Replacing a trigger enables it, and does not make readers of the table wait as DROP TRIGGER does.
        EXECUTE format('CREATE OR REPLACE TRIGGER %I %s ON %s %s FOR EACH STATEMENT EXECUTE FUNCTION %s(%L)',
            replaced, wanted.event, tube_qualified(tbl), wanted.transitions, wanted.function,
            wanted.argument);
    END LOOP;
END
$$;
