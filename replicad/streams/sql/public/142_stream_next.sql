-- stream_next(stream): reserves an id until this transaction ends, and returns it. Whoever inserts it may do so in any
-- statement of the transaction; an id that is not used is no harm. Raises RS001, RS002, and 42501 without a right to write.
--
-- The transaction holds a proof (stream_prove) and a bound first and takes ids afterwards. They are remembered in a
-- transaction-local setting, as `p` with the transaction's id, a colon, and a number: that reverts with a savepoint, as the
-- locks do, and a stray SET does not pass for it. The number is the first id less one, not the bound of the lock: while
-- this session waited between reading that bound and taking the lock, ids above it can have been taken by others and
-- published (specs/Reservation.tla). All in one function and few expressions, since every writer pays for it.
CREATE OR REPLACE FUNCTION stream_next(stream text) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s stream;
    xid text := 'p' || pg_current_xact_id()::text;
    held text;
    bound bigint;
    id bigint;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.name = stream_next.stream;
    IF s.method IS DISTINCT FROM 'reservation' THEN
        PERFORM stream_find_reserved(stream);  -- raises
    END IF;
    held := current_setting(s.setting, true);
    IF split_part(held, ':', 1) = xid THEN
        bound := split_part(held, ':', 2);
    ELSE
        IF NOT stream_prove(s.number) THEN
            PERFORM stream_prove_or_refuse(s);
        END IF;
        bound := pg_sequence_last_value(s.sequence);
        IF bound IS NULL OR bound >> 48 <> 0 THEN
            bound := stream_last_value(s.sequence);
        END IF;
        PERFORM pg_advisory_xact_lock_shared(stream_lock_key(s.number, bound));
        held := NULL;
    END IF;
    id := nextval(s.sequence);
    IF id <= bound THEN
        PERFORM stream_refuse_step(s.sequence, id, bound);
    END IF;
    IF held IS NULL THEN
        PERFORM set_config(s.setting, xid || ':' || id - 1, true);
    END IF;
    RETURN id;
END
$$;
COMMENT ON FUNCTION stream_next(text) IS 'Reserves the next id of a stream for this transaction';
