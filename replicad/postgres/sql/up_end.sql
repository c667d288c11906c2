-- Closes the script that installs part {part}. First: a crash must not take back what is written to these tables. Others
-- act on it as soon as it is committed: a sender sends a fact under the transaction id that it has noted, and a system of
-- the user's fences by a term. In a transaction with synchronous_commit = off Postgres answers the commit before the
-- commit is on disk. So each statement that writes such a table raises the setting for the rest of its transaction,
-- whoever runs it. A trigger of the table does that, so no function can forget it. It costs a statement 1.2 us; with the
-- condition in a WHEN of the trigger, which Postgres parses for each statement, it would cost 4. (Unlogged tables are
-- empty after a crash in any case.)
CREATE OR REPLACE FUNCTION {part}_on_disk() RETURNS trigger LANGUAGE plpgsql AS $on_disk$
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'local', true);
    END IF;
    RETURN NULL;
END
$on_disk$;
DO $on_disk$
DECLARE
    one regclass;
BEGIN
    FOR one IN SELECT c.oid FROM pg_class c
        WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND c.relname = ANY ({relations})
            AND c.relkind = 'r' AND c.relpersistence = 'p'
            AND NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname = 'on_disk')
    LOOP
        EXECUTE format('CREATE TRIGGER on_disk BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s '
            'FOR EACH STATEMENT EXECUTE FUNCTION {part}_on_disk()', one);
    END LOOP;
END
$on_disk$;
-- Then functions go that another build of this version declared under the same
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
UPDATE {part}_version SET version = {version}, serves = {serves}, installed_at = clock_timestamp(),
    digest = concat_ws(' ', '{digest}', (
        SELECT string_agg(w.word, ' ' ORDER BY w.place)
        FROM string_to_table(digest, ' ') WITH ORDINALITY AS w (word, place)
        WHERE version = {version} AND w.word NOT IN ('', '{digest}') AND w.place <= 50
    ));
-- What the script has created belongs to the owner of the schema, whoever ran it. Otherwise the daemon could not use what a
-- superuser has upgraded, nor upgrade it later. (Nobody can log in as pg_database_owner, who owns the schema public.)
DO $belongs$
DECLARE
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = current_schema());
    mine oid := (SELECT r.oid FROM pg_roles r WHERE r.rolname = current_user);
    what text;
BEGIN
    IF keeper = current_user OR keeper ~ '^pg_' OR NOT pg_has_role(keeper, 'MEMBER') THEN
        RETURN;
    END IF;
    FOR what IN
        SELECT format('%s %I', k.name, c.relname)
            FROM pg_class c JOIN (VALUES ('r', 'TABLE'), ('v', 'VIEW'), ('S', 'SEQUENCE')) AS k (kind, name) ON k.kind = c.relkind
            WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND c.relname = ANY ({relations}) AND c.relowner = mine
                AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid
                    AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i'))  -- follows its table
        UNION ALL SELECT format('TYPE %I', t.typname)
            FROM pg_type t
            WHERE t.typnamespace = quote_ident(current_schema())::regnamespace AND t.typname = ANY ({types}) AND t.typowner = mine
        UNION ALL SELECT format('ROUTINE %s', p.oid::regprocedure)
            FROM pg_proc p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname = ANY ({routines}) AND p.proowner = mine
    LOOP
        EXECUTE format('ALTER %s OWNER TO %I', what, keeper);
    END LOOP;
END
$belongs$;
