-- What senders have in Postgres, for each source: destinations, those that fail while something is outstanding for them,
-- for how long the first of them has, and what is parked (of all sources, $1 items at most are counted).
WITH parked AS (
    SELECT p.source, count(p.stream_ordering) AS facts, count(*) - count(p.stream_ordering) AS updates
    FROM (SELECT f.source, f.stream_ordering FROM {schema}.federation_parked f LIMIT $1) p
    GROUP BY p.source
), destinations AS (
    SELECT d.source, count(*) AS known, count(o.found) AS failing,
        extract(epoch FROM clock_timestamp() - min(d.failing_since) FILTER (WHERE o.found))::float8 AS failing_s
    FROM {schema}.federation_destination d
    LEFT JOIN LATERAL (  -- one look into an index for each destination that fails
        SELECT true AS found
        WHERE d.failures > 0 AND (d.txn_id IS NOT NULL
            OR (SELECT true FROM {schema}.federation_destination_room r
                WHERE r.source = d.source AND r.destination = d.name LIMIT 1)
            OR (SELECT true FROM {schema}.federation_edu u
                WHERE u.source = d.source AND u.destination = d.name LIMIT 1))
    ) o ON true
    GROUP BY d.source
)
SELECT s.source, coalesce(d.known, 0) AS known, coalesce(d.failing, 0) AS failing,
    greatest(coalesce(d.failing_s, 0), 0) AS failing_s, coalesce(p.facts, 0) AS facts, coalesce(p.updates, 0) AS updates
FROM (SELECT e.source FROM {schema}.federation_sender e UNION SELECT source FROM parked) s
LEFT JOIN destinations d ON d.source = s.source
LEFT JOIN parked p ON p.source = s.source
ORDER BY s.source
