-- cache_writer(func): checks a cache's name and returns the writer as which this session invalidates; NULL where the
-- stream is not enabled. Raises RS002.
-- A snapshot of before this transaction's first write may not show that the session was made a writer meanwhile. There
-- the session takes a name that no writer has, for the rest of the transaction: it then holds back all of them, which
-- is always right.
CREATE OR REPLACE FUNCTION cache_writer(func text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    session_name text := current_setting('application_name');
    writer text := cache_instance(stream_instance(session_name));
BEGIN
    IF coalesce(func, '') = '' OR length(func) > 200 THEN
        PERFORM stream_refuse(format('%L is no name of a cache', left(func, 240)), 'take 1 to 200 characters');
    END IF;
    IF writer = 'master' AND current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
            AND session_name NOT IN ('', 'master') AND session_name NOT LIKE '%(caches)' THEN
        PERFORM set_config('application_name', left(session_name, 40) || ' (caches)', true);
    END IF;
    RETURN writer;
END
$$;
