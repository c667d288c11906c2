-- stream_begin_anew(number, seen_resets): what was published of a stream speaks of another table or sequence (a dump was
-- restored over it): forgets it and voids the tokens of before. Done once where several ask for it: only while the counter
-- is still `seen_resets`. Writes stream, stream_position, stream_mark.
CREATE OR REPLACE FUNCTION stream_begin_anew(stream_number integer, seen_resets integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE stream SET resets = resets + 1 WHERE number = stream_number AND resets = seen_resets;
    IF FOUND THEN
        DELETE FROM stream_position p WHERE p.stream = stream_number;
        DELETE FROM stream_mark m WHERE m.stream = stream_number;
    END IF;
END
$$;
COMMENT ON FUNCTION stream_begin_anew(integer, integer) IS 'Forgets what was published of another table';
REVOKE EXECUTE ON FUNCTION stream_begin_anew(integer, integer) FROM PUBLIC;
