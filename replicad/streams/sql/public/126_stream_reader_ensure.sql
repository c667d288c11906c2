-- stream_reader_ensure(tbl): makes the function that runs statements as the owner of this table, if one is needed and there
-- is none. Raises RS002 where the asking role may not make it. Creates a function that belongs to the table's owner.
--
-- The reader, reader_1_...(tbl, query, path, bound), returns the rows of a query, whose one column is text. It stops after
-- the row that exceeds `bound` bytes, and then adds the row `+`. Where the query fails, it adds `!` and the error as JSON.
--
-- What the owner's code must not be able to do, and what prevents it:
--   take back the role of the session: SET ROLE and RESET ROLE fail in a SECURITY DEFINER function;
--   change settings for later statements, leave cursors or notifications: all is done in a subtransaction, and rolled back;
--   write, so that a deferred trigger runs at the end of the transaction, as the session's role: it is READ ONLY;
--   replace statements that the session has prepared: those that it prepares are removed.
-- The owner cannot change the body: this needs CREATE on the schema. But he can alter the function. So it tries first
-- whether SET ROLE fails, whose rights it has, and whether it is volatile, and it looks up no name in a search_path.
CREATE OR REPLACE FUNCTION stream_reader_ensure(tbl regclass) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    owner oid := stream_runs_as(tbl);
    role name := pg_get_userbyid(owner);
    home name := current_schema();
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = home);
    signature text;
    granted boolean;
BEGIN
    IF stream_reader_wanted(tbl) IS NULL THEN
        RETURN;
    END IF;
    signature := format('%I.%I(oid, text, text, bigint)', home, 'reader_1_' || md5(role));
    granted := has_schema_privilege(owner, home, 'CREATE');
    EXECUTE format('DROP FUNCTION IF EXISTS %s', signature);  -- of a role that had this name, or that we may not call
    EXECUTE format('CREATE FUNCTION %I.%I(tbl oid, query text, path text, bound bigint) RETURNS SETOF text'
        ' LANGUAGE plpgsql SECURITY DEFINER AS %L', home, 'reader_1_' || md5(role), stream_reader_body());
    EXECUTE format('COMMENT ON FUNCTION %s IS %L', signature, format('replicad: reads the tables of %I as %1$I', role));
    EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', signature);
    IF NOT granted THEN
        EXECUTE format('GRANT CREATE ON SCHEMA %I TO %I', home, role);  -- no other session sees it
    END IF;
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', signature, role);
    IF NOT granted THEN
        EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM %I', home, role);
    END IF;
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', signature, keeper);
EXCEPTION WHEN insufficient_privilege THEN
    PERFORM stream_refuse(SQLERRM, stream_reader_wanted(tbl));
END
$$;
COMMENT ON FUNCTION stream_reader_ensure(regclass) IS 'Makes the function that reads a table as its owner';
