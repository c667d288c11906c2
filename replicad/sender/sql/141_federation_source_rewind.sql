-- federation_source_rewind(source, sender, stream, token, names): the stream goes on behind `token`, which lies before
-- what was recorded: a reset, or an operator's wish. What was recorded of later facts is forgotten, and so is that
-- destinations have taken them: whatever the stream has behind `token` is delivered to them. A transaction under way is
-- kept where federation_source_kept says so. A trial that is kept is an ordinary transaction from then on: what was refused
-- before it, and is not void, is outstanding. Only for the destinations in `names`. Returns how many facts were outstanding. Writes federation_sender, federation_destination,
-- federation_destination_room, federation_fact.
CREATE OR REPLACE FUNCTION federation_source_rewind(source text, sender text, stream text, token bigint, names text[])
RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    dropped bigint;
BEGIN
    UPDATE federation_destination d SET  -- repeated with its id and bodies; it says nothing about facts above `token`
        txn_pdus = (SELECT t.pdus FROM federation_source_transaction(d.source, d.name) t),
        txn_part = CASE WHEN d.txn_aside IS NULL OR d.last_successful_stream_ordering > federation_source_rewind.token
            THEN 2147483647 ELSE d.last_successful_part END,
        txn_stream_ordering = CASE WHEN d.txn_aside IS NULL THEN federation_source_rewind.token
            ELSE least(d.last_successful_stream_ordering, federation_source_rewind.token) END,
        txn_aside = NULL
    WHERE d.source = federation_source_rewind.source AND d.name = ANY (names)
        AND d.txn_stream_ordering > federation_source_rewind.token
        AND federation_source_kept(d.source, d.name, federation_source_rewind.token);
    UPDATE federation_destination d SET
        last_successful_stream_ordering = least(d.last_successful_stream_ordering, federation_source_rewind.token),
        last_successful_part = CASE WHEN d.last_successful_stream_ordering > federation_source_rewind.token THEN 2147483647
            ELSE d.last_successful_part END
    WHERE d.source = federation_source_rewind.source AND d.name = ANY (names)
        AND d.last_successful_stream_ordering > federation_source_rewind.token;
    UPDATE federation_destination d SET
        txn_id = NULL, txn_ts = NULL, txn_stream_ordering = NULL, txn_part = NULL, txn_edus = NULL, txn_edu_ids = NULL,
        txn_pdus = NULL, txn_aside = NULL
    WHERE d.source = federation_source_rewind.source AND d.name = ANY (names)
        AND d.txn_stream_ordering > federation_source_rewind.token;
    DELETE FROM federation_destination_room r
    WHERE r.source = federation_source_rewind.source AND r.destination = ANY (names)
        AND r.stream_ordering > federation_source_rewind.token;
    GET DIAGNOSTICS dropped = ROW_COUNT;
    DELETE FROM federation_fact f
    WHERE f.source = federation_source_rewind.source AND f.stream_ordering > federation_source_rewind.token
        AND NOT EXISTS (SELECT FROM federation_destination_room r
                        WHERE r.source = f.source AND r.stream_ordering = f.stream_ordering AND r.part = f.part);
    UPDATE federation_sender s SET token = federation_source_rewind.token
    WHERE s.source = federation_source_rewind.source AND s.name = federation_source_rewind.sender
        AND s.stream = federation_source_rewind.stream;
    RETURN dropped;
END
$$;
