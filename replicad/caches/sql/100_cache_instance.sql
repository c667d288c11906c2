-- cache_instance(session_name): as which writer a session of that application_name invalidates: as itself where it was
-- made a writer (cache_enable), as master otherwise. NULL where the stream is not enabled.
-- It is never the caller's choice: the lock-watch knows by application_name alone whose open transaction it sees, and
-- would publish past the rows of a session that writes as another one.
-- With a body that is parsed here, what it reads cannot be dropped before it.
CREATE OR REPLACE FUNCTION cache_instance(session_name text) RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce((SELECT w.name FROM stream_writer w WHERE w.stream = s.number AND w.name = session_name), 'master')
    FROM stream s
    WHERE s.relation = 'cache_invalidation'::regclass
    ORDER BY s.number
    LIMIT 1;
END;
