-- Removes part {part} from schema {where} without a trace. Does nothing where it is not installed, and fails where
-- something that is not ours depends on what would go.
SET LOCAL client_min_messages = warning;
DO $down$
DECLARE
    folder text := coalesce({schema}, current_schema());
    statement text;
    kind record;
BEGIN
    IF to_regclass(format('%I.{part}_version', folder)) IS NULL THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('replicad schema'), hashtext(folder));
    PERFORM set_config('search_path', quote_ident(folder) || ', pg_temp', true);
{prelude}
    FOR statement IN
        SELECT format('DROP TRIGGER on_disk ON %s', t.tgrelid::regclass) FROM pg_trigger t
        WHERE t.tgfoid = to_regproc('{part}_on_disk') AND t.tgname = 'on_disk'
    LOOP
        EXECUTE statement;
    END LOOP;
    -- Each kind in one statement: what depends on each other goes together.
    SELECT 'DROP ROUTINE ' || string_agg(p.oid::regprocedure::text, ', ') INTO statement
        FROM pg_proc p
        WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname = ANY ({routines});
    IF statement IS NOT NULL THEN
        EXECUTE statement;
    END IF;
    FOR kind IN
        SELECT * FROM (VALUES (1, 'v', 'VIEW'), (2, 'r', 'TABLE'), (3, 'S', 'SEQUENCE')) AS k (place, relkind, name)
        ORDER BY place
    LOOP
        SELECT format('DROP %s %s', kind.name, string_agg(format('%I', c.relname), ', ')) INTO statement
            FROM pg_class c
            WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND c.relkind = kind.relkind
                AND c.relname = ANY ({relations}) HAVING count(*) > 0;
        IF statement IS NOT NULL THEN
            EXECUTE statement;
        END IF;
    END LOOP;
    SELECT 'DROP TYPE ' || string_agg(format('%I', t.typname), ', ') INTO statement
        FROM pg_type t WHERE t.typnamespace = quote_ident(current_schema())::regnamespace AND t.typname = ANY ({types});
    IF statement IS NOT NULL THEN
        EXECUTE statement;
    END IF;
    IF obj_description(to_regnamespace(quote_ident(folder)), 'pg_namespace') = 'made by replicad' AND NOT EXISTS (
            SELECT FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident(folder))
            UNION ALL SELECT FROM pg_proc WHERE pronamespace = to_regnamespace(quote_ident(folder))
            UNION ALL SELECT FROM pg_type WHERE typnamespace = to_regnamespace(quote_ident(folder))) THEN
        EXECUTE format('DROP SCHEMA %I', folder);
    END IF;
END
$down$;
