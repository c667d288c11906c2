-- stream_is_table(number, actual, expected): true; raises RS005 where `actual`, the table that has the name of the
-- stream's table now, is not `expected`, the one that the stream was loaded with.
CREATE OR REPLACE FUNCTION stream_is_table(stream_number integer, actual oid, expected oid) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF actual IS DISTINCT FROM expected THEN
        RAISE EXCEPTION USING ERRCODE = 'RS005',
            MESSAGE = format('another table has the name of the table of stream %s now',
                coalesce((SELECT s.name FROM stream s WHERE s.number = stream_number), stream_number::text)),
            HINT = 'nothing of it was sent; the stream goes on when the registry was looked at again';
    END IF;
    RETURN true;
END
$$;
COMMENT ON FUNCTION stream_is_table(integer, oid, oid) IS 'Raises RS005 where the name leads to another table';
