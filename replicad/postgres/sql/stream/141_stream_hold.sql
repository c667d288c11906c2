-- stream_hold(s): makes this transaction hold a bound for the stream: the lock first, then ids. One lock per transaction
-- and stream. It is remembered in a transaction-local setting together with the transaction's id: it reverts with a
-- savepoint, as the lock does, and a stray SET does not pass for it. Returns the bound.
CREATE OR REPLACE FUNCTION stream_hold(s stream) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    xid text := pg_current_xact_id()::text;
    held text := current_setting(s.setting, true);
    bound bigint;
BEGIN
    IF split_part(held, ':', 1) = xid THEN
        RETURN split_part(held, ':', 2)::bigint;
    END IF;
    bound := stream_last_value(s.sequence);
    PERFORM pg_advisory_xact_lock_shared(stream_lock_key(s.number, bound));
    PERFORM set_config(s.setting, xid || ':' || bound, true);
    RETURN bound;
END
$$;
COMMENT ON FUNCTION stream_hold(stream) IS 'The bound that this transaction holds, taken if need be';
