-- The functions that each tube and each attached table gets for touching by hand.

-- tube_touch_ensure(tube): creates {tube}_touch(shard, ids, op, payload, chunk_size). Writes that function.
--
-- {tube}_touch inserts pods of at most chunk_size ids in the given order and returns how many. Without ids it inserts
-- one control pod with the payload; without ids and payload, nothing. NULLs among the ids are left out. Raises RT005.
-- It runs with its owner's rights: every user with USAGE on this schema may call it. Writes the tube.
CREATE OR REPLACE FUNCTION tube_touch_ensure(tube text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $outer$
DECLARE
    name text := tube_object_name(tube, '_touch');
    body text := format($body$
DECLARE
    touched bigint[] := ARRAY(SELECT u FROM unnest(ids) u WHERE u IS NOT NULL);
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
$body$, tube_relation(tube), current_schema(), tube_op_sql('$3'));
BEGIN
    IF NOT EXISTS (SELECT FROM pg_proc p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname = name
            AND p.prosrc = body) THEN
        EXECUTE format('CREATE OR REPLACE FUNCTION %I(shard integer, ids bigint[], op character, payload jsonb = NULL,'
            ' chunk_size integer = 250) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_temp'
            ' AS %L', name, body);
        EXECUTE format('COMMENT ON FUNCTION %I(integer, bigint[], character, jsonb, integer) IS %L',
            name, 'replicad: puts ids or a control pod into tube ' || tube);
        PERFORM tube_belong(format('FUNCTION %I(integer, bigint[], character, jsonb, integer)', name));
    END IF;
END
$outer$;

-- tube_check_touch(shard, op, chunk_size): raises RT005 for arguments that no pod can have. Writes nothing.
-- ids are stored in the row, neither compressed nor out of line. So a pod must fit into a page of 8 kB; 900 ids do.
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

-- tube_table_touch_call(a): the statement of {table}_touch that touches one attachment's tube. Writes nothing itself.
CREATE OR REPLACE FUNCTION tube_table_touch_call(a tube_attachment) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN a.routing IS NULL THEN format($sql$
    pods := pods + %1$s(%2$s, $1, $2, $3, $4);$sql$, touch, a.shard)
    ELSE format($sql$
    IF coalesce(cardinality($1), 0) = 0 THEN
        pods := pods + %1$s(%2$s, $1, $2, $3, $4);
    ELSE
        pods := pods + (
            SELECT coalesce(sum(%1$s(placed.shard, placed.ids, $2, $3, $4)), 0)
            FROM (
                SELECT coalesce(stored.tube_shard, %2$s) & 2147483647 AS shard,
                    array_agg(given.id ORDER BY given.n) AS ids
                FROM unnest($1) WITH ORDINALITY AS given(id, n) LEFT JOIN (%3$s) AS stored ON stored.id = given.id
                WHERE given.id IS NOT NULL GROUP BY 1 ORDER BY 1
            ) AS placed);
    END IF;$sql$, touch, a.shard, CASE WHEN tube_runs_as(a.tbl) IS NULL
            THEN tube_rows_sql(tube_qualified(a.tbl), a.key, t.keys, format(' AND %I = ANY ($1)', a.key[1]), a.routing)
            ELSE format($sql$SELECT r.tube_shard, r.id FROM %I.tube_owner_rows(%L::oid::regclass,
                    %L || pg_catalog.quote_literal($1) || '::bigint[])) AS found', %L) AS r$sql$, current_schema(), a.tbl::oid,
                'SELECT found.tube_shard, found.id, 0 AS n FROM ('
                    || tube_rows_sql(tube_qualified(a.tbl), a.key, t.keys, format(' AND %I = ANY (', a.key[1]), a.routing),
                tube_path_text(a.path)) END)
    END
    FROM format('%I.%I', current_schema(), tube_object_name(a.tube, '_touch')) AS touch, tube_find(a.tube) AS t
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
CREATE OR REPLACE FUNCTION tube_table_touch_ensure(tbl regclass) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $outer$
DECLARE
    marker text := format('-- replicad: touches the tubes of schema %I', current_schema());
    full_name text;
    calls text;
    path name[];
    present text;
    body text;
BEGIN
    SELECT format('%I.%I', n.nspname, tube_object_name(c.relname, '_touch')) INTO full_name
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl;
    SELECT string_agg(tube_table_touch_call(a), '' ORDER BY a.tube) INTO calls
        FROM tube_attachment a WHERE a.tbl = tube_table_touch_ensure.tbl AND a.tbl = a.root;
    SELECT array_agg(s) INTO path
        FROM tube_attachment a, unnest(a.path) s
        WHERE a.tbl = tube_table_touch_ensure.tbl AND a.tbl = a.root AND a.routing IS NOT NULL;
    body := format(
        E'\n%s\n#variable_conflict use_column\nDECLARE\n    pods bigint := 0;\nBEGIN\n'
        '    PERFORM %I.tube_check_writer(%s);%s\n    RETURN pods;\nEND\n',
        marker, current_schema(), tbl::oid, calls);
    SELECT p.prosrc INTO present FROM pg_proc p
        WHERE p.oid = to_regprocedure(full_name || '(bigint[], character, jsonb, integer)');
    IF strpos(present, marker) = 0 THEN
        PERFORM tube_refuse('RT005', format('function %s exists and is not ours', full_name),
            'rename it, or rename the table: attached tables have a function of that name');
    ELSIF present IS DISTINCT FROM body THEN
        EXECUTE format('CREATE OR REPLACE FUNCTION %s(ids bigint[], op character = ''T'', payload jsonb = NULL,'
            ' chunk_size integer = 250) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = %s'
            ' SET row_security = off%s AS %L', full_name, tube_path_text(path), tube_fixed_sql(), body);
        EXECUTE format('COMMENT ON FUNCTION %s(bigint[], character, jsonb, integer) IS %L', full_name,
            'replicad: touches ids in the tubes that the table is attached to');
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
    DELETE FROM tube_attachment a WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = a.tbl);
    PERFORM tube_shards_note(b.tube, b.shards)
        FROM tube_backfill b WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = b.tbl);
    DELETE FROM tube_backfill b WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = b.tbl);
    FOR stale IN SELECT p.oid FROM pg_proc p
        WHERE strpos(p.prosrc, E'\n' || marker || E'\n') = 1 AND NOT EXISTS (
            SELECT FROM tube_attachment a JOIN pg_class c ON c.oid = a.tbl
            WHERE a.tbl = a.root AND c.relnamespace = p.pronamespace
                AND tube_object_name(c.relname, '_touch') = p.proname)
    LOOP
        EXECUTE format('DROP FUNCTION %s', stale);
    END LOOP;
END
$$;
