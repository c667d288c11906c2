-- How tables are attached to a tube and detached from it.

-- tube_table_ensure_attached(tube, tbl, shard, predicate, routing, key, path): attaches the table, so that from now on
-- changes of its rows touch the tube, or alters the attachment; writes nothing if the attachment is already so.
--   shard      of all its rows; default: the number at the end of the name of the table's schema, or the present shard,
--              or the lowest number that no other table of the tube has
--   predicate  SQL on a row, in addition to the tube's own: other rows are neither touched nor backfilled
--   routing    SQL on a row that gives its shard, an integer; shard replaces a NULL, and the sign bit of a negative
--              number is cleared. With a routing, the last default of shard is 0
--   key        the columns that name a row; default: the present key, or the primary key, or else the column id. Rows
--              with a NULL in one of them are not recorded
--   path       where names of predicate and routing are looked up; by default the caller's search_path
-- Partitions and heirs are attached with their table. A statement on the table also touches the rows that it writes to
-- partitions that were created later. Statements on such a partition itself are missed until this function is called
-- again (tube_list().unattached shows them). The first table of a tube decides its kind of keys, if it has no pods yet.
-- Raises RT001, RT005. Writes tube_attachment, {table}_touch, and the
-- triggers {table}_{tube}_{after_insert,after_update,after_delete,before_truncate}_trigger, for which writers wait.
CREATE OR REPLACE FUNCTION tube_table_ensure_attached(
    tube text, tbl regclass, shard integer = NULL, predicate text = NULL, routing text = NULL,
    key name[] = NULL, path name[] = current_schemas(false)
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
    PERFORM tube_partitions_check(t.tube);
    PERFORM tube_triggers_check(t.tube, tbl);  -- if they were off, what was missed stays known
    SELECT * INTO before FROM tube_attachment a WHERE a.tube = t.tube AND a.tbl = tube_table_ensure_attached.tbl;
    wanted := (t.tube, tbl, tbl,
        coalesce(shard, tube_infer_shard(tbl), before.shard, CASE WHEN routing IS NOT NULL THEN 0 END,
            tube_free_shard(t.tube, tbl)),
        predicate, routing,
        CASE WHEN predicate IS NULL AND routing IS NULL THEN '{}' ELSE tube_safe_path(path) END,
        coalesce(key, tube_key_default(tbl, before.key)),
        (SELECT ARRAY[n.nspname, c.relname] FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl));
    IF tube_key_kind(tube_key_types(tbl, wanted.key)) = 'text' AND NOT EXISTS (
            SELECT FROM tube_attachment a WHERE a.tube = t.tube) THEN
        t := tube_keys_ensure(t, 'text');
    END IF;
    PERFORM tube_check_key(t, tbl, wanted.key);
    IF wanted.shard < 0 THEN
        PERFORM tube_refuse('RT005', format('shard %s: a shard is a whole number from 0 up', shard), 'give another shard');
    END IF;
    PERFORM tube_reader_ensure(tbl);
    PERFORM tube_check_expression(tbl, 'predicate', t.predicate, t.path);
    PERFORM tube_check_expression(tbl, 'predicate', predicate, t.path || wanted.path);
    PERFORM tube_check_expression(tbl, 'routing', routing, t.path || wanted.path);
    function := tube_trigger_ensure(t.tube, predicate, routing, wanted.path, tbl, wanted.key);
    FOR member IN SELECT m FROM tube_members(tbl) m LOOP
        PERFORM tube_triggers_ensure(t.tube, member, function, wanted.shard);
        wanted.tbl := member;
        INSERT INTO tube_attachment SELECT wanted.* ON CONFLICT ON CONSTRAINT tube_attachment_pkey DO UPDATE
            SET shard = excluded.shard, predicate = excluded.predicate, routing = excluded.routing,
                path = excluded.path, key = excluded.key, given = excluded.given;
    END LOOP;
    FOR member IN SELECT a.tbl FROM tube_attachment a
        WHERE a.tube = t.tube AND a.root = tube_table_ensure_attached.tbl AND a.tbl NOT IN (SELECT tube_members(a.root))
    LOOP
        PERFORM tube_member_detach(t.tube, member);
    END LOOP;
    PERFORM tube_triggers_note(t.tube, tbl);
    PERFORM tube_triggers_check(t.tube, tbl);  -- they are on from now on, so a backfill that begins later brings in what was missed
    PERFORM tube_trigger_sweep(t.tube);
    PERFORM tube_table_touch_sweep();
    PERFORM tube_table_touch_ensure(tbl);
    UPDATE tube_own_shard o SET given = wanted.given, key = wanted.key
        WHERE o.tube = t.tube AND o.shard = wanted.shard AND o.tbl = tube_table_ensure_attached.tbl;
END
$$;
COMMENT ON FUNCTION tube_table_ensure_attached(text, regclass, integer, text, text, name[], name[])
    IS 'Attaches a table to a tube, or alters the attachment to be as asked';

-- tube_free_shard(tube, tbl): the lowest number that no other attached table of the tube has as its shard, and that no table has
-- or had for itself. Writes nothing.
CREATE OR REPLACE FUNCTION tube_free_shard(tube text, tbl regclass) RETURNS integer
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT min(n)::integer
    FROM generate_series(0, (SELECT count(*) FROM tube_attachment) + (SELECT count(*) FROM tube_own_shard)) n
    WHERE NOT EXISTS (SELECT FROM tube_attachment a
            WHERE a.tube = tube_free_shard.tube AND a.root <> tube_free_shard.tbl AND a.shard = n)
        AND NOT EXISTS (SELECT FROM tube_own_shard o
            WHERE o.tube = tube_free_shard.tube AND o.tbl <> tube_free_shard.tbl AND o.shard = n)
$$;

-- tube_shard_ensure(tube, tbl): the shard of a table that has one of its own in the tube; a new number, if it has none: the
-- next one that no table of the tube has or had, and no pod. A tube whose tables all have shards of their own carries many
-- tables: the shard of a pod says of which table its ids are. Raises RT001, RT005. Writes tube_own_shard.
CREATE OR REPLACE FUNCTION tube_shard_ensure(tube text, tbl regclass) RETURNS integer
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_lock(tube);
    present integer := (SELECT o.shard FROM tube_own_shard o WHERE o.tube = t.tube AND o.tbl = tube_shard_ensure.tbl);
    other regclass;
BEGIN
    IF present IS NULL THEN  -- the one that it is attached with, if that is of no other table
        SELECT a.shard INTO present FROM tube_attachment a
            WHERE a.tube = t.tube AND a.tbl = tube_shard_ensure.tbl AND a.routing IS NULL
                AND NOT EXISTS (SELECT FROM tube_own_shard o WHERE o.tube = a.tube AND o.shard = a.shard);
    END IF;
    IF present IS NULL THEN
        EXECUTE format('SELECT 1 + greatest((SELECT max(a.shard) FROM tube_attachment a WHERE a.tube = $1),'
            ' (SELECT max(o.shard) FROM tube_own_shard o WHERE o.tube = $1),'
            ' (SELECT max(s.shard) FROM tube_shard s WHERE s.tube = $1),'
            ' (SELECT max(p.shard) FROM tube_parked p WHERE p.tube = $1),'
            ' CASE WHEN NOT EXISTS (SELECT FROM tube_own_shard o WHERE o.tube = $1)'
            ' THEN (SELECT max(p.shard) FROM %s p) END, 0)', tube_relation(t.tube)) INTO present USING t.tube;
    END IF;
    SELECT a.tbl INTO other FROM tube_attachment a
        WHERE a.tube = t.tube AND a.root <> tube_shard_ensure.tbl AND (a.shard = present OR a.routing IS NOT NULL) LIMIT 1;
    IF FOUND THEN
        PERFORM tube_refuse('RT005', format('table %s cannot have a shard of its own in tube %L: table %s has the same shard, or '
            'a routing, which may give any shard', tbl, t.tube, other), 'use another tube, or attach that table with another shard');
    END IF;
    INSERT INTO tube_own_shard (tube, shard, tbl, given, key)
        SELECT t.tube, present, c.oid, ARRAY[n.nspname, c.relname], coalesce(tube_key_default(c.oid, NULL), '{}')
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tube_shard_ensure.tbl
        ON CONFLICT ON CONSTRAINT tube_own_shard_pkey DO NOTHING;
    RETURN present;
END
$$;
COMMENT ON FUNCTION tube_shard_ensure(text, regclass) IS 'The shard that a table has for itself in a tube of many tables';

-- tube_tables_of(tube, shards): of which table the ids of these shards are (NULL: of all shards that have one table), its key, and
-- whether it is attached. A shard with several tables, with none, or of a table with a routing is left out. Of a table that was
-- detached or dropped the last name is given, if it had a shard of its own. Writes nothing.
CREATE OR REPLACE FUNCTION tube_tables_of(tube text, shards integer[] = NULL) RETURNS TABLE (
    shard integer, tbl text, key name[], attached boolean, relation oid
)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    WITH present AS (
        SELECT a.shard, min(a.tbl::oid::bigint)::oid AS oid FROM tube_attachment a JOIN pg_class c ON c.oid = a.tbl
        WHERE a.tube = $1 AND a.tbl = a.root AND (a.shard = ANY ($2) OR $2 IS NULL)
        GROUP BY a.shard HAVING count(*) = 1 AND bool_and(a.routing IS NULL)
    )
    SELECT p.shard, tube_qualified(p.oid), a.key, true, p.oid
    FROM present p JOIN tube_attachment a ON a.tube = $1 AND a.tbl = p.oid
    UNION ALL
    SELECT o.shard, format('%I.%I', o.given[1], o.given[2]), o.key, false, o.tbl FROM tube_own_shard o
    WHERE o.tube = $1 AND (o.shard = ANY ($2) OR $2 IS NULL)
        AND NOT EXISTS (SELECT FROM tube_attachment a WHERE a.tube = o.tube AND a.shard = o.shard)
    ORDER BY 1
$$;
COMMENT ON FUNCTION tube_tables_of(text, integer[]) IS 'Of which table the ids of a shard are';

-- tube_attachment_fault(tube, tbl): why the triggers of an attached table cannot run, so that each write of it fails: a column
-- of the key, or something that an expression names, was renamed or dropped, or has another type. NULL: they can, or this
-- session may not try; empty: a lock keeps it from finding out. Reads no row. Writes nothing.
CREATE OR REPLACE FUNCTION tube_attachment_fault(tube text, tbl regclass) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '50ms' AS $$
DECLARE
    t tube_registry := tube_find(tube);
    a tube_attachment;
BEGIN
    SELECT * INTO a FROM tube_attachment x WHERE x.tube = t.tube AND x.tbl = tube_attachment_fault.tbl;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    PERFORM tube_check_key(t, tbl, a.key);
    IF coalesce(t.predicate, a.predicate, a.routing) IS NOT NULL THEN
        PERFORM tube_reader_ensure(tbl);
        IF NOT has_function_privilege(tube_reader(tube_runs_as(tbl)) || '(oid, text, text, bigint)', 'EXECUTE') THEN
            RETURN NULL;  -- a right that this session lacks says nothing about the triggers
        END IF;
        PERFORM tube_check_expression(tbl, 'predicate', t.predicate, t.path);
        PERFORM tube_check_expression(tbl, 'predicate', a.predicate, t.path || a.path);
        PERFORM tube_check_expression(tbl, 'routing', a.routing, t.path || a.path);
    END IF;
    RETURN NULL;
EXCEPTION
    WHEN SQLSTATE 'RT005' THEN
        RETURN SQLERRM;
    WHEN insufficient_privilege THEN
        RETURN NULL;
    WHEN OTHERS THEN
        RETURN '';
END
$$;

-- tube_lock_table(tbl): until the transaction ends no other transaction attaches or detaches this table. Takes an
-- advisory lock: a lock of the table itself would make its writers wait even if there is nothing to do.
CREATE OR REPLACE FUNCTION tube_lock_table(tbl regclass) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT pg_advisory_xact_lock(
        hashtext('replicad tube ' || current_schema()), (tbl::oid::bigint - 2147483648)::integer)
$$;

-- tube_member_detach(tube, tbl): drops the tube's triggers on one table or partition. Writes tube_attachment, triggers.
CREATE OR REPLACE FUNCTION tube_member_detach(tube text, tbl regclass) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    trigger_name name;
BEGIN
    FOR trigger_name IN SELECT x.name FROM tube_triggers_of(tube, tbl) x LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', trigger_name, tube_qualified(tbl));
    END LOOP;
    DELETE FROM tube_attachment a WHERE a.tube = tube_member_detach.tube AND a.tbl = tube_member_detach.tbl;
    DELETE FROM tube_trigger_seen s WHERE s.tube = tube_member_detach.tube AND s.tbl = tube_member_detach.tbl;
END
$$;

-- tube_table_ensure_detached(tube, tbl): detaches the table and its partitions from the tube (tube NULL: from all
-- tubes): changes of rows no longer touch the tube. Pods in the tube stay. Does nothing if the table is not attached.
-- Raises RT005 for a partition that was attached through its table. Writes tube_attachment, tube_backfill, tube_missed,
-- triggers, functions.
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
        DELETE FROM tube_missed m WHERE m.tube = a.tube AND m.tbl = a.tbl;
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
