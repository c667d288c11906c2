-- Every function looks its neighbours up in this schema alone, whatever the caller's search_path. Whoever may use the
-- tables may use the functions: they do nothing that their caller could not do without them.
DO $rights$
DECLARE
    f record;
BEGIN
    FOR f IN SELECT p.oid::regprocedure AS name
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = current_schema() AND p.proname ~ '^federation_'
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', f.name, current_schema());
    END LOOP;
END
$rights$;
