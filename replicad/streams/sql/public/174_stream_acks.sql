-- stream_acks(name): the senders of a stream that are known, and what each has acknowledged: all that ever did, and those
-- that run as `replicad sender` on this database. token is NULL where one has sent no ack in this generation. Raises
-- RS001.
CREATE OR REPLACE FUNCTION stream_acks(name text, OUT instance text, OUT token bigint, OUT acked_at timestamptz)
RETURNS SETOF record
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s stream := stream_find(name);
    senders text[] := '{}';
BEGIN
    IF to_regclass('federation_sender') IS NOT NULL THEN
        EXECUTE 'SELECT coalesce(array_agg(f.name), ''{}'') FROM federation_sender f WHERE f.stream = $1'
            INTO senders USING s.name;
    END IF;
    RETURN QUERY
    SELECT n.instance, CASE WHEN a.generation = stream_epoch(s) THEN a.token END, a.acked_at
    FROM (SELECT o.instance FROM stream_ack o WHERE o.stream = s.number UNION SELECT unnest(senders)) n (instance)
    LEFT JOIN stream_ack a ON a.stream = s.number AND a.instance = n.instance
    ORDER BY 2 NULLS FIRST, 1;
END
$$;
COMMENT ON FUNCTION stream_acks(text) IS 'The senders of a stream, and what they have acknowledged';
