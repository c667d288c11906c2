-- stream_note(number, seen_resets, relation, sequence, position, writers, positions, at): keeps what a daemon has
-- published from that table and that sequence. Positions only grow, but for those that were noted of others: these are
-- replaced. Returns false, and writes nothing, where the stream was reset or removed since the daemon loaded it, or has
-- another table or sequence now. Writes stream_position, and now and then stream_mark.
CREATE OR REPLACE FUNCTION stream_note(
    stream_number integer, seen_resets integer, from_relation oid, from_sequence oid, linear_position bigint,
    writers integer[], positions bigint[], at timestamptz = clock_timestamp()
) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM stream s WHERE s.number = stream_number AND s.resets = seen_resets
        AND s.relation::oid = from_relation AND s.sequence::oid = from_sequence FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO stream_position AS p (stream, writer, position, published_at, relation, sequence)
    SELECT stream_number, w, max(n), at, from_relation, from_sequence
    FROM (SELECT 0, linear_position UNION ALL SELECT * FROM unnest(writers, positions)) new(w, n)
    GROUP BY w ORDER BY w  -- in one order, so that two daemons do not wait for each other in a circle
    ON CONFLICT (stream, writer) DO UPDATE SET
        position = CASE WHEN p.relation <> from_relation OR p.sequence <> from_sequence THEN excluded.position
            ELSE greatest(p.position, excluded.position) END,
        published_at = CASE WHEN p.position < excluded.position THEN excluded.published_at ELSE p.published_at END,
        relation = from_relation,
        sequence = from_sequence
    WHERE p.position < excluded.position OR p.relation IS DISTINCT FROM from_relation
        OR p.sequence IS DISTINCT FROM from_sequence;
    PERFORM stream_mark_position(stream_number, linear_position, at);
    RETURN true;
END
$$;
COMMENT ON FUNCTION stream_note(integer, integer, oid, oid, bigint, integer[], bigint[], timestamptz)
    IS 'Keeps the positions that a daemon has published, and of which table';
REVOKE EXECUTE ON FUNCTION stream_note(integer, integer, oid, oid, bigint, integer[], bigint[], timestamptz) FROM PUBLIC;
