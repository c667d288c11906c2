-- federation_source_sweep(source, stream, after_token, after_part, most): looks at the next `most` facts above a place, as
-- far as every sender of the source has recorded the stream, and removes those that no destination has yet to take.
-- Returns how many it removed, how many stay, and the place of the last one; NULL as its token: there are no more. What
-- it costs does not depend on how much is outstanding: each fact is one look into the index. Writes federation_fact.
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
