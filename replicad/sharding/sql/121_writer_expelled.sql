
-- writer_expelled(stream, instance, term): raises RS011. Writes nothing.
CREATE OR REPLACE FUNCTION writer_expelled(stream text, instance text, term bigint) RETURNS void
LANGUAGE sql AS $$
    SELECT writer_refuse('RS011', format('writer %s does not share stream %L under term %s', instance, stream, term),
        'join anew; what it had may be others'' by now')
$$;
