-- The triggers that note changes of attached tables, and their functions: one for each tube, predicate and owner.

-- tube_noted_sql(tube, insertion): an INSERT of a trigger function with a comment. Writes nothing itself. A column that the
-- statement names may be renamed, dropped or get another type. Then each write of the table fails, and Postgres shows the
-- statement. So whoever writes learns what to do. A write that succeeds pays nothing for it; a block with EXCEPTION would
-- cost each write a subtransaction.
CREATE OR REPLACE FUNCTION tube_noted_sql(tube text, insertion text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT E'\n        INSERT ' || format(
        '/* This records this write in tube %1$s of replicad. If it fails, a column of the table was renamed, dropped or '
        'has another type. Attach the table again with a --predicate and --routing that fit: replicad tubes attach %1$s '
        'TABLE; or stop recording it: replicad tubes detach %1$s TABLE */',
        replace(replace(tube, '*/', '* /'), '/*', '/ *'))  -- comments nest
        || substr(ltrim(insertion, E' \n'), length('INSERT') + 1)
$$;

-- tube_few_sql(tube, op, rows, rows_before): the statement for the usual case: at most 16 rows of one shard become one
-- pod with one plain INSERT. For no rows, for more rows, and if rows_before (a query like rows, or NULL) returns other
-- ids, it inserts nothing and FOUND is false. Writes nothing itself.
CREATE OR REPLACE FUNCTION tube_few_sql(tube text, op text, rows text, rows_before text) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT tube_noted_sql(tube, format($sql$
        INSERT INTO %1$s (op, shard, ids)
        SELECT %2$s, TG_ARGV[0]::integer, few.ids
        FROM (SELECT ARRAY(%3$s LIMIT 17) AS ids%4$s OFFSET 0) AS few
        WHERE cardinality(few.ids) BETWEEN 1 AND 16%5$s;
        IF FOUND THEN
            RETURN NEW;
        END IF;
    $sql$, tube_relation(tube), op, rows,
        ', ARRAY(' || rows_before || ' LIMIT 17) AS ids_before',
        CASE WHEN rows_before IS NOT NULL THEN ' AND few.ids = few.ids_before' END))
$$;

-- tube_many_sql(tube, op, rows, rows_before, touched, size): the statements for what tube_few_sql leaves over: the ids of at
-- most a million rows of one shard are collected in one array, which is cut into pods of `size`. For no rows in the
-- transition table `touched` the trigger function ends there. For more rows, and if rows_before returns other ids,
-- they insert nothing and the function goes on. Writes nothing itself.
--
-- This takes a quarter of the time of tube_insert_sql, which numbers, sorts and groups the rows, and which has no
-- bound. For a single row it takes a tenth more than tube_few_sql.
CREATE OR REPLACE FUNCTION tube_many_sql(tube text, op text, rows text, rows_before text, touched text, size integer)
RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT tube_noted_sql(tube, format($sql$
        INSERT INTO %1$s (op, shard, ids)
        SELECT %2$s, TG_ARGV[0]::integer, cut.ids[cut.k:cut.k + %8$s]
        FROM (
            SELECT many.ids, generate_series(1, cardinality(many.ids), %7$s) AS k
            FROM (SELECT ARRAY(%3$s LIMIT 1000001) AS ids%4$s OFFSET 0) AS many
            WHERE cardinality(many.ids) <= 1000000%5$s
        ) AS cut;
        IF FOUND OR NOT EXISTS (SELECT FROM %6$s) THEN
            RETURN NEW;
        END IF;
    $sql$, tube_relation(tube), op, rows,
        ', ARRAY(' || rows_before || ' LIMIT 1000001) AS ids_before',
        CASE WHEN rows_before IS NOT NULL THEN ' AND many.ids = many.ids_before' END, touched, size, size - 1))
$$;

-- tube_trigger_body(tube, key, kind, predicate, routing): the source of the trigger function that inserts pods for the rows
-- of a statement. predicate is the result of tube_where. The function gets the shard as its argument. Writes nothing itself.
--
-- An update touches the new rows. If a row no longer passes the predicate, or has another shard or id, the old row is
-- touched too, because the downstream must delete it. A row that was moved (tube_moves) is touched by triggers for each row.
-- variable_conflict use_column: a column of the table may have the name of a variable.
-- RETURN NEW, which is NULL in a trigger of statements, takes no expression: plpgsql would prepare one once in each transaction.
CREATE OR REPLACE FUNCTION tube_trigger_body(tube text, key name[], kind text, predicate text, routing text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $outer$
DECLARE
    rows_now text := tube_rows_sql('tube_new_rows', key, kind, predicate, routing);
    rows_before text := tube_rows_sql('tube_old_rows', key, kind, predicate, routing);
    moved text[] := ARRAY(
        SELECT tube_noted_sql(tube, tube_insert_sql(tube, tube_op_sql('''U'''), 'TG_ARGV[0]::integer',
            tube_rows_sql(format('(SELECT %s.*)', row), key, kind, predicate, routing), routed => routing IS NOT NULL))
        FROM unnest('{NEW,OLD}'::text[]) AS row);
    rows_either text := format('(%1$s) UNION ALL ((%2$s) EXCEPT (%1$s))', rows_now, rows_before);
    event record;
    body text := '';
BEGIN
    FOR event IN SELECT * FROM (VALUES
        ('UPDATE', 'U', rows_now, rows_either, rows_before, 'tube_new_rows'),
        ('INSERT', 'I', rows_now, rows_now, NULL, 'tube_new_rows'),
        ('DELETE', 'D', rows_before, rows_before, NULL, 'tube_old_rows')
    ) AS e (name, op, few, rows, few_before, touched) LOOP
        body := body || format(E'    IF TG_OP = %L THEN%s%s;\n        RETURN NEW;\n    END IF;\n',
            event.name,
            CASE WHEN routing IS NULL THEN
                tube_few_sql(tube, tube_op_sql(quote_literal(event.op)), event.few, event.few_before)
                || tube_many_sql(tube, tube_op_sql(quote_literal(event.op)), event.few, event.few_before, event.touched,
                    tube_pod_size(kind))
            END,
            tube_noted_sql(tube, tube_insert_sql(tube, tube_op_sql(quote_literal(event.op)), 'TG_ARGV[0]::integer',
                event.rows, tube_pod_size(kind)::text, routed => routing IS NOT NULL)));
        IF event.name = 'UPDATE' THEN  -- behind it: an UPDATE is never called for a row, and pays nothing for the question
            body := body || format($sql$    IF TG_LEVEL = 'ROW' THEN
        IF TG_OP = 'INSERT' THEN%s;
        ELSE%s;
        END IF;
        RETURN NEW;
    END IF;
$sql$, moved[1], moved[2]);
        END IF;
    END LOOP;
    RETURN format(E'\n#variable_conflict use_column\nBEGIN\n%s    RETURN NEW;\nEND\n', body);
END
$outer$;

-- tube_trigger_ensure(tube, predicate, routing, path, tbl, key): creates the trigger function for attachments with their
-- own predicate, routing and key (predicate, routing NULL: none; their names are looked up in path) and returns its quoted
-- name. Attachments with the same of these share one function; those with the key id and no expression use {tube}_trigger.
-- Writes that function.
--
-- The function runs with its owner's rights, so that users who write to the table need no rights on the tube. It belongs to
-- the owner of tbl, whose code predicate, routing and the type of the key may run, and who gets the right to insert pods (which
-- {tube}_touch gives everybody); without tbl, and where tube_runs_as() says so, to us. It refers to replicad's objects with
-- their schema; its search_path is that of the expressions.
CREATE OR REPLACE FUNCTION tube_trigger_ensure(
    tube text, predicate text, routing text, path name[], tbl regclass = NULL, key name[] = '{id}'
) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_find(tube);
    owner oid := tube_runs_as(tbl);
    fixed boolean := coalesce(predicate, routing, t.predicate) IS NOT NULL OR t.keys = 'text';
    own boolean := predicate IS NOT NULL OR routing IS NOT NULL OR owner IS NOT NULL OR key <> '{id}';
    -- It does not depend on what tube_ensure_exists can change: that replaces the function, and not the triggers.
    hash text := left(md5(concat_ws(E'\n', coalesce(predicate, '-'), coalesce(routing, '-'), path::text,
        pg_get_userbyid(owner), nullif(key, '{id}')::text)), 12);
    name text := tube_object_name(tube, CASE WHEN own THEN '_trigger_' || hash ELSE '_trigger' END);
    body text := tube_trigger_body(tube, key, t.keys, tube_where(t.predicate, predicate), routing);
    setting text := tube_path_text(CASE WHEN own THEN t.path || path ELSE t.path END);
BEGIN
    IF NOT EXISTS (SELECT FROM pg_proc p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname = name
            AND p.prosrc = body AND p.prosecdef
            AND p.proconfig = ARRAY['search_path=' || setting] || CASE WHEN fixed THEN tube_fixed() ELSE '{}' END
            AND p.proowner = coalesce(owner, p.proowner)
            AND obj_description(p.oid, 'pg_proc') = 'replicad: touches tube ' || tube) THEN
        PERFORM tube_check_function(format('%I()', name));
        EXECUTE format('CREATE OR REPLACE FUNCTION %I() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER'
            ' SET search_path = %s%s AS %L', name, setting, CASE WHEN fixed THEN tube_fixed_sql() END, body);
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %I() FROM PUBLIC', name);
        EXECUTE format('COMMENT ON FUNCTION %I() IS %L', name, 'replicad: touches tube ' || tube);
        IF owner IS NULL AND coalesce(predicate, routing, t.predicate) IS NULL THEN  -- nobody's code is in it
            PERFORM tube_belong(format('FUNCTION %I()', name));
        ELSIF owner IS NOT NULL THEN
            PERFORM tube_give(format('%I.%I()', current_schema(), name), owner);
            EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', current_schema(), pg_get_userbyid(owner));
            EXECUTE format('GRANT USAGE ON SEQUENCE tube_seq TO %I', pg_get_userbyid(owner));
            EXECUTE format('GRANT INSERT (op, shard, ids, payload) ON %I TO %I', tube, pg_get_userbyid(owner));
        END IF;
    END IF;
    RETURN format('%I.%I', current_schema(), name);
END
$$;

-- tube_trigger_sweep(tube): drops the tube's trigger functions that no trigger uses, except {tube}_trigger.
CREATE OR REPLACE FUNCTION tube_trigger_sweep(tube text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    own name := tube_object_name(tube, '_trigger');
    stale regprocedure;
BEGIN
    FOR stale IN
        WITH ours AS MATERIALIZED (  -- few: no index leads from a function to its triggers
            SELECT p.oid FROM pg_proc p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.prorettype = 'trigger'::regtype
                AND p.proname <> own AND 'replicad: touches tube ' || tube = (SELECT d.description FROM pg_description d
                    WHERE d.objoid = p.oid AND d.classoid = 'pg_proc'::regclass AND d.objsubid = 0)
        )
        SELECT o.oid FROM ours o WHERE NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgfoid = o.oid)
    LOOP
        PERFORM tube_check_function(stale::text);
        EXECUTE format('DROP FUNCTION %s', stale);
    END LOOP;
END
$$;

-- tube_truncate_trigger(tube): BEFORE TRUNCATE trigger of attached tables; touches every id of the table as deleted. Writes
-- the tube. Postgres fires it for each partition or heir that a TRUNCATE reaches, so each table touches its own rows, and
-- the rows of partitions or heirs that were created after the attachment and have no trigger yet.
--
-- It reads the table with the rights of the table's owner. If row security would hide rows, it fails instead of missing them.
--
-- TRUNCATE removes all rows, but a transaction above READ COMMITTED reads with its snapshot, in which rows that were
-- committed later are missing. Their ids would not be touched, so there TRUNCATE is refused (RT005). Nothing in SQL shows
-- whether the snapshot is as new as the lock.
CREATE OR REPLACE FUNCTION tube_truncate_trigger() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
DECLARE
    a tube_attachment;
    t tube_registry;
    source text;
    rows text;
    touch text;
BEGIN
    SELECT * INTO a FROM tube_attachment x WHERE x.tube = TG_ARGV[0] AND x.tbl = TG_RELID;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        PERFORM tube_refuse('RT005',
            format('table %s is attached to tube %L, so TRUNCATE needs the isolation level READ COMMITTED, and this '
                'transaction is %s: rows that were committed after it began would be removed and not recorded',
                TG_RELID::regclass, a.tube, upper(current_setting('transaction_isolation'))),
            'run TRUNCATE in a transaction of its own at READ COMMITTED, or use DELETE');
    END IF;
    t := tube_find(a.tube);
    SELECT format('(SELECT * FROM %s WHERE tableoid = ANY (%L::oid[]))', tube_qualified(TG_RELID), array_agg(m::oid))
        INTO source
        FROM tube_members(TG_RELID) m
        WHERE m = TG_RELID OR NOT EXISTS (SELECT FROM tube_attachment x WHERE x.tube = a.tube AND x.tbl = m);
    rows := tube_rows_sql(source, a.key, t.keys, tube_where(t.predicate, a.predicate), a.routing);
    IF tube_runs_as(TG_RELID) IS NOT NULL THEN
        rows := format('SELECT r.tube_shard, r.id::%s AS id FROM %I.tube_owner_rows(%L::oid::regclass, %L, %L) AS r', t.keys,
            current_schema(), TG_RELID, format('SELECT %s AS tube_shard, found.id, 0 AS n FROM (%s) AS found',
                CASE WHEN a.routing IS NULL THEN 'NULL' ELSE 'found.tube_shard' END, rows),
            tube_path_text(t.path || a.path));
    END IF;
    touch := tube_insert_sql(a.tube, tube_op_sql('''D'''), a.shard::text, rows, tube_pod_size(t.keys)::text,
        routed => a.routing IS NOT NULL);
    PERFORM set_config('search_path', tube_path_text(t.path || a.path), true);
    EXECUTE touch;
    RETURN NULL;
END
$$;
REVOKE EXECUTE ON FUNCTION tube_truncate_trigger() FROM PUBLIC;
DO $$ BEGIN EXECUTE 'ALTER FUNCTION tube_truncate_trigger()' || tube_fixed_sql(); END $$;

-- tube_moves(): BEFORE UPDATE trigger of partitioned tables, for each row in which a column changes that a partition depends on; its
-- arguments are the tube, these columns, and the name of a setting. A MERGE shows the rows that it moves to another partition to no trigger of
-- statements: Postgres (15 and 18 do) takes them for deleted and inserted ones, and fires the triggers of DELETE and INSERT only for actions of
-- these names. Triggers for each row see them. So where the statement may be a MERGE, this turns those on, by the setting, and the row's own
-- insertion turns them off. It is none if it stands in the context, or in what the client has sent, without that word; EXECUTE and
-- functions in SQL hide the text. Writes nothing.
CREATE OR REPLACE FUNCTION tube_moves() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
{moves}$$;

-- tube_moves_columns(tbl): the columns on which the partitions of a table depend, at any depth. NULL where one depends on an expression.
CREATE OR REPLACE FUNCTION tube_moves_columns(tbl regclass) RETURNS name[]
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
{moves_columns}$$;

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
                    'tube_attempt', 'tube_own_shard', 'tube_worker', 'tube_version')
            ) THEN 'it is a table of the tubes themselves'
            WHEN c.relpersistence = 't' THEN 'it is temporary'
            WHEN c.relkind NOT IN ('r', 'p') THEN 'it is no ordinary or partitioned table'
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
            LEFT JOIN tube_attachment a ON a.tube = tube_check_table.tube AND a.tbl = c.oid
        ORDER BY 1 LIMIT 1;
    IF fault IS NOT NULL THEN
        PERFORM tube_refuse('RT005', format('table %s cannot be attached to tube %L: %s', tbl, tube, fault),
            'a table of a tube is ordinary or partitioned, may be read by the owner of the tubes, and is attached to a tube'
            ' once');
    END IF;
