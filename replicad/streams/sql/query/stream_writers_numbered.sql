-- The writers of a stream ($1, its number) that have these numbers ($2).
SELECT w.number, w.name, NULL::bigint AS position, w.created_at, w.retired_at
FROM {schema}.stream_writer w
WHERE w.stream = $1 AND w.number = ANY ($2::integer[])
