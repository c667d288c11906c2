-- federation_source_record(source, sender, stream, upto, ...): facts, and who is to take them; with that the sender has
-- recorded the stream up to `upto`. Returns up to where all senders of its name have recorded it. Facts are given by tokens, parts, rooms and bodies (arrays of one length); fact number i (from
-- 1) is for destination names[j] wherever numbers[j] = i. Repeating it changes nothing: what a destination has, or has
-- under way, is not recorded for it again, and a transaction under way keeps its bodies. `newcomers` are destinations
-- that may have no row yet. Writes federation_fact, federation_destination, federation_destination_room,
-- federation_sender.
CREATE OR REPLACE FUNCTION federation_source_record(source text, sender text, stream text, upto bigint, tokens bigint[],
    parts integer[], rooms text[], bodies text[], numbers integer[], names text[], newcomers text[]) RETURNS bigint
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    IF EXISTS (
        SELECT FROM unnest(tokens, parts, bodies) AS f (token, part, body)
        JOIN federation_fact held ON held.source = federation_source_record.source
            AND held.stream_ordering = f.token AND held.part = f.part
        WHERE held.body::text <> f.body::json::text
    ) THEN  -- after a reset the same id is another fact, and with another routing it has another body
        UPDATE federation_destination d
        SET txn_pdus = (SELECT t.pdus FROM federation_source_transaction(d.source, d.name) t)
        WHERE d.source = federation_source_record.source AND d.txn_id IS NOT NULL AND d.txn_pdus IS NULL;
    END IF;
    INSERT INTO federation_fact AS held (source, stream_ordering, part, body)
    SELECT federation_source_record.source, f.token, f.part, f.body::json FROM unnest(tokens, parts, bodies) AS f (token, part, body)
    ON CONFLICT (source, stream_ordering, part) DO UPDATE SET body = excluded.body
    WHERE held.body::text <> excluded.body::text;
    INSERT INTO federation_destination (source, name)
    SELECT federation_source_record.source, n FROM unnest(newcomers) n
    ON CONFLICT DO NOTHING;
    INSERT INTO federation_destination_room (source, destination, stream_ordering, part, room)
    SELECT federation_source_record.source, t.name, f.token, f.part, f.room
    FROM unnest(tokens, parts, rooms) WITH ORDINALITY AS f (token, part, room, number)
    JOIN unnest(numbers, names) AS t (number, name) ON t.number = f.number
    LEFT JOIN federation_destination d ON d.source = federation_source_record.source AND d.name = t.name
    WHERE d.name IS NULL OR (
        (f.token, f.part) > (d.last_successful_stream_ordering, d.last_successful_part)
        AND (d.txn_id IS NULL OR (f.token, f.part) > (d.txn_stream_ordering, d.txn_part)))
    ORDER BY t.name, f.token, f.part  -- what a destination takes, and removes, together lies together
    ON CONFLICT DO NOTHING;
    UPDATE federation_sender s SET token = upto
    WHERE s.source = federation_source_record.source AND s.name = federation_source_record.sender
        AND s.stream = federation_source_record.stream;
    RETURN federation_source_recorded(sender, stream);
END
$$;
