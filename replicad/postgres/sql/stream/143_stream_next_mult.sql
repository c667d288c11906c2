-- stream_next_mult(stream, n): as stream_next, n ids at once, ascending; 1 to 10,000. Raises RS001, RS002.
CREATE OR REPLACE FUNCTION stream_next_mult(stream text, n integer) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s stream := stream_find_reserved(stream);
    bound bigint;
    ids bigint[];
BEGIN
    PERFORM stream_check_count(n);
    bound := stream_hold(s);
    ids := ARRAY(SELECT nextval(s.sequence) FROM generate_series(1, n));
    IF ids[1] <= bound THEN
        PERFORM stream_refuse(format('sequence %s issued %s after %s', s.sequence, ids[1], bound),
            'a sequence of a stream has CACHE 1 and is never set back while writers are at work');
    END IF;
    RETURN ids;
END
$$;
COMMENT ON FUNCTION stream_next_mult(text, integer) IS 'Reserves the next n ids of a stream for this transaction';
