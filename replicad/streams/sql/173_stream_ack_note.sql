-- stream_ack_note(names, generations, instances, tokens): what senders have acknowledged (arrays of one length, no sender of
-- a stream twice); within a generation tokens only grow. Acks of a generation that is not the present one, or of a stream
-- that was removed, are passed over; so are new senders where a stream has a thousand. Writes stream_ack.
CREATE OR REPLACE FUNCTION stream_ack_note(names text[], generations text[], instances text[], tokens bigint[])
RETURNS void
LANGUAGE sql AS $$
    INSERT INTO stream_ack AS a (stream, instance, token, generation, acked_at)
    SELECT s.number, n.instance, n.token, n.generation, clock_timestamp()
    FROM unnest(names, generations, instances, tokens) AS n (name, generation, instance, token)
    JOIN stream s ON s.name = n.name AND stream_epoch(s) = n.generation
    WHERE (SELECT count(*) FROM stream_ack o WHERE o.stream = s.number) < 1000
        OR EXISTS (SELECT FROM stream_ack o WHERE o.stream = s.number AND o.instance = n.instance)
    ORDER BY s.number, n.instance COLLATE "C"  -- in one order, so that two daemons do not wait for each other in a circle
    ON CONFLICT (stream, instance) DO UPDATE SET generation = excluded.generation, acked_at = excluded.acked_at,
        token = CASE WHEN a.generation = excluded.generation THEN greatest(a.token, excluded.token) ELSE excluded.token END
$$;
