-- The transactions that keep the backend with pid $1 from a lock, at most three, each as a text.
SELECT coalesce(
    (SELECT format('pid %s (%s, user %s, %s, since %s s): %s', a.pid, coalesce(nullif(a.application_name, ''), 'no name'),
        a.usename, a.state, extract(epoch FROM clock_timestamp() - a.xact_start)::integer,
        left(regexp_replace(
            CASE WHEN getdatabaseencoding() <> 'SQL_ASCII' THEN a.query ELSE regexp_replace(a.query, '[^\x01-\x7f]', '?', 'g') END,
            '\s+', ' ', 'g'), 80))
     FROM pg_stat_activity AS a WHERE a.pid = b.pid),
    'a prepared transaction (SELECT * FROM pg_prepared_xacts)') AS blocker
FROM unnest(pg_blocking_pids($1::integer)) AS b (pid)
LIMIT 3
