-- stream_writers(name): all writers of a stream, and what was published of each: its own position where that is ahead,
-- else that of all writers together. Raises RS001.
CREATE OR REPLACE FUNCTION stream_writers(
    name text, OUT number integer, OUT writer text, OUT "position" bigint, OUT created_at timestamptz,
    OUT retired_at timestamptz
) RETURNS SETOF record
LANGUAGE sql STABLE AS $$
    SELECT w.number, w.name, greatest(p.position, l.position), w.created_at, w.retired_at
    FROM stream_find(stream_writers.name) s
    JOIN stream_writer w ON w.stream = s.number
    LEFT JOIN stream_position p ON p.stream = s.number AND p.writer = w.number
    LEFT JOIN stream_position l ON l.stream = s.number AND l.writer = 0
    ORDER BY w.number
$$;
COMMENT ON FUNCTION stream_writers(text) IS 'All writers of a stream and their positions';
