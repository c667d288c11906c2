-- stream_is_same(number, actual, expected): raises RS005. Called where a reader must not read on: another table (`actual`)
-- than that of the stream (`expected`) has its name now; or it is the same, and the sequence has another file than the
-- one that the stream was loaded with, so that ids mean other rows.
CREATE OR REPLACE FUNCTION stream_is_same(stream_number integer, actual oid, expected oid) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    name text := coalesce((SELECT s.name FROM stream s WHERE s.number = stream_number), stream_number::text);
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'RS005',
        MESSAGE = CASE WHEN actual = expected
            THEN format('the ids of stream %s begin anew: its sequence was restarted', name)
            ELSE format('another table has the name of the table of stream %s now', name) END,
        HINT = 'nothing of it was sent; the stream goes on when the registry was looked at again';
END
$$;
