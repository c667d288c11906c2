DECLARE
    moment text := extract(epoch FROM statement_timestamp())::text;
    stack text;
    inner_statement text;
BEGIN
    GET DIAGNOSTICS stack = PG_CONTEXT;
    inner_statement := split_part(stack, E'\n', 2);
    IF stack ~* '\m(merge|execute)\M' OR inner_statement <> '' AND inner_statement !~* '\mupdate(\s|$)' THEN
        PERFORM set_config(TG_ARGV[2], 'on', true);
    ELSIF current_setting('replicad.plain', true) IS DISTINCT FROM moment THEN
        IF (current_query() ~* '\m(merge|execute)\M') IS NOT FALSE THEN
            PERFORM set_config(TG_ARGV[2], 'on', true);
        ELSE
            PERFORM set_config('replicad.plain', moment, true);
        END IF;
    END IF;
    RETURN NEW;
END
