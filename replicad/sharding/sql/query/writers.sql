-- What the commands `replicad sharding` read.

-- name: sharding_streams
SELECT s.name FROM {schema}.writer_sharding w JOIN {schema}.stream s ON s.number = w.stream ORDER BY s.name

-- name: sharding_sharing
-- One stream whose writers share the keys. Raises RS001, RS002.
SELECT w.slots, count(*) FILTER (WHERE m.instance IS NULL)::integer AS unowned
FROM {schema}.writer_find($1) w
JOIN {schema}.writer_slot x ON x.stream = w.stream
LEFT JOIN {schema}.writer_member m ON m.stream = x.stream AND m.instance = x.owner AND m.term < x.term
GROUP BY w.slots

-- name: sharding_members
-- The writers that share a stream. `silent`: seconds since the last sign of life.
SELECT m.instance, m.address,
    (SELECT count(*) FROM {schema}.writer_slot x
        WHERE x.stream = m.stream AND x.owner = m.instance AND x.term > m.term)::integer AS slots,
    extract(epoch FROM m.ttl)::float8 AS ttl,
    greatest(0, extract(epoch FROM clock_timestamp() - m.beat_at))::float8 AS silent,
    m.leaving
FROM {schema}.writer_find($1) w
JOIN {schema}.writer_member m ON m.stream = w.stream
ORDER BY m.instance

-- name: sharding_stuck
-- Slots of a stream that should move: nobody's, of a writer that leaves, or of one that has more than its share (rounded
-- up); with the transactions that write into them now. Of those that have more, only slots into which somebody writes
-- for longer than a second are told: every writer is busy for moments.
WITH slot AS (
    SELECT x.slot, m.instance, m.leaving,
        count(*) OVER (PARTITION BY m.instance) AS has,
        ceil(w.slots::numeric / greatest(1, (SELECT count(*) FROM {schema}.writer_member n
            WHERE n.stream = w.stream AND NOT n.leaving))) AS due,
        {schema}.writer_lock_key(w.stream, x.slot)::bigint AS key
    FROM {schema}.writer_find($1) w
    JOIN {schema}.writer_slot x ON x.stream = w.stream
    LEFT JOIN {schema}.writer_member m ON m.stream = x.stream AND m.instance = x.owner AND m.term < x.term
),
lock AS (
    SELECT l.objid::bigint AS key, l.pid, a.application_name::text AS application_name,
        extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS age
    FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND l.classid = 1380992591 AND l.mode = 'ShareLock'
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
)
SELECT array_agg(s.slot ORDER BY s.slot) AS slots, s.instance AS owner,
    l.key IS NOT NULL AS held, l.pid, l.application_name, max(l.age) AS age
FROM slot s LEFT JOIN lock l ON l.key = s.key
WHERE s.instance IS NULL OR ((s.leaving OR s.has > s.due) AND (l.age > 1 OR l.key IS NOT NULL AND l.pid IS NULL))
GROUP BY s.instance, l.key IS NOT NULL, l.pid, l.application_name
ORDER BY age DESC NULLS LAST, owner
