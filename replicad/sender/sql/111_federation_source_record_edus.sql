-- federation_source_record_edus(source, sender, stream, upto, names, keys, bodies): updates that may not be dropped, in
-- order, each for one destination; with that the sender has recorded the stream up to `upto`. Returns up to where all
-- senders of its name have recorded it. Writes federation_edu,
-- federation_destination, federation_sender.
CREATE OR REPLACE FUNCTION federation_source_record_edus(source text, sender text, stream text, upto bigint, names text[],
    keys text[], bodies text[]) RETURNS bigint
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO federation_destination (source, name)
    SELECT DISTINCT federation_source_record_edus.source, n FROM unnest(names) n
    ON CONFLICT DO NOTHING;
    INSERT INTO federation_edu AS held (source, destination, key, body)
    SELECT federation_source_record_edus.source, u.name, u.key, u.body::json
    FROM (  -- only the last of a key: a statement cannot replace one row twice
        SELECT e.name, e.key, e.body, e.number,
            row_number() OVER (PARTITION BY e.name, e.key ORDER BY e.number DESC) AS age
        FROM unnest(names, keys, bodies) WITH ORDINALITY AS e (name, key, body, number)
    ) u
    WHERE u.key IS NULL OR u.age = 1
    ORDER BY u.number
    ON CONFLICT (source, destination, key) DO UPDATE SET id = DEFAULT, body = excluded.body;
    UPDATE federation_sender s SET token = upto
    WHERE s.source = federation_source_record_edus.source AND s.name = federation_source_record_edus.sender
        AND s.stream = federation_source_record_edus.stream;
    RETURN federation_source_recorded(sender, stream);
END
$$;
