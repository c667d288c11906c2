-- stream_retained(number, after): true; raises RS004 where rows above `after` were trimmed away. STABLE: inside the
-- reading statement it sees what the statement sees, so that a trim cannot slip in between.
CREATE OR REPLACE FUNCTION stream_retained(stream_number integer, after bigint) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s stream;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = stream_number;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'RS001', MESSAGE = 'the stream was removed', HINT = 'load the streams again';
    ELSIF after < s.trimmed_upto THEN
        RAISE EXCEPTION USING ERRCODE = 'RS004',
            MESSAGE = format('stream %s is retained from %s on, and %s is older', s.name, s.trimmed_upto, after),
            HINT = 'rows in between are gone; start from EARLIEST or NOW and load what you keep anew';
    END IF;
    RETURN true;
END
$$;
