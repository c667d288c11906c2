-- stream_publish(number, seen_resets, position, writers, positions, at): keeps what a daemon has published; positions
-- only grow. Returns false, and writes nothing, where the stream was reset or removed since the daemon loaded it.
-- Writes stream_position, and now and then stream_mark.
CREATE OR REPLACE FUNCTION stream_publish(
    stream_number integer, seen_resets integer, linear_position bigint, writers integer[], positions bigint[],
    at timestamptz = clock_timestamp()
) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM stream s WHERE s.number = stream_number AND s.resets = seen_resets FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO stream_position AS p (stream, writer, position, published_at)
    SELECT stream_number, w, max(n), at
    FROM (SELECT 0, linear_position UNION ALL SELECT * FROM unnest(writers, positions)) new(w, n)
    GROUP BY w ORDER BY w  -- in one order, so that two daemons do not wait for each other in a circle
    ON CONFLICT (stream, writer) DO UPDATE SET position = excluded.position, published_at = excluded.published_at
    WHERE p.position < excluded.position;
    PERFORM stream_mark_position(stream_number, linear_position, at);
    RETURN true;
END
$$;
COMMENT ON FUNCTION stream_publish(integer, integer, bigint, integer[], bigint[], timestamptz)
    IS 'Keeps the positions that a daemon has published';
