-- federation_source_park(source, names, tokens, parts, rooms, bodies, reasons): facts and updates (token NULL; room is
-- then the key) that are for destinations to which nothing can be sent, with the reason (arrays of one length). A fact
-- is not parked again. Writes federation_parked.
CREATE OR REPLACE FUNCTION federation_source_park(source text, names text[], tokens bigint[], parts integer[],
    rooms text[], bodies text[], reasons text[]) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO federation_parked (source, destination, stream_ordering, part, room, body, reason)
    SELECT federation_source_park.source, p.name, p.token, p.part, p.room, p.body::json, p.reason
    FROM unnest(names, tokens, parts, rooms, bodies, reasons) WITH ORDINALITY
        AS p (name, token, part, room, body, reason, number)
    ORDER BY p.number
    ON CONFLICT DO NOTHING
$$;
