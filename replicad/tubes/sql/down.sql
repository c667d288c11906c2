-- Dropping the tubes also drops what their functions created outside of this schema: triggers and {table}_touch
-- functions. Then the readers, which belong to the owners of tables.
DO $prelude$
DECLARE
    reader text;
BEGIN
    PERFORM tube_ensure_absent(r.tube) FROM (SELECT x.tube FROM tube_registry x ORDER BY x.tube) r;
    FOR reader IN SELECT p.oid::regprocedure FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = current_schema() AND p.proname ~ '^reader_1_[0-9a-f]{32}$'
    LOOP
        EXECUTE 'DROP FUNCTION ' || reader;
    END LOOP;
END
$prelude$
