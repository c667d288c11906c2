-- The next facts and updates of a destination, the sweep of facts that all destinations have taken, and parked items.

-- federation_source_collapse(source, names): of the facts of a room that a destination has yet to take, only the latest stays; a
-- transaction under way is left whole. Returns how many are no longer wanted. Writes federation_destination_room.
CREATE OR REPLACE FUNCTION federation_source_collapse(source text, names text[]) RETURNS bigint
LANGUAGE sql AS $$
    WITH superseded AS (
        SELECT r.destination, r.stream_ordering, r.part
        FROM (
            SELECT h.destination, h.stream_ordering, h.part,
                lead(true) OVER (PARTITION BY h.destination, h.room ORDER BY h.stream_ordering, h.part) AS followed
            FROM federation_destination_room h
            WHERE h.source = federation_source_collapse.source AND h.destination = ANY (names)
                AND h.room IS NOT NULL
        ) r
        JOIN federation_destination d ON d.source = federation_source_collapse.source AND d.name = r.destination
        WHERE r.followed AND (d.txn_id IS NULL OR (r.stream_ordering, r.part) > (d.txn_stream_ordering, d.txn_part))
    ), gone AS (
        DELETE FROM federation_destination_room r USING superseded s
        WHERE r.source = federation_source_collapse.source AND r.destination = s.destination
            AND r.stream_ordering = s.stream_ordering AND r.part = s.part
        RETURNING 1
    )
    SELECT count(*) FROM gone
$$;

-- federation_source_transaction(source, destination): the transaction under way, to be repeated as it was; no row
-- where there is none.
CREATE OR REPLACE FUNCTION federation_source_transaction(source text, destination text)
RETURNS TABLE (id text, serial bigint, ts bigint, token bigint, part integer, edus text[], edu_ids bigint[],
    pdus text[], substituted boolean, aside json)
LANGUAGE sql STABLE AS $$
    SELECT d.txn_id, d.serial, d.txn_ts, d.txn_stream_ordering, d.txn_part, coalesce(d.txn_edus, '{}'),
        coalesce(d.txn_edu_ids, '{}'),
        coalesce(d.txn_pdus, ARRAY(
            SELECT f.body::text
            FROM federation_destination_room r
            JOIN federation_fact f ON f.source = r.source AND f.stream_ordering = r.stream_ordering AND f.part = r.part
            WHERE r.source = d.source AND r.destination = d.name
                AND (r.stream_ordering, r.part) <= (d.txn_stream_ordering, d.txn_part)
            ORDER BY r.stream_ordering, r.part
        )),
        d.txn_pdus IS NOT NULL, d.txn_aside
    FROM federation_destination d
    WHERE d.source = federation_source_transaction.source AND d.name = federation_source_transaction.destination
        AND d.txn_id IS NOT NULL
$$;

-- federation_source_facts(source, destination, most, most_bytes, token, part): the oldest facts above a place that it has
-- yet to take, `most` rows at most and not much more than most_bytes of bodies. `more`: there are facts after this one.
CREATE OR REPLACE FUNCTION federation_source_facts(source text, destination text, most integer, most_bytes bigint,
    after_token bigint, after_part integer)
