-- Closes the script that installs part {part}: functions go that another build of this version declared under the same
-- name with other arguments, or calls that leave arguments out would fit both. (A released function keeps its arguments
-- while programs that call it may run; a changed one gets a new name.)
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
UPDATE {part}_version SET version = {version}, {serves}installed_at = clock_timestamp(),
    digest = concat_ws(' ', '{digest}', (
        SELECT string_agg(w.word, ' ' ORDER BY w.place)
        FROM string_to_table(digest, ' ') WITH ORDINALITY AS w (word, place)
        WHERE version = {version} AND w.word NOT IN ('', '{digest}') AND w.place <= 50
    ));
