-- tube_check_name(tube): raises RT005 where a tube cannot be called so. Writes nothing.
-- The name stands in lines whose words are parted by blanks, and 50 bytes leave room for the suffixes of its indexes.
CREATE OR REPLACE FUNCTION tube_check_name(tube text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    IF tube IS NULL OR tube = '' OR octet_length(tube) > 50 OR tube ~ '[[:space:][:cntrl:]]' THEN
        PERFORM tube_refuse('RT005',
            format('a tube cannot be called %s: a name has 1 to 50 bytes, no white space and no control characters',
                coalesce(quote_literal(left(tube, 100)), 'NULL')),
            'choose another name; letters, digits, _ and - read best');
    END IF;
    IF to_regclass(format('%I.%I', current_schema(), tube)) IS NOT NULL
            AND NOT EXISTS (SELECT FROM tube_registry r WHERE r.tube = tube_check_name.tube) THEN
        PERFORM tube_refuse('RT005', format('%s.%s exists and is no tube', quote_ident(current_schema()), quote_ident(tube)),
            'choose another name for the tube, or rename what has it');
    END IF;
END
$$;
COMMENT ON FUNCTION tube_check_name(text) IS 'Refuses names that a tube cannot have';
