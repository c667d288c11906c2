-- Opens the script that installs part {part} at version {version}, or brings an older installation up to it: everything
-- in one transaction, into schema {where}. Refuses to put an older version over a newer one.
BEGIN;
SET LOCAL client_min_messages = warning;
SET LOCAL check_function_bodies = on;
DO $up$
DECLARE
    folder text := {schema};
    present integer;
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
    CREATE TABLE IF NOT EXISTS {part}_version (
        version integer NOT NULL,
        digest text NOT NULL,  -- of the files; tells two builds of one version apart
        installed_at timestamptz NOT NULL DEFAULT clock_timestamp()
    );
    COMMENT ON TABLE {part}_version IS 'replicad: what is installed in this schema';
    SELECT version INTO present FROM {part}_version;
    IF present > {version} THEN
        RAISE EXCEPTION 'schema % holds version % of replicad''s {part} part, newer than the {version} of this script',
            folder, present USING ERRCODE = '55000', HINT = 'use the newer replicad';
    END IF;
    IF present IS NULL THEN
        INSERT INTO {part}_version VALUES (0, '');
    END IF;
{steps}
END
$up$;
