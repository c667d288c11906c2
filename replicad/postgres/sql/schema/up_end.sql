-- Closes the script that installs part {part}: what earlier builds called the same and declared otherwise goes, or
-- calls that leave arguments out would fit both.
DO $stale$
DECLARE
    stale regprocedure;
BEGIN
    FOR stale IN SELECT p.oid FROM pg_proc p
        WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname = ANY ({routines})
            AND p.xmin <> pg_current_xact_id()::xid
    LOOP
        EXECUTE format('DROP ROUTINE %s', stale);
    END LOOP;
END
$stale$;
UPDATE {part}_version SET version = {version}, digest = '{digest}', installed_at = clock_timestamp();
COMMIT;
