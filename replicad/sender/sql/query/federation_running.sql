-- The senders on the present list of each source, and whether each is running. A source of which none runs and none has
-- recorded anything is left out: it was refused when it was started for the first time.
SELECT s.source, s.name, r.name IS NOT NULL AS running
FROM (SELECT e.source, e.name, bool_or(bool_or(e.token IS NOT NULL)) OVER (PARTITION BY e.source) AS begun
    FROM {schema}.federation_sender e GROUP BY e.source, e.name) s
LEFT JOIN LATERAL {schema}.federation_source_running(s.source) r ON r.name = s.name
WHERE s.begun OR EXISTS (SELECT FROM {schema}.federation_source_running(s.source))
ORDER BY s.source, s.name
