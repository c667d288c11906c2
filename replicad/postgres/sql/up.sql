-- Opens the script that installs part {part} at version {version}, or brings an older installation up to it: everything
-- in one transaction, into schema {where}. Refuses to put an older version over a newer one, and to take over objects
-- of somebody else that have the names of ours.
SET LOCAL client_min_messages = warning;
SET LOCAL check_function_bodies = on;
SET LOCAL lock_timeout = '20s';  -- while we wait for a table, everybody else waits behind us
DO $up$
DECLARE
    folder text := {schema};
    present integer;
    ours boolean;
    fresh jsonb;
    taken text;
BEGIN
    IF folder IS NULL THEN
        folder := current_schema();
        IF folder IS NULL THEN
            RAISE EXCEPTION 'no schema of the search_path exists' USING ERRCODE = '3F000',
                HINT = 'create the schema and put it first into search_path';
        END IF;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('replicad schema'), hashtext(folder));
    IF to_regnamespace(quote_ident(folder)) IS NULL THEN
        EXECUTE format('CREATE SCHEMA %I', folder);
        -- Then it goes with the last part in it.
        EXECUTE format('COMMENT ON SCHEMA %I IS %L', folder, 'made by replicad');
    END IF;
    PERFORM set_config('search_path', quote_ident(folder) || ', pg_temp', true);

    SELECT count(*) = 3 INTO ours FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        WHERE c.relnamespace = to_regnamespace(quote_ident(folder)) AND c.relname = '{part}_version'
            AND c.relkind = 'r' AND NOT a.attisdropped AND a.attname IN ('version', 'digest', 'installed_at');
    IF ours THEN
        EXECUTE 'SELECT version FROM {part}_version' INTO present;
        IF present IS NULL THEN
            RAISE EXCEPTION 'table %.{part}_version is empty, so the version of the {part} part is unknown', folder
                USING ERRCODE = '55000', HINT = 'restore its row from a backup';
        END IF;
    END IF;
    IF present > {version} THEN
        RAISE EXCEPTION 'schema % holds version % of replicad''s {part} part, newer than the {version} of this script',
            folder, present USING ERRCODE = 'RI001', HINT = 'use the newer replicad';
    END IF;

    fresh := {fresh}::jsonb -> coalesce(present, 0)::text;
    SELECT string_agg(found.what, ', ' ORDER BY found.what) INTO taken FROM (
        SELECT CASE c.relkind WHEN 'r' THEN 'table' WHEN 'p' THEN 'table' WHEN 'v' THEN 'view'
                WHEN 'S' THEN 'sequence' WHEN 'i' THEN 'index' WHEN 'I' THEN 'index' WHEN 'c' THEN 'type'
                WHEN 'm' THEN 'materialized view' WHEN 'f' THEN 'foreign table' ELSE 'relation' END
                || ' ' || quote_ident(c.relname) AS what
            FROM pg_class c WHERE c.relnamespace = to_regnamespace(quote_ident(folder))
                AND ((fresh -> 'relations') || (fresh -> 'types') || (fresh -> 'indexes')) ? c.relname
        UNION ALL
        SELECT 'type ' || quote_ident(t.typname)
            FROM pg_type t WHERE t.typnamespace = to_regnamespace(quote_ident(folder)) AND t.typrelid = 0
                AND ((fresh -> 'relations') || (fresh -> 'types')) ? t.typname
        UNION ALL
        SELECT format('function %I(%s)', p.proname, pg_get_function_identity_arguments(p.oid))
            FROM pg_proc p WHERE p.pronamespace = to_regnamespace(quote_ident(folder))
                AND (fresh -> 'routines') ? p.proname
    ) AS found;
    IF taken IS NOT NULL THEN
        RAISE EXCEPTION 'schema % holds objects that are not replicad''s and have names that its {part} part needs: %',
            folder, left(taken, 2000) USING ERRCODE = 'RI002',
            HINT = 'rename them, or install replicad into another schema ({option} NAME); nothing was changed in this schema';
    END IF;

    IF present IS NULL THEN
        CREATE TABLE {part}_version (
            version integer NOT NULL,
            serves integer NOT NULL,  -- the oldest version of programs that can use this one
            digest text NOT NULL,  -- of the files of this build, then of other builds of this version that it replaced
            installed_at timestamptz NOT NULL DEFAULT clock_timestamp()
        );
        COMMENT ON TABLE {part}_version IS 'replicad: what is installed in this schema';
        INSERT INTO {part}_version VALUES (0, 0, '');
    END IF;
{steps}
END
$up$;
