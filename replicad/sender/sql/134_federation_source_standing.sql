-- federation_source_standing(source, after, most): how destinations stand, by name, those behind `after` (NULL: from the first).
CREATE OR REPLACE FUNCTION federation_source_standing(source text, after text, most integer)
RETURNS TABLE (name text, token bigint, part integer, serial bigint, failures integer, retry_in double precision,
    catching_up boolean, outstanding boolean)
LANGUAGE sql STABLE AS $$
    SELECT d.name, d.last_successful_stream_ordering, d.last_successful_part, d.serial, d.failures,
        extract(epoch FROM d.retry_at - clock_timestamp())::double precision, d.catching_up,
        d.txn_id IS NOT NULL
            OR EXISTS (SELECT FROM federation_destination_room r WHERE r.source = d.source AND r.destination = d.name)
            OR EXISTS (SELECT FROM federation_edu u WHERE u.source = d.source AND u.destination = d.name)
    FROM federation_destination d
    WHERE d.source = federation_source_standing.source
        AND (federation_source_standing.after IS NULL OR d.name > federation_source_standing.after)
    ORDER BY d.name
    LIMIT federation_source_standing.most
$$;
