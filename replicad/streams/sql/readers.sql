-- Functions that read a table with the rights of its owner, and the rights that a daemon lacks where it may not read.

-- stream_reader_wanted(relation): the reason why the asking role cannot read a table or sequence as its owner, and the
-- remedy; NULL where it can. Two roles may make the reader (stream_reader_ensure): a superuser, and the owner of this
-- schema if it is a member of the table's owner. The owner of the schema may call it; another role needs EXECUTE.
CREATE OR REPLACE FUNCTION stream_reader_wanted(relation regclass) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    owner oid := stream_runs_as(relation);
    keeper name;
    present name;
BEGIN
    IF owner IS NULL OR stream_reader(owner) NOT LIKE '%.stream_reader_missing' THEN
        RETURN NULL;
    END IF;
    SELECT pg_get_userbyid(n.nspowner), p.proname INTO keeper, present
        FROM pg_namespace n
        LEFT JOIN pg_proc p ON p.pronamespace = n.oid AND p.proowner = owner AND p.proname ~ '^reader_1_[0-9a-f]{32}$'
        WHERE n.nspname = current_schema();
    IF present IS NOT NULL AND keeper <> current_user THEN
        RETURN format('%s belongs to role %I and is read with the rights of that role; run: GRANT EXECUTE ON FUNCTION'
            ' %I.%I(oid, text, text, bigint) TO %I', stream_qualified(relation), pg_get_userbyid(owner), current_schema(),
            present, current_user);
    END IF;
    RETURN format('%s belongs to role %I and is read with the rights of that role; run: GRANT %2$I TO %I',
            stream_qualified(relation), pg_get_userbyid(owner), keeper)
        || CASE WHEN keeper = current_user THEN ''
            ELSE format(', then as %I or as a superuser: SELECT %I.stream_reader_ensure(%L)', keeper, current_schema(),
                stream_qualified(relation)) END;
END
$$;

-- stream_reader(owner): the function that runs statements as this role, with its schema (see stream_reader_ensure);
-- stream_reader_missing where there is none that the asking role may call; NULL for NULL. Nobody but the owner of this
-- schema can create functions in it.
CREATE OR REPLACE FUNCTION stream_reader(owner oid) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('%I.%I', current_schema(), coalesce((
        SELECT p.proname
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = current_schema() AND p.proowner = owner AND p.proname ~ '^reader_1_[0-9a-f]{32}$'
            AND has_function_privilege(p.oid, 'EXECUTE')
        LIMIT 1), 'stream_reader_missing'))
    WHERE owner IS NOT NULL
$$;

-- stream_reader_body(): the body of each reader (postgres/sql/reader_body.sql); see stream_reader_ensure.
CREATE OR REPLACE FUNCTION stream_reader_body() RETURNS text
LANGUAGE sql IMMUTABLE AS $$ SELECT $body$
{reader_body}$body$::text $$;

-- stream_reader_missing(tbl, query, path, bound): stands for the reader of a table's owner where there is none. Raises
-- insufficient_privilege with the remedy.
CREATE OR REPLACE FUNCTION stream_reader_missing(tbl oid, query text, path text, bound bigint) RETURNS SETOF text
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
        MESSAGE = coalesce(stream_reader_wanted(tbl::regclass), 'what is needed to read a table was made just now; try again');
END
$$;

-- stream_give(signature, owner): makes a function of ours another role's, which needs CREATE on the schema for a moment; no other session
-- sees that. Raises insufficient_privilege. Writes the function's owner.
CREATE OR REPLACE FUNCTION stream_give(signature text, owner oid) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    role name := pg_get_userbyid(owner);
    granted boolean := has_schema_privilege(owner, current_schema(), 'CREATE');
BEGIN
    IF NOT granted THEN
        EXECUTE format('GRANT CREATE ON SCHEMA %I TO %I', current_schema(), role);
    END IF;
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', signature, role);
    IF NOT granted THEN
        EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM %I', current_schema(), role);
    END IF;
END
$$;

-- stream_reader_ensure(tbl): makes the function that runs statements as the owner of this table, if it is needed and
-- absent. Raises RS002 where the asking role may not make it. Creates a function that belongs to the table's owner.
--
-- The reader, reader_1_...(tbl, query, path, bound), returns the rows of a query, whose one column is text. It stops after
-- the row that exceeds `bound` bytes, and then adds the row `+`. Where the query fails, it adds `!` and the error as JSON.
--
-- What the owner's code must not be able to do, and what prevents it:
--   take back the role of the session: SET ROLE and RESET ROLE fail in a SECURITY DEFINER function;
--   change settings for later statements, leave cursors or notifications: all is done in a subtransaction, and rolled back;
--   write, so that a deferred trigger runs at the end of the transaction, as the session's role: it is READ ONLY;
--   replace statements that the session has prepared: those that it prepares are removed.
-- The owner cannot change the body: this needs CREATE on the schema. But he can alter the function. So it first checks that
-- SET ROLE fails, that it has the rights of its owner, and that it is volatile; and it looks up no name in a search_path.
CREATE OR REPLACE FUNCTION stream_reader_ensure(tbl regclass) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    owner oid := stream_runs_as(tbl);
    role name := pg_get_userbyid(owner);
    home name := current_schema();
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = home);
    signature text;
