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
