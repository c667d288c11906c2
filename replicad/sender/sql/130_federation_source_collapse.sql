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
