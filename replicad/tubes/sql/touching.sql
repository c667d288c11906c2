-- The functions that each tube and each attached table gets for touching by hand.

-- tube_touch_ensure(tube): creates {tube}_touch(shard, ids, op, payload, chunk_size) for keys of the tube's kind: a literal
-- such as '{1,2}' would fit two functions. Writes that function.
--
-- {tube}_touch inserts pods of at most chunk_size ids in the given order and returns how many. Without ids it inserts
-- one control pod with the payload; without ids and payload, nothing. NULLs among the ids are left out. Raises RT005.
-- It runs with its owner's rights: every user with USAGE on this schema may call it. Writes the tube.
CREATE OR REPLACE FUNCTION tube_touch_ensure(tube text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $outer$
DECLARE
    name text := tube_object_name(tube, '_touch');
    keys text := (tube_find(tube)).keys;
    other text := CASE keys WHEN 'bigint' THEN 'text' ELSE 'bigint' END;
    body text := format($body$
DECLARE
    touched %4$s[] := ARRAY(SELECT u FROM unnest(ids) u WHERE u IS NOT NULL);
    pods bigint;
BEGIN
    PERFORM %2$I.tube_check_touch(shard, op, chunk_size);
    IF touched = '{}' AND payload IS NULL THEN
        RETURN 0;
    END IF;
    INSERT INTO %1$s (op, shard, ids, payload)
    SELECT %3$s, $1, touched[k:k + chunk_size - 1], $4
    FROM generate_series(1, greatest(cardinality(touched), 1), chunk_size) AS k ORDER BY k;
    GET DIAGNOSTICS pods = ROW_COUNT;
    RETURN pods;
END
$body$, tube_relation(tube), current_schema(), tube_op_sql('$3'), keys);
BEGIN
    EXECUTE format('DROP FUNCTION IF EXISTS %I(integer, %s[], character, jsonb, integer)', name, other);
    IF NOT EXISTS (SELECT FROM pg_proc p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname = name
            AND p.prosrc = body) THEN
        EXECUTE format('CREATE OR REPLACE FUNCTION %I(shard integer, ids %s[], op character, payload jsonb = NULL,'
            ' chunk_size integer = %s) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_temp'
            ' AS %L', name, keys, tube_pod_size(keys), body);
        EXECUTE format('COMMENT ON FUNCTION %I(integer, %s[], character, jsonb, integer) IS %L',
            name, keys, 'replicad: puts ids or a control pod into tube ' || tube);
        PERFORM tube_belong(format('FUNCTION %I(integer, %s[], character, jsonb, integer)', name, keys));
    END IF;
END
$outer$;

-- tube_check_touch(shard, op, chunk_size): raises RT005 for arguments that no pod can have. Writes nothing.
-- ids of kind bigint are stored in the row, neither compressed nor out of line. So a pod must fit into a page of 8 kB; 900
-- ids do.
CREATE OR REPLACE FUNCTION tube_check_touch(shard integer, op character, chunk_size integer) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    IF shard IS NULL OR shard < 0 THEN
        PERFORM tube_refuse('RT005',
            format('shard %s: a shard is a whole number from 0 up', coalesce(shard::text, 'NULL')),
            'give the number of the shard that the ids belong to');
    ELSIF op IS NULL OR op NOT IN ('I', 'U', 'D', 'T', 'B') THEN
        PERFORM tube_refuse('RT005', format('there is no operation %L', op),
            'I is insert, U update, D delete, T touch, B backfill');
    ELSIF chunk_size IS NULL OR chunk_size NOT BETWEEN 1 AND 900 THEN
        PERFORM tube_refuse('RT005', format('pods of %s ids: they have 1 to 900', coalesce(chunk_size::text, 'NULL')),
            'the default is 250');
    END IF;
END
$$;

-- tube_table_touch_call(a): the statement of {table}_touch that touches one attachment's tube. Writes nothing itself. ids are
-- $1 of kind bigint, or else the variable replicad_touched_keys of kind text.
CREATE OR REPLACE FUNCTION tube_table_touch_call(a tube_attachment) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_find(a.tube);
    types text[] := tube_key_types(a.tbl, a.key);
    given text := CASE tube_key_kind(types) WHEN 'bigint' THEN '$1' ELSE 'replicad_touched_keys' END;  -- for the columns of the key
    ids text := CASE t.keys WHEN 'bigint' THEN '$1' ELSE 'replicad_touched_keys' END;  -- for the tube
    touch text := format('%I.%I', current_schema(), tube_object_name(a.tube, '_touch'));
    rows text;
BEGIN
    IF a.routing IS NULL THEN
        RETURN format($sql$
    pods := pods + %1$s(%2$s, %3$s, $2, $3, $4);$sql$, touch, a.shard, ids);
    END IF;
    rows := tube_rows_sql(tube_qualified(a.tbl), a.key, t.keys, ' AND ' || tube_key_among_sql(a.key, types, given), a.routing);
    IF tube_runs_as(a.tbl) IS NOT NULL THEN
        rows := tube_rows_sql(tube_qualified(a.tbl), a.key, t.keys,
            ' AND ' || tube_key_among_sql(a.key, types, '{replicad:ids}'), a.routing);
        rows := format('SELECT r.tube_shard, r.id::%s AS id FROM %I.tube_owner_rows(%L::oid::regclass, %L'
            ' || pg_catalog.quote_literal(%s) || %L, %L) AS r', t.keys, current_schema(), a.tbl::oid,
            'SELECT found.tube_shard, found.id, 0 AS n FROM (' || split_part(rows, '{replicad:ids}', 1), given,
            '::' || tube_key_kind(types) || '[]' || split_part(rows, '{replicad:ids}', 2) || ') AS found',
            tube_path_text(a.path));
    END IF;
    RETURN format($sql$
    IF coalesce(cardinality($1), 0) = 0 THEN
        pods := pods + %1$s(%2$s, %4$s, $2, $3, $4);
    ELSE
        pods := pods + (
            SELECT coalesce(sum(%1$s(placed.shard, placed.ids, $2, $3, $4)), 0)
            FROM (
                SELECT coalesce(stored.tube_shard, %2$s) & 2147483647 AS shard,
                    array_agg(given.id ORDER BY given.n) AS ids
                FROM unnest(%4$s) WITH ORDINALITY AS given(id, n) LEFT JOIN (%3$s) AS stored ON stored.id = given.id
                WHERE given.id IS NOT NULL GROUP BY 1 ORDER BY 1
            ) AS placed);
    END IF;$sql$, touch, a.shard, rows, ids);
END
$$;

-- tube_check_writer(tbl): raises 42501 unless this session's role may INSERT, UPDATE or DELETE rows of the table, some
-- column at least. Its caller runs with its owner's rights, so `current_user` says nothing; what no function can change is
-- the session's user, and the role that the session chose by SET ROLE. Writes nothing.
CREATE OR REPLACE FUNCTION tube_check_writer(tbl oid) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    me name := CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role') END;
BEGIN
    IF (has_any_column_privilege(me, tbl, 'INSERT, UPDATE') OR has_table_privilege(me, tbl, 'DELETE')) IS NOT TRUE THEN
        RAISE EXCEPTION USING ERRCODE = '42501',
            MESSAGE = format('role %I may not write table %s, so it may not touch its ids', me, tube_qualified(tbl)),
            HINT = format('run: GRANT UPDATE ON %s TO %I', tube_qualified(tbl), me);
    END IF;
END
$$;

-- tube_table_touch_ensure(tbl): creates {table}_touch(ids, op, payload, chunk_size) in the table's schema for the
-- present attachments of the table. Raises RT005 if another function has that name. Writes that function.
--
-- {table}_touch touches every tube that the table is attached to and returns the number of pods. It ignores predicates.
-- An id goes to the shard of its row. An id without a row (deleted) and a control pod go to the shard of the
-- attachment. It runs with its owner's rights, so that users who write to the table may call it; others get 42501.
-- ids are bigint[] if the key is one integer column; or else text[] of keys in any form that the types of the columns read.
CREATE OR REPLACE FUNCTION tube_table_touch_ensure(tbl regclass) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $outer$
DECLARE
    marker text := format('-- replicad: touches the tubes of schema %I', current_schema());
    full_name text;
    calls text;
    path name[];
    types text[];
    kind text;
    texts boolean;
    present text;
    returns regtype := 'bigint';
    body text;
BEGIN
    SELECT format('%I.%I', n.nspname, tube_object_name(c.relname, '_touch')) INTO full_name
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl;
    SELECT string_agg(tube_table_touch_call(a), '' ORDER BY a.tube), (array_agg(tube_key_types(a.tbl, a.key)))[1:1],
            bool_or((tube_find(a.tube)).keys = 'text')
        INTO calls, types, texts
        FROM tube_attachment a WHERE a.tbl = tube_table_touch_ensure.tbl AND a.tbl = a.root;
    types := ARRAY(SELECT unnest(types));
    kind := tube_key_kind(types);
    SELECT array_agg(s) INTO path
        FROM tube_attachment a, unnest(a.path) s
        WHERE a.tbl = tube_table_touch_ensure.tbl AND a.tbl = a.root AND a.routing IS NOT NULL;
    SELECT p.prorettype::regtype INTO returns FROM pg_proc p
        WHERE p.oid = to_regprocedure(format('%s(%s[], character, jsonb, integer)', full_name, kind));
    returns := coalesce(returns, 'bigint');  -- void, if tube_move took it over: programs may have prepared statements with it
    body := format(
        E'\n%s\n#variable_conflict use_column\nDECLARE\n    pods bigint := 0;\n%sBEGIN\n'
        '    PERFORM %I.tube_check_writer(%s);%s\n    RETURN%s;\nEND\n',
        marker, CASE WHEN texts THEN format(
            E'    replicad_touched_keys text[] := ARRAY(SELECT %s FROM unnest($1) WITH ORDINALITY AS g (u, n) WHERE u IS NOT NULL ORDER BY n);\n',
            CASE kind WHEN 'bigint' THEN 'u::text' ELSE tube_key_text_sql(types, 'u') END) END,
        current_schema(), tbl::oid, calls, CASE WHEN returns <> 'void'::regtype THEN ' pods' END);
    present := (SELECT p.prosrc FROM pg_proc p WHERE p.oid = to_regprocedure(format('%s(%s[], character, jsonb, integer)',
        full_name, CASE kind WHEN 'bigint' THEN 'text' ELSE 'bigint' END)));
    IF strpos(present, marker) > 0 THEN  -- for another key
        EXECUTE format('DROP FUNCTION %s(%s[], character, jsonb, integer)',
            full_name, CASE kind WHEN 'bigint' THEN 'text' ELSE 'bigint' END);
    END IF;
    present := (SELECT p.prosrc FROM pg_proc p
        WHERE p.oid = to_regprocedure(format('%s(%s[], character, jsonb, integer)', full_name, kind)));
    IF strpos(present, marker) = 0 THEN
        PERFORM tube_refuse('RT005', format('function %s exists and is not ours', full_name),
            'rename it, or rename the table: attached tables have a function of that name. If it is one of pg-tube: replicad tubes pg-tube');
    ELSIF present IS DISTINCT FROM body THEN
        PERFORM tube_check_function(format('%s(%s[], character, jsonb, integer)', full_name, kind));
        EXECUTE format('CREATE OR REPLACE FUNCTION %s(ids %s[], op character = ''T'', payload jsonb = NULL,'
            ' chunk_size integer = %s) RETURNS %s LANGUAGE plpgsql SECURITY DEFINER SET search_path = %s'
            ' SET row_security = off%s AS %L', full_name, kind, tube_pod_size(kind), returns, tube_path_text(path), tube_fixed_sql(), body);
        EXECUTE format('COMMENT ON FUNCTION %s(%s[], character, jsonb, integer) IS %L', full_name, kind,
            'replicad: touches ids in the tubes that the table is attached to');
        -- Rows are read as the table's owner (tube_owner_rows), so that the owner of this schema, who detaches the table, may have it.
        IF tube_runs_as(tbl) IS NOT NULL AND (SELECT r.rolsuper FROM pg_roles r WHERE r.rolname = current_user) THEN
            PERFORM tube_belong(format('FUNCTION %s(%s[], character, jsonb, integer)', full_name, kind));
        END IF;
    END IF;
END
$outer$;

-- tube_table_touch_sweep(): deletes the attachments of dropped tables, and drops replicad's {table}_touch functions of
-- tables that are no longer attached, were renamed or dropped. Writes tube_attachment, tube_backfill,
-- tube_shard.
CREATE OR REPLACE FUNCTION tube_table_touch_sweep() RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    marker text := format('-- replicad: touches the tubes of schema %I', current_schema());
    stale regprocedure;
BEGIN
    DELETE FROM tube_attachment a WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = a.tbl)
        AND (a.tbl = a.root OR NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = a.root));  -- partitions: tube_partitions_check
    PERFORM tube_shards_note(b.tube, b.shards)
        FROM tube_backfill b WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = b.tbl);
    DELETE FROM tube_backfill b WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = b.tbl);
    FOR stale IN
        WITH named AS MATERIALIZED (  -- each attachment happens here: no function is called for names that are short enough
            SELECT c.relnamespace, CASE WHEN octet_length(c.relname) <= 57 THEN (c.relname || '_touch')::name
                ELSE tube_object_name(c.relname, '_touch') END AS name
            FROM tube_attachment a JOIN pg_class c ON c.oid = a.tbl WHERE a.tbl = a.root
        )
        SELECT p.oid FROM pg_proc p
        WHERE right(p.proname, 6) = '_touch' AND strpos(p.prosrc, E'\n' || marker || E'\n') = 1
            AND (p.pronamespace, p.proname) NOT IN (SELECT n.relnamespace, n.name FROM named n)  -- by a hash
    LOOP
        PERFORM tube_check_function(stale::text);
        EXECUTE format('DROP FUNCTION %s', stale);
    END LOOP;
END
$$;
