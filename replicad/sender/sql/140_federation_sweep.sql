-- federation_sweep(stream): removes facts that no destination has yet to take, as far as every sender has recorded the
-- stream. Returns how many. Writes federation_fact.
CREATE OR REPLACE FUNCTION federation_sweep(stream text) RETURNS bigint
LANGUAGE sql AS $$
    WITH gone AS (
        DELETE FROM federation_fact f
        WHERE f.stream_ordering <= (
                SELECT min(s.token) FROM federation_sender s WHERE s.stream = federation_sweep.stream)
            AND NOT EXISTS (SELECT FROM federation_destination_room r
                            WHERE r.stream_ordering = f.stream_ordering AND r.part = f.part)
        RETURNING 1
    )
    SELECT count(*) FROM gone
$$;
COMMENT ON FUNCTION federation_sweep(text) IS 'Removes facts that every destination has taken';
