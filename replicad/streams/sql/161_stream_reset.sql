-- stream_reset(number, seen_resets, position): the ids of a stream have gone back (a restore, setval): tokens of before
-- are void. Done once where several ask for it: only while the counter is still `seen_resets`. Returns the counter.
-- Writes stream, stream_position, stream_mark.
CREATE OR REPLACE FUNCTION stream_reset(stream_number integer, seen_resets integer, new_position bigint) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    now_at integer;
BEGIN
    UPDATE stream SET resets = resets + 1, trimmed_upto = least(trimmed_upto, new_position)
    WHERE number = stream_number AND resets = seen_resets
    RETURNING resets INTO now_at;
    IF FOUND THEN
        DELETE FROM stream_mark m WHERE m.stream = stream_number AND m.position > new_position;
        UPDATE stream_position p SET position = new_position, published_at = clock_timestamp()
        WHERE p.stream = stream_number AND p.position > new_position;
        RETURN now_at;
    END IF;
    SELECT s.resets INTO now_at FROM stream s WHERE s.number = stream_number;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'RS001', MESSAGE = 'the stream was removed', HINT = 'load the streams again';
    END IF;
    RETURN now_at;
END
$$;
COMMENT ON FUNCTION stream_reset(integer, integer, bigint) IS 'Announces that the ids of a stream have gone back';
