-- stream_reserve(stream, n, held): reserves n ids for this *session*, until stream_complete. For writers that keep a
-- connection for it; their rows may be inserted by any transaction of any session (stream_adopt) before that. `held` is
-- the bound that the session holds for this stream already, NULL where it holds none; one bound, the lowest, covers all
-- that is in flight. Returns the bound of these ids, which is the one held where `held` was NULL.
--
-- The bound that is kept is a certified one: no position above it was ever published while it is held. A bound that is
-- read and then locked may be stale when the lock is there, so it is locked hand over hand: lock what was read, read
-- again, lock that, let go of the first. The proof (stream_prove) is there before. Raises RS001, RS002, 42501; a session in which it failed must be closed or reset.
CREATE OR REPLACE FUNCTION stream_reserve(
    stream text, n integer, held bigint = NULL, OUT number integer, OUT bound bigint, OUT ids bigint[]
)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s stream := stream_find_reserved(stream);
    first bigint := stream_last_value(s.sequence);
BEGIN
    PERFORM stream_check_count(n);
    number := s.number;
    bound := first;
    IF held IS NULL THEN
        PERFORM stream_prove_or_refuse(s, true);
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, first));
        bound := stream_last_value(s.sequence);
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, bound));
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, bound, true));
        PERFORM pg_advisory_unlock_shared(stream_lock_key(number, first));
    END IF;
    ids := ARRAY(SELECT nextval(s.sequence) FROM generate_series(1, n));
    IF ids[1] <= bound THEN
        PERFORM stream_refuse_step(s.sequence, ids[1], bound);
    END IF;
END
$$;
COMMENT ON FUNCTION stream_reserve(text, integer, bigint) IS 'Reserves ids for this session until stream_complete';
