
-- writer_not_owner(stream, key, instance, term): raises RS010, or what writer_find raises. Writes nothing.
CREATE OR REPLACE FUNCTION writer_not_owner(stream text, key text, instance text, term bigint) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    o record := writer_owner(stream, key);
BEGIN
    IF key IS NULL THEN
        PERFORM writer_refuse('RS002', 'NULL is nobody''s key', 'give the key as text');
    END IF;
    PERFORM writer_refuse('RS010',
        format('key %L of stream %L belongs to %s, not to %s under term %s', left(key, 100), stream,
            coalesce('writer ' || o.owner || coalesce(' at ' || o.address, ''), 'no writer at this moment'),
            instance, coalesce(term::text, 'NULL')),
        'nothing was written; send it to its owner, or wait until it has one');
END
$$;
