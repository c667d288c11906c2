-- federation_source_write(source, entries): how destinations stand now. `entries` is a JSON array of objects with the
-- columns of federation_destination and, as done_edus, the ids of updates that were taken. What a destination has taken
-- is removed. Writes federation_destination, federation_destination_room, federation_edu.
CREATE OR REPLACE FUNCTION federation_source_write(source text, entries json) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO federation_destination AS d (source, name, last_successful_stream_ordering, last_successful_part, serial,
        txn_id, txn_ts, txn_stream_ordering, txn_part, txn_edus, txn_edu_ids, txn_pdus,
        failures, failing_since, retry_at, last_error, catching_up)
    SELECT federation_source_write.source, e.name, e.token, e.part, e.serial,
        e.txn_id, e.txn_ts, e.txn_token, e.txn_part, e.txn_edus, e.txn_edu_ids, e.txn_pdus,
        e.failures, CASE WHEN e.failures > 0 THEN clock_timestamp() END,
        clock_timestamp() + make_interval(secs => e.retry_in), e.last_error, e.catching_up
    FROM json_to_recordset(entries) AS e (name text, token bigint, part integer, serial bigint,
        txn_id text, txn_ts bigint, txn_token bigint, txn_part integer, txn_edus text[], txn_edu_ids bigint[],
        txn_pdus text[], failures integer, retry_in double precision, last_error text, catching_up boolean)
    ON CONFLICT (source, name) DO UPDATE SET
        last_successful_stream_ordering = excluded.last_successful_stream_ordering,
        last_successful_part = excluded.last_successful_part,
        serial = excluded.serial,
        txn_id = excluded.txn_id, txn_ts = excluded.txn_ts,
        txn_stream_ordering = excluded.txn_stream_ordering, txn_part = excluded.txn_part,
        txn_edus = excluded.txn_edus, txn_edu_ids = excluded.txn_edu_ids,
        txn_pdus = CASE WHEN d.txn_id = excluded.txn_id THEN coalesce(d.txn_pdus, excluded.txn_pdus)
            ELSE excluded.txn_pdus END,  -- federation_source_record may have kept them
        failures = excluded.failures,
        failing_since = CASE WHEN excluded.failures > 0 THEN coalesce(d.failing_since, excluded.failing_since) END,
        retry_at = excluded.retry_at, last_error = excluded.last_error, catching_up = excluded.catching_up;
    DELETE FROM federation_destination_room r
    USING json_to_recordset(entries) AS e (name text, token bigint, part integer)
    WHERE r.source = federation_source_write.source AND r.destination = e.name
        AND (r.stream_ordering, r.part) <= (e.token, e.part);
    DELETE FROM federation_edu u
    USING json_to_recordset(entries) AS e (done_edus bigint[])
    WHERE u.source = federation_source_write.source AND u.id = ANY (e.done_edus);
END
$$;
COMMENT ON FUNCTION federation_source_write(text, json) IS 'Writes down how destinations stand';