END
$$;

-- tube_trigger_name(tbl, tube, moment): {table}_{tube}_{moment}_trigger. Writes nothing.
CREATE OR REPLACE FUNCTION tube_trigger_name(tbl regclass, tube text, moment text) RETURNS name
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT tube_object_name(format('%s_%s', c.relname, tube), format('_%s_trigger', moment))
    FROM pg_class c WHERE c.oid = tbl
$$;

-- tube_triggers_of(tube, tbl): the tube's triggers on one table: name, event (4 INSERT, 16 UPDATE, 8 DELETE, 32 TRUNCATE; 1 more for
-- those of rows, and 7 for the one before INSERT), the function, its argument (of several: as pg_trigger has them, escaped), and whether
-- it fires. They are found by the functions that they call, because a table and its triggers can be renamed. Those that a
-- partition has from its table are left out. Writes nothing.
CREATE OR REPLACE FUNCTION tube_triggers_of(tube text, tbl regclass)
RETURNS TABLE (name name, event integer, function regprocedure, argument text, fires boolean)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT g.tgname, CASE g.tgtype WHEN 7 THEN 7 ELSE g.tgtype & 61 END, p.oid::regprocedure,
        CASE WHEN g.tgnargs = 1 THEN convert_from(substring(g.tgargs FROM 1 FOR length(g.tgargs) - 1), getdatabaseencoding())
            ELSE encode(g.tgargs, 'escape') END,
        g.tgenabled IN ('O', 'A') AND (g.tgqual IS NULL OR g.tgtype & 1 = 1)
    FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
    WHERE g.tgrelid = $2 AND g.tgparentid = 0 AND p.pronamespace = quote_ident(current_schema())::regnamespace
        AND ('replicad: touches tube ' || $1 = (SELECT d.description FROM pg_description d
                WHERE d.objoid = p.oid AND d.classoid = 'pg_proc'::regclass AND d.objsubid = 0)
            OR p.proname IN ('tube_truncate_trigger', 'tube_moves') AND position(tube_arguments(ARRAY[$1]) IN g.tgargs) = 1);
