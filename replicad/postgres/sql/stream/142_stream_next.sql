-- stream_next(stream): reserves an id until this transaction ends, and returns it. Whoever inserts it may do so in any
-- statement of the transaction; an id that is not used is no harm. Raises RS001, RS002.
CREATE OR REPLACE FUNCTION stream_next(stream text) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s stream := stream_find_reserved(stream);
    bound bigint := stream_hold(s);
    id bigint := nextval(s.sequence);
BEGIN
    IF id <= bound THEN
        PERFORM stream_refuse(format('sequence %s issued %s after %s', s.sequence, id, bound),
            'a sequence of a stream has CACHE 1 and is never set back while writers are at work');
    END IF;
    RETURN id;
END
$$;
COMMENT ON FUNCTION stream_next(text) IS 'Reserves the next id of a stream for this transaction';
