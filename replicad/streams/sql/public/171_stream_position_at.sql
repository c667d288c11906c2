-- stream_position_at(name, at): where the stream stood at that time, from the notes of its daemons: the latest not
-- after it, NULL where they do not go back so far. Raises RS001.
CREATE OR REPLACE FUNCTION stream_position_at(name text, at timestamptz) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT (SELECT m.position FROM stream_mark m WHERE m.stream = s.number AND m.at <= stream_position_at.at
            ORDER BY m.at DESC LIMIT 1)
    FROM stream_find(name) s
$$;
COMMENT ON FUNCTION stream_position_at(text, timestamptz) IS 'Where a stream stood at a time in the past';