END
$$;

-- tube_arguments(arguments): how pg_trigger has the arguments of a trigger.
CREATE OR REPLACE FUNCTION tube_arguments(arguments text[]) RETURNS bytea
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT string_agg(convert_to(a.argument, getdatabaseencoding()) || decode('00', 'hex'), '' ORDER BY a.n) FROM unnest(arguments) WITH ORDINALITY AS a (argument, n)
$$;

-- tube_triggers_ensure(tube, tbl, function, shard): makes the tube have exactly one trigger for each event on one table: it
-- keeps a trigger that is as wanted, whatever its name, or replaces it, drops others, and creates missing triggers, under
-- another name if a trigger that does not belong to the tube has its name. Writes triggers.
--
-- A partitioned table has triggers for each row besides, from which the partitions have theirs. That for BEFORE INSERT never fires. Without it, Postgres 18
-- gives the AFTER UPDATE trigger of a MERGE the row that the MERGE inserted last in place of each row that it updates after that:
-- tcs_original_insert_tuple in its nodeModifyTable.c is left set. For the others see tube_moves. Triggers fire in the order of their names: ~ is
-- behind those of others, which may change a column on which a partition depends.
CREATE OR REPLACE FUNCTION tube_triggers_ensure(tube text, tbl regclass, function text, shard integer) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    moves name[] := tube_moves_columns(tbl);
    flag text := 'replicad.moves_t' || left(md5(tube), 12);
    rows boolean := EXISTS (SELECT FROM pg_class c WHERE c.oid = tbl AND c.relkind = 'p') AND NOT EXISTS (
        SELECT FROM pg_inherits i JOIN tube_attachment a ON a.tube = tube_triggers_ensure.tube AND a.tbl = i.inhparent
        WHERE i.inhrelid = tube_triggers_ensure.tbl);
    wanted record;
    present record;
    replaced name;
    kept boolean;
