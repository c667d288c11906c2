-- stream_readers_drop(): removes the functions that run statements as the owners of tables, before the part is removed.
CREATE OR REPLACE FUNCTION stream_readers_drop() RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    reader text;
BEGIN
    FOR reader IN SELECT p.oid::regprocedure FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = current_schema() AND p.proname ~ '^reader_1_[0-9a-f]{32}$'
    LOOP
        EXECUTE 'DROP FUNCTION ' || reader;
    END LOOP;
END
$$;
COMMENT ON FUNCTION stream_readers_drop() IS 'Removes the functions that run statements as the owners of tables';
