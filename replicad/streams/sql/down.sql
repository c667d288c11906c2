-- The guards of reserved streams sit on the users' tables; the readers belong to their owners.
DO $prelude$
DECLARE
    reader text;
BEGIN
    PERFORM stream_remove(s.name) FROM (SELECT x.name FROM stream x ORDER BY x.name) s;
    FOR reader IN SELECT p.oid::regprocedure FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = current_schema() AND p.proname ~ '^reader_1_[0-9a-f]{32}$'
    LOOP
        EXECUTE 'DROP FUNCTION ' || reader;
    END LOOP;
END
$prelude$
