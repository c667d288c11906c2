-- stream_complete(number, held, next): this session's oldest ids are finished, whether a row came of them or not. Lets
-- go of the bound `held`, having taken the next one, that of the oldest ids still in flight (NULL: there are none).
-- Returns false where the session did not hold the bound (any more): then the ids were not protected.
CREATE OR REPLACE FUNCTION stream_complete(number integer, held bigint, next bigint = NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF next IS NOT NULL THEN
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, next));
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, next, true));
    END IF;
    -- The certificate goes first: it must never outlive the lock that it speaks of.
    PERFORM pg_advisory_unlock_shared(stream_lock_key(number, held, true));
    IF NOT pg_advisory_unlock_shared(stream_lock_key(number, held)) THEN
        RETURN false;
    END IF;
    IF next IS NULL THEN
        PERFORM stream_unprove(number);
    END IF;
    RETURN true;
END
$$;
COMMENT ON FUNCTION stream_complete(integer, bigint, bigint) IS 'Ends the oldest reservation of this session';
