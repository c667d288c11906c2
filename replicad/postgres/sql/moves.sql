DECLARE
    moment text := statement_timestamp()::text;
    known boolean := current_setting('replicad.moves_at', true) IS NOT DISTINCT FROM moment;
    stack text;
BEGIN
    IF known AND current_setting('replicad.moves', true) = 'on' THEN
        RETURN NEW;
    END IF;
    GET DIAGNOSTICS stack = PG_CONTEXT;
    IF stack LIKE E'%\n%' OR NOT known AND (current_query() ~* '\m(merge|execute)\M') IS NOT FALSE THEN
        PERFORM set_config('replicad.moves', 'on', true), set_config('replicad.moves_at', moment, true);
    ELSIF NOT known THEN
        PERFORM set_config('replicad.moves', 'off', true), set_config('replicad.moves_at', moment, true);
    END IF;
    RETURN NEW;
END
