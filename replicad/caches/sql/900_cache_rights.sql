-- Who may say that a cache is old: roles with EXECUTE on cache_write. PUBLIC may call the functions in front of it, which
-- run with the caller's rights and name the GRANT that is missing. The table itself, and whether there is a stream, are its
-- owner's. Every function looks its neighbours up in this schema alone, whatever the caller's search_path.
DO $rights$
DECLARE
    f record;
BEGIN
    FOR f IN SELECT p.oid::regprocedure AS name, p.proname, p.proacl
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = current_schema()
            AND p.proname IN ('cache_writer', 'cache_write', 'cache_check_right', 'invalidate_cache',
                'invalidate_cache_many', 'cache_enable', 'cache_disable', 'cache_names')
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', f.name, current_schema());
        IF f.proname IN ('cache_enable', 'cache_disable', 'cache_names') THEN
            EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f.name);
        ELSIF f.proname = 'cache_write' AND f.proacl IS NULL THEN  -- made just now: later grants are the operator's
            EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f.name);
        END IF;
    END LOOP;
END
$rights$;
