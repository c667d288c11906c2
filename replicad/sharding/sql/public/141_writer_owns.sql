-- writer_owns(stream, key, instance, term): this transaction may write rows of the key, and nobody else's does until it
-- ends: returns the key's slot, or raises RS010, naming the owner. To be called in the transaction that writes, before it
-- reads what it decides by. Also RS001, RS002. Locks the slot, shared; writes nothing.
--
-- Whoever takes or gives the slot needs that lock alone, and commits before letting go of it: so whoever gets it
-- shared, and looks afterwards, sees whose the slot is now. An isolation above READ COMMITTED does not look
-- afterwards, but at its first statement; there the row's own lock raises 40001 where the row has changed since.
-- An advisory lock and not one of the row, which costs twice the time and writes a third more WAL for a small insert.
-- A writer that stops in the middle of a transaction must not hold the slot for good: such a transaction is ended by
-- Postgres after the writer's ttl, unless the session's own idle_in_transaction_session_timeout is shorter; in the
-- middle of a statement after its statement_timeout. A writer that was expelled is refused, though nobody may have taken
-- its slots yet.
CREATE OR REPLACE FUNCTION writer_owns(stream text, key text, instance text, term bigint) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    number integer;
    place integer;
    patience interval;
    idle interval;
BEGIN
    SELECT s.number, writer_slot_of(key, w.slots) INTO number, place
        FROM stream s JOIN writer_sharding w ON w.stream = s.number WHERE s.name = writer_owns.stream;
    IF place IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock_shared(1380992591, writer_lock_key(number, place));
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            PERFORM FROM writer_slot x WHERE x.stream = number AND x.slot = place FOR SHARE;
        END IF;
        SELECT m.ttl INTO patience
            FROM writer_slot x JOIN writer_member m ON m.stream = x.stream AND m.instance = x.owner AND m.term < x.term
            WHERE x.stream = number AND x.slot = place
                AND x.owner = writer_owns.instance AND x.term = writer_owns.term;
    END IF;
    IF patience IS NULL THEN
        PERFORM writer_not_owner(stream, key, instance, term);
    END IF;
    idle := current_setting('idle_in_transaction_session_timeout');
    IF idle = '0' OR idle > patience THEN
        PERFORM set_config('idle_in_transaction_session_timeout', (extract(epoch FROM patience) * 1000)::int::text, true);
    END IF;
    RETURN place;
END
$$;
COMMENT ON FUNCTION writer_owns(text, text, text, bigint) IS 'Makes sure that a transaction''s writer owns a key';
