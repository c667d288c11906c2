-- stream_ack_note(names, resets, instances, tokens): what senders have acknowledged (arrays of one length, no sender of a
-- stream twice); tokens only grow, but for a reset. What was said of another reset, or of a stream that is gone, is
-- passed over; so are new senders where a stream has a thousand. Writes stream_ack.
CREATE OR REPLACE FUNCTION stream_ack_note(names text[], resets integer[], instances text[], tokens bigint[])
RETURNS void
LANGUAGE sql AS $$
    INSERT INTO stream_ack AS a (stream, instance, token, resets, acked_at)
    SELECT s.number, n.instance, n.token, s.resets, clock_timestamp()
    FROM unnest(names, resets, instances, tokens) AS n (name, resets, instance, token)
    JOIN stream s ON s.name = n.name AND s.resets = n.resets
    WHERE (SELECT count(*) FROM stream_ack o WHERE o.stream = s.number) < 1000
        OR EXISTS (SELECT FROM stream_ack o WHERE o.stream = s.number AND o.instance = n.instance)
    ORDER BY s.number, n.instance COLLATE "C"  -- in one order, so that two daemons do not wait for each other in a circle
    ON CONFLICT (stream, instance) DO UPDATE SET resets = excluded.resets, acked_at = excluded.acked_at,
        token = CASE WHEN a.resets = excluded.resets THEN greatest(a.token, excluded.token) ELSE excluded.token END
$$;
COMMENT ON FUNCTION stream_ack_note(text[], integer[], text[], bigint[]) IS 'Keeps what senders have acknowledged';