BEGIN
    IF stream_reader_wanted(tbl) IS NULL THEN
        RETURN;
    END IF;
    signature := format('%I.%I(oid, text, text, bigint)', home, 'reader_1_' || md5(role));
    EXECUTE format('DROP FUNCTION IF EXISTS %s', signature);  -- of a role that had this name, or that we may not call
    EXECUTE format('CREATE FUNCTION %I.%I(tbl oid, query text, path text, bound bigint) RETURNS SETOF text'
        ' LANGUAGE plpgsql SECURITY DEFINER AS %L', home, 'reader_1_' || md5(role), stream_reader_body());
    EXECUTE format('COMMENT ON FUNCTION %s IS %L', signature, format('replicad: reads the tables of %I as %1$I', role));
    EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', signature);
    PERFORM stream_give(signature, owner);
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', signature, keeper);
EXCEPTION WHEN insufficient_privilege THEN
    PERFORM stream_refuse(SQLERRM, stream_reader_wanted(tbl));
END
$$;
COMMENT ON FUNCTION stream_reader_ensure(regclass) IS 'Makes the function that reads a table as its owner';

-- stream_as_owner(tbl, query, path): the rows of a query on this table, whose one column is text, run as the table's owner (see
-- stream_reader_ensure), or as the asking role where stream_runs_as() says so. path: the search_path; that of a new session by
-- default. Raises the errors of the query.
CREATE OR REPLACE FUNCTION stream_as_owner(tbl regclass, query text, path text = NULL) RETURNS SETOF text
LANGUAGE plpgsql SET row_security = off AS $$
DECLARE
    owner oid := stream_runs_as(tbl);
    reader text;
    line text;
    failure json;
BEGIN
    path := coalesce(path, (SELECT s.reset_val FROM pg_settings s WHERE s.name = 'search_path'));
    IF owner IS NULL THEN
        PERFORM set_config('search_path', path, true);
        RETURN QUERY EXECUTE query;
        RETURN;
    END IF;
    PERFORM stream_reader_ensure(tbl);
    reader := stream_reader(owner);
    FOR line IN EXECUTE format('SELECT * FROM %s($1, $2, $3, $4)', reader)
        USING tbl::oid, query, path, 9223372036854775807
    LOOP
        IF line LIKE '!%' THEN
            failure := substr(line, 2);
            RAISE EXCEPTION USING ERRCODE = failure ->> 'sqlstate', MESSAGE = failure ->> 'message',
                DETAIL = failure ->> 'detail', HINT = failure ->> 'hint';
        END IF;
        RETURN NEXT line;
    END LOOP;
END
$$;

-- stream_readers_ensure(): makes the readers that streams lack (stream_reader_ensure), where the asking role may.
CREATE OR REPLACE FUNCTION stream_readers_ensure() RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    wanted regclass;
BEGIN
    FOR wanted IN SELECT r FROM stream s, unnest(ARRAY[s.relation, s.sequence, s.positions]) r
        WHERE stream_reader_wanted(r) IS NOT NULL
    LOOP
        BEGIN
            PERFORM stream_reader_ensure(wanted);
        EXCEPTION WHEN SQLSTATE 'RS002' OR undefined_object OR undefined_table THEN
            NULL;  -- stream_load shows what is missing
        END;
    END LOOP;
END
$$;

-- stream_denial(what, needed): the sentence that the asking role may not read something, with the GRANT.
CREATE OR REPLACE FUNCTION stream_denial(what text, needed text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('role %s may not read %s; run: GRANT %s TO %1$s', quote_ident(current_user), what, needed)
$$;

-- stream_denied(s): the relation of a stream that the asking role may not read, with the GRANT that mends it; NULL where it
-- may read all. A role may have rights on single columns, so a table counts as denied where it may read none of them. A
-- table that is read as its owner needs no right on it; stream_reader_wanted names the right that it needs instead. Row
-- security counts too.
CREATE OR REPLACE FUNCTION stream_denied(s stream) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT string_agg(n.sentence, '. ' ORDER BY n.place)
    FROM (
        SELECT DISTINCT ON (c.relnamespace) 1 AS place, stream_denial(format('schema %I', ns.nspname),
            format('USAGE ON SCHEMA %I', ns.nspname)) AS sentence
        FROM pg_class c JOIN pg_namespace ns ON ns.oid = c.relnamespace
        WHERE c.oid IN (s.relation, s.sequence, s.positions) AND NOT has_schema_privilege(ns.oid, 'USAGE')
            AND stream_runs_as(c.oid) IS NULL
        UNION ALL
        SELECT 2, stream_denial(format('table %s', t), format('SELECT ON %s', t))
        FROM unnest(ARRAY[s.relation, s.positions]) t
        WHERE t IS NOT NULL AND NOT has_any_column_privilege(t, 'SELECT') AND stream_runs_as(t) IS NULL
        UNION ALL
        SELECT 3, CASE WHEN stream_runs_as(s.sequence) IS NULL
            THEN stream_denial(format('sequence %s', s.sequence), format('SELECT ON SEQUENCE %s', s.sequence))
            ELSE format('role %1$I is no member of role %2$I, which owns sequence %3$s; run: GRANT %2$I TO %1$I (or GRANT SELECT ON '
                'SEQUENCE %3$s TO %1$I)', current_user, pg_get_userbyid(stream_runs_as(s.sequence)), s.sequence) END
        WHERE NOT has_sequence_privilege(s.sequence, 'SELECT')
        UNION ALL
        SELECT 4, stream_hidden(t) FROM unnest(ARRAY[s.relation, s.positions]) t WHERE stream_hidden(t) IS NOT NULL
    ) n
$$;
