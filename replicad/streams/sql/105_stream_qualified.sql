-- stream_qualified(tbl): the name of a table with its schema, quoted, whatever the search_path.
CREATE OR REPLACE FUNCTION stream_qualified(tbl regclass) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = tbl
$$;
