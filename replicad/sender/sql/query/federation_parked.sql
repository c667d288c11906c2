-- What is parked: with these ids ($1, if there are any), of a source ($2) and for a destination ($3) where they are given;
-- the oldest, $4 at most.
SELECT p.id, p.parked_at, p.source AS stream, p.destination, p.stream_ordering AS token,
    CASE WHEN p.stream_ordering IS NULL THEN 'update' ELSE 'fact' END AS kind, p.wanted AS replaying, p.reason,
    p.body::text AS body
FROM {schema}.federation_parked p
WHERE ($1::bigint[] = '{{}}' OR p.id = ANY ($1)) AND ($2::text IS NULL OR p.source = $2)
    AND ($3::text IS NULL OR p.destination = $3)
ORDER BY p.id
LIMIT $4
