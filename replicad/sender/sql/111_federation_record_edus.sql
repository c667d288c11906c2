-- federation_record_edus(sender, stream, upto, names, keys, bodies): updates that may not be dropped, in order, each
-- for one destination; with that the sender has recorded the stream up to `upto`. Writes federation_edu,
-- federation_destination, federation_sender.
CREATE OR REPLACE FUNCTION federation_record_edus(sender text, stream text, upto bigint, names text[], keys text[],
    bodies text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO federation_destination (name) SELECT DISTINCT n FROM unnest(names) n
    ON CONFLICT DO NOTHING;
    INSERT INTO federation_edu AS held (destination, key, body)
    SELECT u.name, u.key, u.body::json
    FROM (  -- only the last of a key: a statement cannot replace one row twice
        SELECT e.name, e.key, e.body, e.number,
            row_number() OVER (PARTITION BY e.name, e.key ORDER BY e.number DESC) AS age
        FROM unnest(names, keys, bodies) WITH ORDINALITY AS e (name, key, body, number)
    ) u
    WHERE u.key IS NULL OR u.age = 1
    ORDER BY u.number
    ON CONFLICT (destination, key) DO UPDATE SET id = DEFAULT, body = excluded.body;
    UPDATE federation_sender s SET token = upto
    WHERE s.name = federation_record_edus.sender AND s.stream = federation_record_edus.stream;
END
$$;
COMMENT ON FUNCTION federation_record_edus(text, text, bigint, text[], text[], text[])
    IS 'Records updates that may not be dropped';
