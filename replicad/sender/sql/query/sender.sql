-- What the sender, its commands and its figures read and change besides calls of the functions of its part.

-- name: federation_keepalive
-- Have Postgres notice within a minute that the other end of this session's connection is gone, so that what it locks is
-- free again. Of no effect on a Unix socket.
SELECT set_config('tcp_keepalives_idle', '30', false), set_config('tcp_keepalives_interval', '10', false),
    set_config('tcp_keepalives_count', '3', false)

-- name: federation_recorded
-- Up to where a sender ($2) of a source ($1) has recorded each stream, and up to where all senders of its name have.
SELECT s.stream, s.token, s.epoch, {schema}.federation_source_recorded(s.name, s.stream) AS everywhere
FROM {schema}.federation_sender s
WHERE s.source = $1 AND s.name = $2

-- name: federation_shorten
-- Has the pauses of destinations ($2) of a source ($1) end in $3 seconds.
UPDATE {schema}.federation_destination SET retry_at = clock_timestamp() + make_interval(secs => $3)
WHERE source = $1 AND name = ANY ($2::text[])

-- name: federation_wanted
-- The destinations of a source ($1) for which the operator wants something parked to be sent again.
SELECT DISTINCT p.destination FROM {schema}.federation_parked p WHERE p.source = $1 AND p.wanted

-- name: federation_running
-- The senders on the present list of each source, and whether each is running. A source of which none runs and none has
-- recorded anything is left out: it was refused when it was started for the first time.
SELECT s.source, s.name, r.name IS NOT NULL AS running
FROM (SELECT e.source, e.name, bool_or(bool_or(e.token IS NOT NULL)) OVER (PARTITION BY e.source) AS begun
    FROM {schema}.federation_sender e GROUP BY e.source, e.name) s
LEFT JOIN LATERAL {schema}.federation_source_running(s.source) r ON r.name = s.name
WHERE s.begun OR EXISTS (SELECT FROM {schema}.federation_source_running(s.source))
ORDER BY s.source, s.name

-- name: federation_figures
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

-- name: federation_parked
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

-- name: federation_parked_want
-- Has what is parked sent again; arguments as for federation_parked. Returns how many there were.
WITH changed AS (
    UPDATE {schema}.federation_parked p SET wanted = true
    WHERE ($1::bigint[] = '{{}}' OR p.id = ANY ($1)) AND ($2::text IS NULL OR p.source = $2)
        AND ($3::text IS NULL OR p.destination = $3)
    RETURNING 1
)
SELECT count(*) FROM changed

-- name: federation_parked_drop
-- Removes what is parked for good; arguments as for federation_parked. Returns how many there were.
WITH gone AS (
    DELETE FROM {schema}.federation_parked p
    WHERE ($1::bigint[] = '{{}}' OR p.id = ANY ($1)) AND ($2::text IS NULL OR p.source = $2)
        AND ($3::text IS NULL OR p.destination = $3)
    RETURNING 1
)
SELECT count(*) FROM gone

-- name: federation_retire
-- Forgets all that the senders of a source ($1) have stored.
WITH senders AS (DELETE FROM {schema}.federation_sender s WHERE s.source = $1),
    destinations AS (DELETE FROM {schema}.federation_destination d WHERE d.source = $1),
    rooms AS (DELETE FROM {schema}.federation_destination_room r WHERE r.source = $1),
    facts AS (DELETE FROM {schema}.federation_fact f WHERE f.source = $1),
    updates AS (DELETE FROM {schema}.federation_edu u WHERE u.source = $1)
DELETE FROM {schema}.federation_parked p WHERE p.source = $1

-- name: federation_retire_hold
-- The senders of a source ($1), each with the place of a running sender if that is free. Until the end of the
-- transaction none of them can start, and nobody else changes their rows.
WITH held AS (
    SELECT s.name FROM {schema}.federation_sender s WHERE s.source = $1 FOR UPDATE
)
SELECT n.name, pg_try_advisory_xact_lock(1380992595, {schema}.federation_source_key($1, n.name)) AS free
FROM (SELECT DISTINCT h.name FROM held h) n
ORDER BY n.name

-- name: federation_retire_loses
-- What retiring all senders of a source ($1) forgets: facts and updates that wait, each for a destination, and what is
-- parked.
SELECT (SELECT count(*) FROM {schema}.federation_destination_room r WHERE r.source = $1) AS facts,
    (SELECT count(*) FROM {schema}.federation_edu u WHERE u.source = $1) AS updates,
    (SELECT count(*) FROM {schema}.federation_parked p WHERE p.source = $1) AS parked
