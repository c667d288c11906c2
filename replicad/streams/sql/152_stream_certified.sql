-- stream_certified(number, upto, writer): the highest bound up to `upto` that is held with a certificate
-- (stream_reserve) by a session that holds this writer back: one that is called after it, or after no known writer.
-- NULL where there is none. Lock and certificate must be the same session's: when a session ends, its locks go one by
-- one.
CREATE OR REPLACE FUNCTION stream_certified(number integer, upto bigint, writer text) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    WITH held AS MATERIALIZED (  -- one look at the lock table, which is a consistent one
        SELECT l.pid, (l.classid::bigint << 32) | l.objid::bigint AS key
        FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.mode = 'ShareLock' AND l.granted AND l.pid IS NOT NULL
            AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    )
    SELECT max(lock.key & 281474976710655)
    FROM held lock JOIN held certificate ON certificate.pid = lock.pid
        AND certificate.key = stream_lock_key(number, lock.key & 281474976710655, true)
    WHERE lock.key BETWEEN stream_lock_key(number, 0) AND stream_lock_key(number, upto)
        AND stream_holds_back(number, (SELECT a.application_name FROM pg_stat_get_activity(lock.pid) a), writer)
$$;
COMMENT ON FUNCTION stream_certified(integer, bigint, text) IS 'The highest bound by which others cover a writer''s ids';
