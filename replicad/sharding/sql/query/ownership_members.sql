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
