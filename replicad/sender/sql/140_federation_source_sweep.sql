-- federation_source_sweep(source, stream): removes facts that no destination has yet to take, as far as every sender of
-- the source has recorded the stream. Returns how many. Writes federation_fact.
CREATE OR REPLACE FUNCTION federation_source_sweep(source text, stream text) RETURNS bigint
LANGUAGE sql AS $$
    WITH gone AS (
        DELETE FROM federation_fact f
        WHERE f.source = federation_source_sweep.source AND f.stream_ordering <= (
                SELECT min(s.token) FROM federation_sender s
                WHERE s.source = federation_source_sweep.source AND s.stream = federation_source_sweep.stream)
            AND NOT EXISTS (SELECT FROM federation_destination_room r
                            WHERE r.source = f.source AND r.stream_ordering = f.stream_ordering AND r.part = f.part)
        RETURNING 1
    )
    SELECT count(*) FROM gone
$$;
COMMENT ON FUNCTION federation_source_sweep(text, text) IS 'Removes facts that every destination has taken';
