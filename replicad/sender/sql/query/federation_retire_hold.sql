-- The senders of a source ($1), each with the place of a running sender if that is free. Until the end of the
-- transaction none of them can start, and nobody else changes their rows.
WITH held AS (
    SELECT s.name FROM {schema}.federation_sender s WHERE s.source = $1 FOR UPDATE
)
SELECT n.name, pg_try_advisory_xact_lock(1380992595, {schema}.federation_source_key($1, n.name)) AS free
FROM (SELECT DISTINCT h.name FROM held h) n
ORDER BY n.name
