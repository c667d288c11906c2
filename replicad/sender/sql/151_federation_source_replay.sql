-- federation_source_replay(source, names): what is parked for these destinations, and wanted again, is outstanding
-- again, behind all that is recorded for its destination. A fact gets a place of its own: the token after the last one,
-- and a part below that of every fact of the stream, so that it comes before the next fact. Returns the names for which
-- there was something. Writes federation_parked, federation_destination, federation_destination_room, federation_fact,
-- federation_edu.
CREATE OR REPLACE FUNCTION federation_source_replay(source text, names text[]) RETURNS SETOF text
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    one record;
    place record;
    here text := source;
BEGIN
    FOR one IN
        DELETE FROM federation_parked p WHERE p.source = here AND p.wanted AND p.destination = ANY (names) RETURNING p.*
    LOOP
        INSERT INTO federation_destination (source, name) VALUES (here, one.destination) ON CONFLICT DO NOTHING;
        IF one.stream_ordering IS NULL THEN
            INSERT INTO federation_edu (source, destination, key, body)
            VALUES (here, one.destination, one.room, one.body)
            ON CONFLICT (source, destination, key) DO NOTHING;  -- a newer one waits
        ELSE
            SELECT t.token + (t.part >= 0)::integer AS token,
                (-2000000000 + nextval(pg_get_serial_sequence('federation_parked', 'id')))::integer AS part INTO place
            FROM (
                SELECT d.last_successful_stream_ordering, d.last_successful_part
                FROM federation_destination d WHERE d.source = here AND d.name = one.destination
                UNION ALL
                SELECT d.txn_stream_ordering, d.txn_part
                FROM federation_destination d
                WHERE d.source = here AND d.name = one.destination AND d.txn_id IS NOT NULL
                UNION ALL
                SELECT r.stream_ordering, r.part
                FROM federation_destination_room r WHERE r.source = here AND r.destination = one.destination
            ) t (token, part)
            ORDER BY t.token DESC, t.part DESC
            LIMIT 1;
            INSERT INTO federation_fact (source, stream_ordering, part, body)
            VALUES (here, place.token, place.part, one.body);
            INSERT INTO federation_destination_room (source, destination, stream_ordering, part, room)
            VALUES (here, one.destination, place.token, place.part, one.room);
        END IF;
        RETURN NEXT one.destination;
    END LOOP;
END
$$;
