-- For each source of senders: the senders on its list that are not running, whether something is outstanding, how far
-- those that do not run have recorded each stream (name, a blank, token), what is
-- parked (of all sources, $1 items at most), and the destination that has failed for longest while something is.
SELECT s.source,
    ARRAY(
        SELECT DISTINCT e.name FROM {schema}.federation_sender e
        WHERE e.source = s.source
            AND NOT EXISTS (SELECT FROM {schema}.federation_source_running(s.source) r WHERE r.name = e.name)
        ORDER BY e.name
    ) AS absent,
    EXISTS (SELECT FROM {schema}.federation_destination_room r WHERE r.source = s.source)
        OR EXISTS (SELECT FROM {schema}.federation_edu u WHERE u.source = s.source) AS outstanding,
    ARRAY(
        SELECT e.stream || ' ' || e.token FROM {schema}.federation_sender e
        WHERE e.source = s.source AND e.token IS NOT NULL
            AND NOT EXISTS (SELECT FROM {schema}.federation_source_running(s.source) r WHERE r.name = e.name)
    ) AS recorded,
    (SELECT count(*) FROM (SELECT FROM {schema}.federation_parked p WHERE p.source = s.source LIMIT $1) x) AS parked,
    f.number AS failing, f.name AS first, f.last_error, f.failing_s
FROM (SELECT e.source FROM {schema}.federation_sender e UNION SELECT p.source FROM {schema}.federation_parked p) s
LEFT JOIN LATERAL (
    SELECT d.name, d.last_error, extract(epoch FROM clock_timestamp() - d.failing_since)::float8 AS failing_s,
        count(*) OVER () AS number
    FROM {schema}.federation_destination d
    WHERE d.source = s.source AND d.failures > 0 AND d.failing_since < clock_timestamp() - make_interval(secs => $2)
        AND (d.txn_id IS NOT NULL
            OR (SELECT true FROM {schema}.federation_destination_room r
                WHERE r.source = d.source AND r.destination = d.name LIMIT 1)
            OR (SELECT true FROM {schema}.federation_edu u
                WHERE u.source = d.source AND u.destination = d.name LIMIT 1))
    ORDER BY d.failing_since
    LIMIT 1
) f ON true
ORDER BY s.source
