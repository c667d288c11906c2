-- The generations of all streams, or of the one that is named, in their order.
SELECT s.name, g.number, g.id, g.began_at, g.writers, g.positions, g.reason, g.created_at
FROM {schema}.stream_generation g
JOIN {schema}.stream s ON s.number = g.stream
WHERE $1::text IS NULL OR s.name = $1
ORDER BY g.stream, g.number
