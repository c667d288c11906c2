-- stream_mark_position(number, position, at): notes where the stream stands, once a minute at most, and thins out the
-- notes of yesterday to one per hour. Writes stream_mark.
CREATE OR REPLACE FUNCTION stream_mark_position(stream_number integer, new_position bigint, at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    latest stream_mark;
BEGIN
    SELECT * INTO latest FROM stream_mark m WHERE m.stream = stream_number ORDER BY m.at DESC LIMIT 1;
    IF latest.at > stream_mark_position.at - interval '1 minute' OR latest.position >= new_position THEN
        RETURN;
    END IF;
    INSERT INTO stream_mark (stream, at, position, hourly)
    VALUES (stream_number, stream_mark_position.at, new_position,
        coalesce(date_trunc('hour', latest.at) < date_trunc('hour', stream_mark_position.at), true))
    ON CONFLICT DO NOTHING;
    DELETE FROM stream_mark m
    WHERE m.stream = stream_number AND NOT m.hourly AND m.at < stream_mark_position.at - interval '1 day';
END
$$;