BEGIN
    FOR wanted IN
        SELECT CASE WHEN w.moment LIKE '~%' THEN tube_object_name('~replicad_' || tube, replace(w.moment, '~', '_'))
            ELSE tube_trigger_name(tbl, tube, w.moment) END AS name, w.*, to_regprocedure(w.function || '()') AS called
        FROM (VALUES
            (4, 'after_insert', 'AFTER INSERT', 'REFERENCING NEW TABLE AS tube_new_rows FOR EACH STATEMENT', function, ARRAY[shard::text]),
            (16, 'after_update', 'AFTER UPDATE', 'REFERENCING NEW TABLE AS tube_new_rows OLD TABLE AS tube_old_rows FOR EACH STATEMENT',
                function, ARRAY[shard::text]),
            (8, 'after_delete', 'AFTER DELETE', 'REFERENCING OLD TABLE AS tube_old_rows FOR EACH STATEMENT', function, ARRAY[shard::text]),
            (32, 'before_truncate', 'BEFORE TRUNCATE', 'FOR EACH STATEMENT', format('%I.tube_truncate_trigger', current_schema()), ARRAY[tube]),
            (7, '~merge', 'BEFORE INSERT', 'FOR EACH ROW WHEN (false)', format('%I.tube_moves', current_schema()), ARRAY[tube]),
            (17, '~moves', 'BEFORE UPDATE', 'FOR EACH ROW' || coalesce((
                SELECT format(' WHEN (NOT pg_catalog.record_image_eq(ROW(%s), ROW(%s)))', string_agg(format('OLD.%I', m), ', '), string_agg(format('NEW.%I', m), ', '))
                FROM unnest(moves) m HAVING count(*) > 0), ''), format('%I.tube_moves', current_schema()), ARRAY[tube, coalesce(moves::text, ''), flag]),
            (9, '~gone', 'AFTER DELETE', format('FOR EACH ROW WHEN (current_setting(%L, true) = ''on'')', flag), function, ARRAY[shard::text]),
            (5, '~come', 'AFTER INSERT', format('FOR EACH ROW WHEN (CASE WHEN current_setting(%1$L, true) = ''on'' THEN set_config(%1$L, ''off'', true) = ''off'' '
                'ELSE false END)', flag), function, ARRAY[shard::text])
        ) AS w (bit, moment, event, form, function, arguments)
        WHERE rows OR w.bit & 1 = 0
    LOOP
        replaced := NULL;
        kept := false;
        FOR present IN SELECT * FROM (
            SELECT x.*, x.fires AND (x.function, x.argument) = (wanted.called,
                CASE cardinality(wanted.arguments) WHEN 1 THEN wanted.arguments[1] ELSE encode(tube_arguments(wanted.arguments), 'escape') END) AS fits
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
            FOR n IN 1..1000 LOOP  -- the first name that is free
                replaced := CASE WHEN n = 1 THEN wanted.name ELSE tube_trigger_name(tbl, tube, wanted.moment || '_' || n) END;
                EXIT WHEN NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = tbl AND g.tgname = replaced);
            END LOOP;
        END IF;
        -- Replacing a trigger enables it, and does not make readers of the table wait as DROP TRIGGER does.
        EXECUTE format('CREATE OR REPLACE TRIGGER %I %s ON %s %s EXECUTE FUNCTION %s(%s)', replaced, wanted.event, tube_qualified(tbl), wanted.form,
            wanted.function, (SELECT string_agg(quote_literal(a), ', ' ORDER BY n) FROM unnest(wanted.arguments) WITH ORDINALITY AS w (a, n)));
    END LOOP;
    FOR replaced IN SELECT g.tgname FROM pg_trigger g WHERE g.tgrelid = tbl AND g.tgparentid <> 0 AND g.tgenabled = 'D'
        AND g.tgname IN (SELECT tube_object_name('~replicad_' || tube, m) FROM unnest('{_merge,_moves,_gone,_come}'::text[]) m)
    LOOP  -- which a partition has from its table
        EXECUTE format('ALTER TABLE %s ENABLE TRIGGER %I', tube_qualified(tbl), replaced);
    END LOOP;
END
$$;
