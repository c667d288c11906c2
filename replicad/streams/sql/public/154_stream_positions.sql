-- stream_positions(stream): how far each known writer of a reserved stream has finished, now and without a daemon: the
-- last value first, the bounds that are held afterwards. A session that is not named after a known writer holds back
-- all. The row without a name is for all writers together. A crash of Postgres may take back what was not flushed; what
-- a daemon publishes is. Raises RS001, RS002.
CREATE OR REPLACE FUNCTION stream_positions(stream text) RETURNS TABLE (writer text, "position" bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s stream := stream_find_reserved(stream);
    last bigint := stream_last_value(s.sequence);
BEGIN
    RETURN QUERY
    WITH held AS MATERIALIZED (
        SELECT x.session AS holder, x.bound FROM stream_held(s.number) x
    ), known AS (
        SELECT w.name FROM stream_writer w WHERE w.stream = s.number
    )
    SELECT k.name, least(last, (SELECT min(h.bound) FROM held h
        WHERE h.holder IS NULL OR stream_holds_back(s.number, h.holder, k.name)))
    FROM known k
    UNION ALL
    SELECT NULL, least(last, (SELECT min(h.bound) FROM held h));
END
$$;
COMMENT ON FUNCTION stream_positions(text) IS 'How far each writer of a reserved stream has finished, now';
