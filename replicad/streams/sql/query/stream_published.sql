-- What was published last, per stream, with the writers' positions side by side.
SELECT s.name,
    max(p.position) FILTER (WHERE p.writer = 0) AS position,
    max(p.published_at) FILTER (WHERE p.writer = 0) AS published_at,
    coalesce(array_agg(w.name ORDER BY w.number) FILTER (WHERE w.name IS NOT NULL), '{{}}') AS writers,
    coalesce(array_agg(p.position ORDER BY w.number) FILTER (WHERE w.name IS NOT NULL), '{{}}') AS positions
FROM {schema}.stream s
JOIN {schema}.stream_position p ON p.stream = s.number
LEFT JOIN {schema}.stream_writer w ON w.stream = s.number AND w.number = p.writer
GROUP BY s.name
