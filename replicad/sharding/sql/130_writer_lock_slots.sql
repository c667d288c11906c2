-- writer_lock_slots(stream, wanted, patience): takes the locks of those slots alone, until the transaction ends, and
-- returns the slots of which it got it. No write into these is in flight then, and none begins.
--   patience  how long to wait for the writes that are in flight, for each slot; new ones wait meanwhile. Give it for
--             one slot at a time: whoever holds the lock of one and waits for another may be in somebody's way.
--             0 (the default): does not wait.
-- Writes nothing.
CREATE OR REPLACE FUNCTION writer_lock_slots(stream smallint, wanted integer[], patience interval = '0')
RETURNS integer[]
LANGUAGE plpgsql AS $$
DECLARE
    got integer[] := '{}';
    n integer;
BEGIN
    IF patience > '0'::interval THEN
        PERFORM set_config('lock_timeout', ceil(extract(epoch FROM patience) * 1000)::text, true);
    END IF;
    FOREACH n IN ARRAY wanted LOOP
        IF pg_try_advisory_xact_lock(1380992591, writer_lock_key(stream, n)) THEN
            got := got || n;
        ELSIF patience > '0'::interval THEN
            BEGIN
                PERFORM pg_advisory_xact_lock(1380992591, writer_lock_key(stream, n));
                got := got || n;
            EXCEPTION WHEN lock_not_available THEN
                NULL;
            END;
        END IF;
    END LOOP;
    RETURN got;
END
$$;
