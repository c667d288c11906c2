-- Every function looks its neighbours up in this schema alone, whatever the caller's search_path. Whoever may use the
-- tables may use the functions: they do nothing that their caller could not do without them. Functions that touch the rows
-- of some destinations use the index. The other destinations may have millions of rows to take, and with statistics of a
-- quieter time Postgres would read them all, at every write.
DO $settings$
DECLARE
    f record;
BEGIN
    FOR f IN SELECT p.oid::regprocedure AS name, p.proname
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = current_schema() AND p.proname ~ '^federation_'
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', f.name, current_schema());
        IF f.proname IN ('federation_source_write', 'federation_source_collapse', 'federation_source_transaction',
                'federation_source_facts', 'federation_source_edus', 'federation_source_standing', 'federation_source_sweep') THEN
            EXECUTE format('ALTER FUNCTION %s SET enable_seqscan = off', f.name);
            EXECUTE format('ALTER FUNCTION %s SET enable_hashjoin = off', f.name);
            EXECUTE format('ALTER FUNCTION %s SET enable_mergejoin = off', f.name);
        END IF;
    END LOOP;
END
$settings$;
