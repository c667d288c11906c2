-- writer_expel(stream, expired): ends the memberships with these beats, which the caller has watched unchanged for longer
-- than their ttl; returns their names. Their slots are nobody's then, until others take them. Raises 42501, RS001, RS002.
-- Writes writer_member.
CREATE OR REPLACE FUNCTION writer_expel(stream text, expired bigint[]) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    w writer_sharding := writer_lock(stream);
    names text[];
BEGIN
    WITH gone AS (
        DELETE FROM writer_member m WHERE m.stream = w.stream AND m.beat = ANY (expired) RETURNING m.instance
    )
    SELECT array_agg(g.instance ORDER BY g.instance) INTO names FROM gone g;
    IF names IS NOT NULL THEN
        PERFORM writer_changed(w.stream);
    END IF;
    RETURN coalesce(names, '{}');
END
$$;
COMMENT ON FUNCTION writer_expel(text, bigint[]) IS 'Ends the membership of writers that gave no sign of life';
