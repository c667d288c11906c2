-- Errors, and facts about a stream from the registry and the catalogs: its tables, its sequence, its types.

-- stream_instance(instance): a writer's name as it stands on the wire, in tokens and in stream_writer.
-- NULL and '' become master; white space and control characters, which would break the line, become _; 200 characters.
CREATE OR REPLACE FUNCTION stream_instance(instance text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT coalesce(nullif(left(translate(instance,
        E'\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10'
        '\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f\x20\x7f',
        '_________________________________'), 200), ''), 'master')
$$;

-- stream_json(value): the text itself where it is JSON, else the text as a JSON string: a row that a row expression of
-- type text got wrong must not stop a stream, nor break its readers' parsers.
CREATE OR REPLACE FUNCTION stream_json(value text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
BEGIN
    RETURN value::json::text;
EXCEPTION WHEN data_exception OR statement_too_complex THEN
    RETURN to_json(value)::text;
END
$$;

-- stream_refuse(problem, remedy): raises RS002 unless the problem is NULL.
CREATE OR REPLACE FUNCTION stream_refuse(problem text, remedy text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'RS002', MESSAGE = problem, HINT = remedy;
    END IF;
END
$$;

-- stream_refuse_argument(problem, remedy): raises RS007: no database would take this value.
CREATE OR REPLACE FUNCTION stream_refuse_argument(problem text, remedy text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'RS007', MESSAGE = problem, HINT = remedy;
END
$$;

-- stream_find(name): the registry's row. Raises RS001.
CREATE OR REPLACE FUNCTION stream_find(name text) RETURNS stream
LANGUAGE plpgsql STABLE AS $$
DECLARE
    found_stream stream;
BEGIN
    SELECT * INTO found_stream FROM stream s WHERE s.name = stream_find.name;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'RS001',
            MESSAGE = format('there is no stream %L', left(name, 200)),
            HINT = format('streams: %s', coalesce((SELECT string_agg(s.name, ', ' ORDER BY s.name)
                FROM (SELECT s.name FROM stream s ORDER BY s.name LIMIT 50) s), 'none yet'));
    END IF;
    RETURN found_stream;
END
$$;

-- stream_tables(tbl): the table with all its partitions and heirs, itself first.
CREATE OR REPLACE FUNCTION stream_tables(tbl regclass) RETURNS SETOF regclass
LANGUAGE sql STABLE AS $$
    WITH RECURSIVE tree(member, depth) AS (
        SELECT tbl::oid, 0
        UNION
        SELECT i.inhrelid, tree.depth + 1 FROM tree JOIN pg_inherits i ON i.inhparent = tree.member
    )
    SELECT member::regclass FROM tree GROUP BY member ORDER BY min(depth), member
$$;

-- stream_column_type(tbl, column): the type of a column. Raises RS002 with the columns that there are.
CREATE OR REPLACE FUNCTION stream_column_type(tbl regclass, column_name name) RETURNS regtype
LANGUAGE plpgsql STABLE AS $$
DECLARE
    kind regtype;
BEGIN
    SELECT a.atttypid INTO kind FROM pg_attribute a
    WHERE a.attrelid = tbl AND a.attname = column_name AND a.attnum > 0 AND NOT a.attisdropped;
    IF NOT FOUND THEN
        PERFORM stream_refuse(format('table %s has no column %I', tbl, column_name), format('its columns: %s',
            (SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum)
             FROM pg_attribute a WHERE a.attrelid = tbl AND a.attnum > 0 AND NOT a.attisdropped)));
    END IF;
    RETURN kind;
END
$$;

-- stream_qualified(tbl): the name of a table with its schema, quoted, whatever the search_path.
CREATE OR REPLACE FUNCTION stream_qualified(tbl regclass) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = tbl
$$;

-- stream_runs_as(tbl): the owner of a table as whom statements that read it must run; NULL where the asking role runs them
-- itself: it is the owner, or the owner is a superuser. The owner of a table can have code run by every role that reads it:
-- a cast of one of its types, a policy, a function in an index.
CREATE OR REPLACE FUNCTION stream_runs_as(tbl regclass) RETURNS oid
LANGUAGE sql STABLE AS $$
    SELECT c.relowner FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner
    WHERE c.oid = tbl AND r.rolname <> current_user AND NOT r.rolsuper
$$;

-- stream_hidden(tbl): the sentence that row security can hide rows of a table from the role that reads it, with the remedy;
-- NULL where that role sees all rows. That role is the table's owner, or the asking role (stream_runs_as). All sessions of
-- ours have row_security = off: Postgres refuses to read where a policy would leave rows out, so no row is skipped in
-- silence.
CREATE OR REPLACE FUNCTION stream_hidden(tbl regclass) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('row security can hide rows of %s from role %I, with whose rights it is read; run: ', stream_qualified(tbl),
            r.rolname)
        || CASE WHEN pg_has_role(r.oid, c.relowner, 'USAGE')
            THEN format('ALTER TABLE %s NO FORCE ROW LEVEL SECURITY; or, as a superuser: ALTER ROLE %I BYPASSRLS. If applications'
                ' connect as %2$I and its policies must hold for them, give the table to another role instead: ALTER TABLE'
                ' %1$s OWNER TO ...', stream_qualified(tbl), r.rolname)
            ELSE format('ALTER ROLE %I BYPASSRLS, as a superuser', r.rolname) END
    FROM pg_class c JOIN pg_roles r ON r.oid = coalesce(stream_runs_as(c.oid), current_user::regrole)
    WHERE c.oid = tbl AND c.relrowsecurity AND NOT (r.rolsuper OR r.rolbypassrls)
        AND (c.relforcerowsecurity OR NOT pg_has_role(r.oid, c.relowner, 'USAGE'))
$$;

-- stream_last_value(sequence): the last id issued; start - 1 where there was none yet. Never a torn read (a SELECT from
-- the sequence would be). Raises RS002 beyond 48 bits, which is all that the lock of a reservation carries.
CREATE OR REPLACE FUNCTION stream_last_value(sequence regclass) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    last bigint := pg_sequence_last_value(sequence);
BEGIN
    -- NULL also means that we may not look, which must not pass for "none yet"
    IF last IS NULL AND has_sequence_privilege(sequence, 'USAGE, SELECT') THEN
        SELECT s.seqstart - 1 INTO last FROM pg_sequence s WHERE s.seqrelid = sequence;
    END IF;
    IF last IS NULL OR last < 0 OR last >> 48 <> 0 THEN
        PERFORM stream_refuse(format('sequence %s stands at %s', sequence, coalesce(last::text, 'what you may not see')),
            format('reservation needs a value from 0 to 281474976710655, and the right to use it: GRANT USAGE ON SEQUENCE '
                '%s TO %I', sequence, current_user));
    END IF;
    RETURN last;
END
$$;

-- stream_refuse_step(sequence, id, bound): refuses an id that is not above the last value read before it.
CREATE OR REPLACE FUNCTION stream_refuse_step(sequence regclass, id bigint, bound bigint) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM stream_refuse(format('sequence %s issued %s after %s', sequence, id, bound),
        'the sequence of a stream has CACHE 1, and is never set back while writers are at work');
END
$$;

-- stream_sequence(tbl, column): the sequence that feeds a column: named by its default, or owned (serial, identity).
-- NULL where there is none.
CREATE OR REPLACE FUNCTION stream_sequence(tbl regclass, column_name name) RETURNS regclass
LANGUAGE sql STABLE AS $$
    SELECT c.oid::regclass
    FROM pg_attribute a
    CROSS JOIN LATERAL (
        SELECT d.refobjid AS sequence, 1 AS preference  -- what the default draws from counts, where the two differ
        FROM pg_attrdef f JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid
        WHERE f.adrelid = a.attrelid AND f.adnum = a.attnum AND d.refclassid = 'pg_class'::regclass
        UNION ALL
        SELECT d.objid, CASE d.deptype WHEN 'i' THEN 2 ELSE 3 END  -- a serial column made an identity has both
        FROM pg_depend d
        WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
            AND d.refobjid = a.attrelid AND d.refobjsubid = a.attnum
    ) found
    JOIN pg_class c ON c.oid = found.sequence AND c.relkind = 'S'
    WHERE a.attrelid = tbl AND a.attname = column_name AND NOT a.attisdropped
    ORDER BY found.preference LIMIT 1
$$;

-- stream_is_same(number, actual, expected): raises RS005. Called where a reader must not read on: another table (`actual`)
-- than that of the stream (`expected`) has its name now; or it is the same, and the sequence has another file than when the
-- stream was loaded, so that ids mean other rows.
CREATE OR REPLACE FUNCTION stream_is_same(stream_number integer, actual oid, expected oid) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    name text := coalesce((SELECT s.name FROM stream s WHERE s.number = stream_number), stream_number::text);
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'RS005',
        MESSAGE = CASE WHEN actual = expected
            THEN format('the ids of stream %s begin anew: its sequence was restarted', name)
            ELSE format('another table has the name of the table of stream %s now', name) END,
        HINT = 'nothing of it was sent; the stream goes on when the registry was looked at again';
END
$$;