RETURNS TABLE (token bigint, part integer, room text, body text, more boolean)
LANGUAGE sql STABLE AS $$
    SELECT w.stream_ordering, w.part, w.room, w.body, w.more
    FROM (
        SELECT r.stream_ordering, r.part, r.room, f.body::text AS body, r.more,
            sum(octet_length(f.body::text)) OVER (ORDER BY r.stream_ordering, r.part
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
        FROM (
            SELECT h.stream_ordering, h.part, h.room, row_number() OVER place AS number,
                lead(true, 1, false) OVER place AS more
            FROM (
                SELECT * FROM federation_destination_room a
                WHERE a.source = federation_source_facts.source AND a.destination = federation_source_facts.destination
                    AND (a.stream_ordering, a.part) > (after_token, after_part)
                ORDER BY a.stream_ordering, a.part
                LIMIT federation_source_facts.most + 1
            ) h
            WINDOW place AS (ORDER BY h.stream_ordering, h.part)
        ) r
        JOIN federation_fact f ON f.source = federation_source_facts.source
            AND f.stream_ordering = r.stream_ordering AND f.part = r.part
        WHERE r.number <= federation_source_facts.most
    ) w
    WHERE coalesce(w.before, 0) < federation_source_facts.most_bytes
    ORDER BY w.stream_ordering, w.part
$$;

-- federation_source_edus(source, destination, most): the oldest updates that it has yet to take, one more than `most`
-- where there are more.
CREATE OR REPLACE FUNCTION federation_source_edus(source text, destination text, most integer)
RETURNS TABLE (id bigint, body text)
LANGUAGE sql STABLE AS $$
    SELECT u.id, u.body::text
    FROM federation_edu u
    WHERE u.source = federation_source_edus.source AND u.destination = federation_source_edus.destination
    ORDER BY u.id
    LIMIT federation_source_edus.most + 1
$$;

-- federation_source_standing(source, after, most): the state of destinations in the order of their names, for the names
-- behind `after` (NULL: from the first).
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

-- federation_source_kept(source, destination, token): whether the destination has a transaction under way that is repeated
-- as it was although the stream goes back to `token`: a transaction with stored updates, or with facts that are not void.
-- The destination may have taken it, and its answer was lost. In a new transaction it would get these a second time. A
-- trial (txn_aside) holds one item: an update, or a fact above all facts that were refused before it.
CREATE OR REPLACE FUNCTION federation_source_kept(source text, destination text, token bigint) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM federation_destination d
        WHERE d.source = federation_source_kept.source AND d.name = federation_source_kept.destination
            AND d.txn_id IS NOT NULL
            AND (cardinality(d.txn_edu_ids) > 0 OR d.txn_aside IS NULL AND EXISTS (
                SELECT FROM federation_destination_room r
                WHERE r.source = d.source AND r.destination = d.name
                    AND r.stream_ordering <= federation_source_kept.token
                    AND (r.stream_ordering, r.part) <= (d.txn_stream_ordering, d.txn_part)))
    )
$$;

-- federation_source_sweep(source, stream, after_token, after_part, most): looks at the next `most` facts above a place, as
-- far as every sender of the source has recorded the stream, and removes the facts that no destination has yet to take.
-- Returns how many it removed, how many stay, and the place of the last one; NULL as its token: there are no more. What it
-- costs does not depend on how much is outstanding: each fact is one look into the index. Writes federation_fact.
CREATE OR REPLACE FUNCTION federation_source_sweep(source text, stream text, after_token bigint, after_part integer,
    most integer, OUT removed bigint, OUT kept bigint, OUT token bigint, OUT part integer)
LANGUAGE sql AS $$
    WITH next AS MATERIALIZED (
        SELECT f.stream_ordering, f.part FROM federation_fact f
        WHERE f.source = federation_source_sweep.source
            AND (f.stream_ordering, f.part) > (after_token, after_part)
            AND f.stream_ordering <= (
                SELECT min(s.token) FROM federation_sender s
                WHERE s.source = federation_source_sweep.source AND s.stream = federation_source_sweep.stream)
        ORDER BY f.stream_ordering, f.part
        LIMIT federation_source_sweep.most
    ), gone AS (
        DELETE FROM federation_fact f USING next n
        WHERE f.source = federation_source_sweep.source AND f.stream_ordering = n.stream_ordering AND f.part = n.part
            AND NOT EXISTS (SELECT FROM federation_destination_room r
                            WHERE r.source = federation_source_sweep.source
                                AND r.stream_ordering + 0 = n.stream_ordering AND r.part = n.part)
        RETURNING 1
    ), done AS (
        SELECT count(*) AS removed FROM gone
    ), seen AS (
        SELECT count(*) AS number FROM next
    )
    SELECT done.removed, seen.number - done.removed, last.stream_ordering, last.part
    FROM done CROSS JOIN seen
    LEFT JOIN LATERAL (SELECT n.stream_ordering, n.part FROM next n ORDER BY n.stream_ordering DESC, n.part DESC LIMIT 1)
        last ON seen.number = federation_source_sweep.most
$$;

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

-- federation_source_replay(source, names): parked items of these destinations that are wanted again become outstanding,
-- behind all items that are recorded for their destination. A fact gets a place of its own: the token after the last one,
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
