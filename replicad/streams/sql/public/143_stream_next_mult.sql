-- stream_next_mult(stream, n): as stream_next, n ids at once, ascending; 1 to 10,000. Raises RS001, RS002.
CREATE OR REPLACE FUNCTION stream_next_mult(stream text, n integer) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s stream := stream_find_reserved(stream);
BEGIN
    PERFORM stream_check_count(n);
    RETURN stream_next(stream) || ARRAY(SELECT nextval(s.sequence) FROM generate_series(2, n));
END
$$;
COMMENT ON FUNCTION stream_next_mult(text, integer) IS 'Reserves the next n ids of a stream for this transaction';
