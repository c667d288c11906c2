-- From rows of a stream to the facts and updates that each destination has yet to take.

-- federation_source_record(source, sender, stream, upto, ...): records facts, and the destinations that have yet to take
-- them. From then on the sender has recorded the stream up to `upto`. Returns the token up to which all senders of its name
-- have recorded it. Facts are given by tokens, parts, rooms and bodies (arrays of one length); fact number i (from 1) is
-- for destination names[j] wherever numbers[j] = i. A repeated call changes nothing: a fact that a destination has, or has
-- under way, is not recorded for it again, and a transaction under way keeps its bodies. `newcomers` are destinations that
-- may have no row yet. Writes federation_fact, federation_destination, federation_destination_room, federation_sender.
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

-- federation_source_record_edus(source, sender, stream, upto, names, keys, bodies): records updates that may not be
-- dropped, in order, each for one destination. From then on the sender has recorded the stream up to `upto`. Returns the
-- token up to which all senders of its name have recorded it. Writes federation_edu, federation_destination,
-- federation_sender.
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

-- federation_source_write(source, entries): stores the state of destinations. `entries` is a JSON array of objects with the
-- columns of federation_destination and, as done_edus, the ids of updates that were taken. Facts and updates that a
-- destination has taken are removed. `parked` are the items that it refuses: objects with token and part, up to which facts
-- are refused, the numbers of updates, and the reason. Writes federation_destination, federation_destination_room,
-- federation_edu, federation_parked.
CREATE OR REPLACE FUNCTION federation_source_write(source text, entries json) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    refused record;
    taken record;
    updates bigint[];
BEGIN
    INSERT INTO federation_destination AS d (source, name, last_successful_stream_ordering, last_successful_part, serial,
        txn_id, txn_ts, txn_stream_ordering, txn_part, txn_edus, txn_edu_ids, txn_pdus, txn_aside,
        failures, failing_since, retry_at, last_error, catching_up)
    SELECT federation_source_write.source, e.name, e.token, e.part, e.serial,
        e.txn_id, e.txn_ts, e.txn_token, e.txn_part, e.txn_edus, e.txn_edu_ids, e.txn_pdus, e.txn_aside,
        e.failures, CASE WHEN e.failures > 0 THEN clock_timestamp() END,
        clock_timestamp() + make_interval(secs => e.retry_in), e.last_error, e.catching_up
    FROM json_to_recordset(entries) AS e (name text, token bigint, part integer, serial bigint,
        txn_id text, txn_ts bigint, txn_token bigint, txn_part integer, txn_edus text[], txn_edu_ids bigint[],
        txn_pdus text[], txn_aside json, failures integer, retry_in double precision, last_error text, catching_up boolean)
    ON CONFLICT (source, name) DO UPDATE SET
        last_successful_stream_ordering = excluded.last_successful_stream_ordering,
        last_successful_part = excluded.last_successful_part,
        serial = excluded.serial,
        txn_id = excluded.txn_id, txn_ts = excluded.txn_ts,
        txn_stream_ordering = excluded.txn_stream_ordering, txn_part = excluded.txn_part,
        txn_edus = excluded.txn_edus, txn_edu_ids = excluded.txn_edu_ids,
        txn_pdus = CASE WHEN d.txn_id = excluded.txn_id THEN coalesce(d.txn_pdus, excluded.txn_pdus)
            ELSE excluded.txn_pdus END,  -- federation_source_record may have kept them
        txn_aside = excluded.txn_aside,
        failures = excluded.failures,
        failing_since = CASE WHEN excluded.failures > 0 THEN coalesce(d.failing_since, excluded.failing_since) END,
        retry_at = excluded.retry_at, last_error = excluded.last_error, catching_up = excluded.catching_up;
    FOR refused IN
        SELECT e.value ->> 'name' AS name, (p.value ->> 'token')::bigint AS token, (p.value ->> 'part')::integer AS part,
            ARRAY(SELECT n::bigint FROM json_array_elements_text(p.value -> 'numbers') n) AS numbers,
            p.value ->> 'reason' AS reason
        FROM json_array_elements(entries) WITH ORDINALITY AS e (value, place)
        CROSS JOIN LATERAL json_array_elements(coalesce(e.value -> 'parked', '[]')) WITH ORDINALITY AS p (value, number)
        ORDER BY e.place, p.number
    LOOP
        WITH gone AS (
            DELETE FROM federation_destination_room r
            WHERE r.source = federation_source_write.source AND r.destination = refused.name
                AND (r.stream_ordering, r.part) <= (refused.token, refused.part)
            RETURNING r.*
        )
        INSERT INTO federation_parked (source, destination, stream_ordering, part, room, body, reason)
        SELECT g.source, g.destination, g.stream_ordering, g.part, g.room, f.body, refused.reason
        FROM gone g
        JOIN federation_fact f ON f.source = g.source AND f.stream_ordering = g.stream_ordering AND f.part = g.part
        ORDER BY g.stream_ordering, g.part
        ON CONFLICT DO NOTHING;
        WITH gone AS (
            DELETE FROM federation_edu u
            WHERE u.source = federation_source_write.source AND u.id = ANY (refused.numbers)
            RETURNING u.*
        )
        INSERT INTO federation_parked (source, destination, room, body, reason)
        SELECT g.source, g.destination, g.key, g.body, refused.reason FROM gone g ORDER BY g.id;
    END LOOP;
    FOR taken IN  -- one by one: no statistics then lead to a plan that reads what all destinations have yet to take
        SELECT e.name, e.token, e.part FROM json_to_recordset(entries) AS e (name text, token bigint, part integer)
    LOOP
        DELETE FROM federation_destination_room r
        WHERE r.source = federation_source_write.source AND r.destination = taken.name
            AND (r.stream_ordering, r.part) <= (taken.token, taken.part);
    END LOOP;
    updates := ARRAY(
        SELECT unnest(e.done_edus) FROM json_to_recordset(entries) AS e (done_edus bigint[])
    );
    IF updates <> '{}' THEN
        DELETE FROM federation_edu u WHERE u.source = federation_source_write.source AND u.id = ANY (updates);
    END IF;
END
$$;
