-- stream_acked(name): up to where every known sender has acknowledged a stream, and it was published; NULL where one has
-- said nothing, or none is known. Raises RS001.
CREATE OR REPLACE FUNCTION stream_acked(name text) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT least(min(a.token), (SELECT p.position FROM stream_position p JOIN stream s ON s.number = p.stream
        WHERE s.name = stream_acked.name AND p.writer = 0))
    FROM stream_acks(stream_acked.name) a HAVING count(*) = count(a.token) AND count(*) > 0
$$;
COMMENT ON FUNCTION stream_acked(text) IS 'Up to where all senders have acknowledged a stream';
