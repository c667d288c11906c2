-- federation_source_edus(source, destination, most): the oldest updates that it has yet to take, one more than `most`
-- where there are more.
CREATE OR REPLACE FUNCTION federation_source_edus(source text, destination text, most integer)
RETURNS TABLE (id bigint, body text)
LANGUAGE sql STABLE AS $$
    SELECT u.id, u.body::text
    FROM federation_edu u
    WHERE u.source = federation_source_edus.source AND u.destination = federation_source_edus.destination
    ORDER BY u.id
    LIMIT federation_source_edus.most + 1
$$;
