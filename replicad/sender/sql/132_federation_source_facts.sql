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
