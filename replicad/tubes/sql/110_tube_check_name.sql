-- tube_check_name(tube): raises RT008 if no tube can have this name, RT005 if it is taken. Writes nothing.
-- The name is a word in commands, so it has no blanks. 50 bytes leave room for the suffixes of its indexes.
CREATE OR REPLACE FUNCTION tube_check_name(tube text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    taken name;
BEGIN
    IF tube IS NULL OR tube = '' OR octet_length(tube) > 50 OR tube ~ '[[:space:][:cntrl:]]' THEN
        PERFORM tube_refuse('RT008',
            format('a tube cannot be called %s: a name has 1 to 50 bytes, no white space and no control characters',
                coalesce(quote_literal(left(tube, 100)), 'NULL')),
            'choose another name; letters, digits, _ and - read best');
    END IF;
    IF EXISTS (SELECT FROM tube_registry r WHERE r.tube = tube_check_name.tube) THEN
        RETURN;
    END IF;
    SELECT found.name INTO taken FROM (
        SELECT c.relname FROM pg_class c WHERE c.relnamespace = quote_ident(current_schema())::regnamespace
        UNION ALL
        SELECT p.proname FROM pg_proc p WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
    ) AS found (name)
        WHERE found.name IN (tube, tube_object_name(tube, '_touch'), tube_object_name(tube, '_trigger'));
    IF FOUND THEN
        PERFORM tube_refuse('RT005',
            format('tube %L needs the name %I.%I, which is taken', tube, current_schema(), taken),
            'choose another name for the tube, or rename what has it');
    END IF;
END
$$;
