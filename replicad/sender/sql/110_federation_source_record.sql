-- federation_source_record(source, sender, stream, upto, ...): facts, and who is to take them; with that the sender has
-- recorded the stream up to `upto`. Returns up to where all senders of its name have recorded it. Facts are given by tokens, parts, rooms and bodies (arrays of one length); fact number i (from
-- 1) is for destination names[j] wherever numbers[j] = i. Repeating it changes nothing. `newcomers` are destinations
-- that may have no row yet. Writes federation_fact, federation_destination, federation_destination_room,
-- federation_sender.
CREATE OR REPLACE FUNCTION federation_source_record(source text, sender text, stream text, upto bigint, tokens bigint[],
    parts integer[], rooms text[], bodies text[], numbers integer[], names text[], newcomers text[]) RETURNS bigint
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO federation_fact AS held (source, stream_ordering, part, body)
    SELECT federation_source_record.source, f.token, f.part, f.body::json FROM unnest(tokens, parts, bodies) AS f (token, part, body)
    ON CONFLICT (source, stream_ordering, part) DO UPDATE SET body = excluded.body
    WHERE held.body::text <> excluded.body::text;  -- after a reset the same id may be another fact
    INSERT INTO federation_destination (source, name)
    SELECT federation_source_record.source, n FROM unnest(newcomers) n
    ON CONFLICT DO NOTHING;
    INSERT INTO federation_destination_room (source, destination, stream_ordering, part, room)
    SELECT federation_source_record.source, t.name, f.token, f.part, f.room
    FROM unnest(tokens, parts, rooms) WITH ORDINALITY AS f (token, part, room, number)
    JOIN unnest(numbers, names) AS t (number, name) ON t.number = f.number
    ON CONFLICT DO NOTHING;
    UPDATE federation_sender s SET token = upto
    WHERE s.source = federation_source_record.source AND s.name = federation_source_record.sender
        AND s.stream = federation_source_record.stream;
    RETURN federation_source_recorded(sender, stream);
END
$$;
COMMENT ON FUNCTION
    federation_source_record(text, text, text, bigint, bigint[], integer[], text[], text[], integer[], text[], text[])
    IS 'Records facts and the destinations that are to take them';
