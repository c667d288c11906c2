-- Predicates, routings and even the planning of a query on a table run code of the table's owner. So they run with the
-- rights of the owner: in trigger functions that belong to him, and in readers, which are functions that run a query as
-- their owner. stream_reader_ensure in replicad/streams/sql/readers.sql says what a reader prevents, and how.

-- tube_runs_as(tbl): the owner of a table as whom code on it must run; NULL where the asking role runs it itself: it is
-- the owner, or the owner is a superuser. Writes nothing.
CREATE OR REPLACE FUNCTION tube_runs_as(tbl regclass) RETURNS oid
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT c.relowner FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner
    WHERE c.oid = tbl AND r.rolname <> current_user AND NOT r.rolsuper
$$;

-- tube_give(signature, owner): makes a function of ours another role's. Raises RT005 with the GRANT that is missing.
-- CREATE on the schema is needed for a moment; no other session sees it. Writes the function's owner.
CREATE OR REPLACE FUNCTION tube_give(signature text, owner oid) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    role name := pg_get_userbyid(owner);
    granted boolean := has_schema_privilege(owner, current_schema(), 'CREATE');
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = current_schema());
BEGIN
    IF NOT granted THEN
        EXECUTE format('GRANT CREATE ON SCHEMA %I TO %I', current_schema(), role);
    END IF;
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', signature, role);
    IF NOT granted THEN
        EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM %I', current_schema(), role);
    END IF;
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', signature, keeper);
EXCEPTION WHEN insufficient_privilege THEN
    PERFORM tube_refuse('RT005', format('code on a table of role %I runs with the rights of that role alone, and role %I may not '
            'prepare this: %s', role, current_user, SQLERRM),
        format('run: GRANT %I TO %I, and call this as %2$I or as a superuser', role, keeper));
END
$$;

-- tube_belong(what): what belongs to a tube belongs to the owner of this schema, whoever creates the tube: else the daemon could
-- not use it. what: `TABLE name`, `FUNCTION name(types)`. Does nothing for a role that may not. Writes the owner.
CREATE OR REPLACE FUNCTION tube_belong(what text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
{belong}$$;

-- tube_check_function(signature): raises RT005, with the remedy, where a function of ours belongs to a role that the asking role is no member
-- of, so that only that role may replace or drop it: a superuser who has attached the table, or the table's owner. Writes nothing.
CREATE OR REPLACE FUNCTION tube_check_function(signature text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM tube_refuse('RT005', format('function %s belongs to role %I, and role %I may neither replace nor drop it', p.oid::regprocedure,
            r.rolname, current_user),
        CASE WHEN r.rolsuper THEN 'do the same as a superuser' ELSE format('run: GRANT %I TO %I; or do the same as a superuser', r.rolname, current_user) END)
        FROM pg_proc p JOIN pg_roles r ON r.oid = p.proowner
        WHERE p.oid = to_regprocedure(signature) AND NOT pg_has_role(p.proowner, 'USAGE');
END
$$;

-- tube_reader(owner): the function that runs queries as this role; NULL where there is none. Writes nothing.
CREATE OR REPLACE FUNCTION tube_reader(owner oid) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT format('%I.%I', n.nspname, p.proname)
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname = current_schema() AND p.proowner = owner AND p.proname ~ '^reader_1_[0-9a-f]{32}$'
    LIMIT 1
$$;

-- tube_reader_ensure(tbl): makes the reader of the table's owner, if it is needed and absent. Raises RT005.
CREATE OR REPLACE FUNCTION tube_reader_ensure(tbl regclass) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    owner oid := tube_runs_as(tbl);
    signature text;
BEGIN
    IF owner IS NULL OR tube_reader(owner) IS NOT NULL THEN
        RETURN;
    END IF;
    signature := format('%I.%I(oid, text, text, bigint)', current_schema(), 'reader_1_' || md5(pg_get_userbyid(owner)));
    IF to_regprocedure(signature) IS NOT NULL THEN
        EXECUTE format('DROP FUNCTION %s', signature);  -- of a role that had this name
    END IF;
    EXECUTE format('CREATE FUNCTION %I.%I(tbl oid, query text, path text, bound bigint) RETURNS SETOF text'
        ' LANGUAGE plpgsql SECURITY DEFINER AS %L', current_schema(), 'reader_1_' || md5(pg_get_userbyid(owner)),
        tube_reader_body());
    EXECUTE format('COMMENT ON FUNCTION %s IS %L', signature, 'replicad: reads the tables of its owner');
    EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', signature);
    PERFORM tube_give(signature, owner);
END
$$;

-- tube_as_owner(tbl, query, path): the rows of a query on this table, whose one column is text, run as the table's owner
-- under the search_path path. Raises what the query raises. Writes nothing.
CREATE OR REPLACE FUNCTION tube_as_owner(tbl regclass, query text, path text) RETURNS SETOF text
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    owner oid := tube_runs_as(tbl);
    line text;
    failure json;
BEGIN
    IF owner IS NULL THEN
        PERFORM set_config('search_path', path, true);
        RETURN QUERY EXECUTE query;
        RETURN;
    END IF;
    PERFORM tube_reader_ensure(tbl);
    FOR line IN EXECUTE format('SELECT * FROM %s($1, $2, $3, $4)', tube_reader(owner))
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

DO $$ BEGIN EXECUTE 'ALTER FUNCTION tube_as_owner(regclass, text, text)' || tube_fixed_sql(); END $$;

-- tube_owner_rows(tbl, query, path): the rows of a query on this table, of tube_shard, id and n, run as by tube_as_owner. The
-- id is returned as text. Writes nothing.
CREATE OR REPLACE FUNCTION tube_owner_rows(tbl regclass, query text, path text)
RETURNS TABLE (tube_shard integer, id text, n bigint)
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT nullif(split_part(line, ',', 1), '')::integer,
        substr(line, 3 + length(split_part(line, ',', 1)) + length(split_part(line, ',', 2))), split_part(line, ',', 2)::bigint
    FROM tube_as_owner(tbl, format(
        'SELECT pg_catalog.concat(q.tube_shard, '','', q.n, '','', q.id) FROM (%s) AS q', query), path) AS line
$$;

-- tube_reader_body(): the body of each reader (postgres/sql/reader_body.sql), as that of streams. Writes nothing.
CREATE OR REPLACE FUNCTION tube_reader_body() RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$ SELECT $body$
{reader_body}$body$::text $$;
