-- All senders that were ever started and are on the present list of their source, and whether each is running.
SELECT s.source, s.name,
    EXISTS (SELECT FROM {schema}.federation_source_running(s.source) r WHERE r.name = s.name) AS running
FROM (SELECT DISTINCT e.source, e.name FROM {schema}.federation_sender e) s
ORDER BY s.source, s.name
