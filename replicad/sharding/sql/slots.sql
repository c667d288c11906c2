-- The slots of the keys: how a writer takes and gives them, and the fence by which each of its transactions proves its own.

-- writer_lock_slots(stream, wanted, patience): takes the locks of the `wanted` slots alone, until the transaction ends, and
-- returns the slots whose lock it got. No write into these slots is in flight then, and no write begins.
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

-- writer_retire(stream, instance, term): this writer wants to leave: no writer gives it more slots, and it gives its slots
-- away. Raises 42501, RS001, RS002, RS011. Writes writer_member.
CREATE OR REPLACE FUNCTION writer_retire(stream text, instance text, term bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    w writer_sharding := writer_lock(stream);
BEGIN
    UPDATE writer_member m SET leaving = true
        WHERE m.stream = w.stream AND m.instance = writer_retire.instance AND m.term = writer_retire.term;
    IF NOT FOUND THEN
        PERFORM writer_expelled(stream, instance, term);
    END IF;
    PERFORM writer_changed(w.stream);
END
$$;
COMMENT ON FUNCTION writer_retire(text, text, bigint) IS 'Announces that a writer is about to leave';

-- writer_leave(stream, instance, term): ends this membership. Its slots are free then, until others take them. Returns
-- false where it had ended already. Raises 42501, RS001, RS002. Writes writer_member.
CREATE OR REPLACE FUNCTION writer_leave(stream text, instance text, term bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    w writer_sharding := writer_lock(stream);
BEGIN
    DELETE FROM writer_member m
        WHERE m.stream = w.stream AND m.instance = writer_leave.instance AND m.term = writer_leave.term;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM writer_changed(w.stream);
    RETURN true;
END
$$;
COMMENT ON FUNCTION writer_leave(text, text, bigint) IS 'Ends a membership';

-- writer_take(stream, instance, member, wanted, seen, patience): takes free slots.
--   member    the term of this writer's membership
--   wanted    slots, and `seen` the terms under which they were seen: one that has changed since is left alone
--   patience  see writer_lock_slots; a slot into which somebody who lost it is still writing is left alone as well
-- Returns the slots that this writer owns from now on, each with its new term. Raises 42501, RS001, RS002, RS011. Locks
-- writer_sharding and the slots, writes writer_slot.
CREATE OR REPLACE FUNCTION writer_take(
    stream text, instance text, member bigint, wanted integer[], seen bigint[], patience interval = '0'
) RETURNS TABLE (slot integer, term bigint)
LANGUAGE plpgsql AS $$
DECLARE
    w writer_sharding := writer_find_own(stream);
    free integer[] := writer_lock_slots(w.stream, wanted, patience);
BEGIN
    w := writer_lock(stream);
    IF NOT EXISTS (SELECT FROM writer_member m WHERE m.stream = w.stream AND m.instance = writer_take.instance
            AND m.term = member) THEN
        PERFORM writer_expelled(stream, instance, member);
    END IF;
    RETURN QUERY UPDATE writer_slot x
        SET owner = writer_take.instance, term = nextval('writer_term_seq'), moved_at = clock_timestamp()
        FROM unnest(wanted, seen) AS s (slot, term)
        WHERE x.stream = w.stream AND x.slot = s.slot AND x.term = s.term AND x.slot = ANY (free)
            AND NOT EXISTS (SELECT FROM writer_member m
                WHERE m.stream = w.stream AND m.instance = x.owner AND m.term < x.term)
        RETURNING x.slot, x.term;
    IF FOUND THEN
        PERFORM writer_changed(w.stream);
    END IF;
END
$$;
COMMENT ON FUNCTION writer_take(text, text, bigint, integer[], bigint[], interval) IS 'Takes slots that are nobody''s';

-- writer_give(stream, instance, given, terms, receivers, patience): gives slots away, each to the writer of the same place
-- in `receivers`. A slot stays as it is if this writer does not own it under that term, if its receiver is absent or about
-- to leave, or if a write into it is in flight. Returns the slots that other writers own from now on, with their new terms.
-- Raises 42501, RS001, RS002. Locks writer_sharding and the slots, writes writer_slot.
CREATE OR REPLACE FUNCTION writer_give(
    stream text, instance text, given integer[], terms bigint[], receivers text[], patience interval = '0'
) RETURNS TABLE (slot integer, term bigint)
LANGUAGE plpgsql AS $$
DECLARE
    w writer_sharding := writer_find_own(stream);
    free integer[] := writer_lock_slots(w.stream, given, patience);
BEGIN
    w := writer_lock(stream);
    RETURN QUERY UPDATE writer_slot x
        SET owner = m.instance, term = nextval('writer_term_seq'), moved_at = clock_timestamp()
        FROM unnest(given, terms, receivers) AS g (slot, term, receiver)
        JOIN writer_member m ON m.instance = g.receiver AND NOT m.leaving
        WHERE x.stream = w.stream AND m.stream = w.stream AND x.slot = g.slot AND x.slot = ANY (free)
            AND x.owner = writer_give.instance AND x.term = g.term
        RETURNING x.slot, x.term;
    IF FOUND THEN
        PERFORM writer_changed(w.stream);
    END IF;
END
$$;
COMMENT ON FUNCTION writer_give(text, text, integer[], bigint[], text[], interval) IS 'Gives slots to other writers';

-- writer_owner(stream, key): the owner of a key now: its slot, the slot's term, and the writer with its address; both NULL
-- where the slot is free. The answer is true for a moment only: writer_owns makes a write safe. Raises RS001, RS002. Writes
-- nothing.
CREATE OR REPLACE FUNCTION writer_owner(
    stream text, key text, OUT slot integer, OUT term bigint, OUT owner text, OUT address text
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    w writer_sharding := writer_find(stream);
BEGIN
    SELECT x.slot, x.term, m.instance, m.address INTO slot, term, owner, address
        FROM writer_slot x
        LEFT JOIN writer_member m ON m.stream = x.stream AND m.instance = x.owner AND m.term < x.term
        WHERE x.stream = w.stream AND x.slot = writer_slot_of(key, w.slots);
END
$$;
COMMENT ON FUNCTION writer_owner(text, text) IS 'Whose a key is, and where to reach that writer';

-- writer_not_owner(stream, key, instance, term): raises RS010, or what writer_find raises. Writes nothing.
CREATE OR REPLACE FUNCTION writer_not_owner(stream text, key text, instance text, term bigint) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    o record := writer_owner(stream, key);
BEGIN
    IF key IS NULL THEN
        PERFORM writer_refuse('RS002', 'NULL is nobody''s key', 'give the key as text');
    END IF;
    PERFORM writer_refuse('RS010',
        format('key %L of stream %L belongs to %s, not to %s under term %s', left(key, 100), stream,
            coalesce('writer ' || o.owner || coalesce(' at ' || o.address, ''), 'no writer at this moment'),
            instance, coalesce(term::text, 'NULL')),
        'nothing was written; send it to its owner, or wait until it has one');
END
$$;

-- writer_owns(stream, key, instance, term): ensures that this transaction may write rows of the key, and that no
-- transaction of another writer does until it ends. Returns the key's slot, or raises RS010 with the owner's name. Call it
-- in the transaction that writes, before that reads the rows by which it decides. Raises RS001 and RS002, too. Locks the
-- slot, shared; writes nothing.
--
-- A session that takes or gives the slot needs that lock alone, and commits before it releases the lock. So a session that
-- gets the lock shared, and looks afterwards, sees the present owner of the slot. An isolation above READ COMMITTED does
-- not look afterwards, but at its first statement; there the row's own lock raises 40001 where the row has changed since.
-- It is an advisory lock, because a lock of the row costs twice the time and writes a third more WAL for a small insert. A
-- writer that stops in the middle of a transaction must not hold the slot for good: such a transaction is ended by Postgres
-- after the writer's ttl, unless the session's own idle_in_transaction_session_timeout is shorter; in the middle of a
-- statement after its statement_timeout. A writer that was expelled is refused, though nobody may have taken its slots yet.
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

-- writer_look(stream, since): the state that a writer must know, at one moment: all members, and the slots whose term is
-- above `since` (0: all of them), each list as arrays side by side. `version` is for the next look. Raises RS001, RS002.
-- Writes nothing.
CREATE OR REPLACE FUNCTION writer_look(
    stream text, since bigint,
    OUT version bigint, OUT slots integer,
    OUT instances text[], OUT member_terms bigint[], OUT beats bigint[], OUT ttls float8[], OUT addresses text[],
    OUT leaving boolean[],
    OUT changed integer[], OUT owners text[], OUT terms bigint[]
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    w writer_sharding := writer_find(stream);
BEGIN
    version := w.version;
    slots := w.slots;
    SELECT array_agg(m.instance), array_agg(m.term), array_agg(m.beat), array_agg(extract(epoch FROM m.ttl)::float8),
            array_agg(m.address), array_agg(m.leaving)
        INTO instances, member_terms, beats, ttls, addresses, leaving
        FROM writer_member m WHERE m.stream = w.stream;
    SELECT array_agg(x.slot), array_agg(x.owner), array_agg(x.term) INTO changed, owners, terms
        FROM writer_slot x WHERE x.stream = w.stream AND x.term > since AND w.version > since;
END
$$;
COMMENT ON FUNCTION writer_look(text, bigint) IS 'Members, and slots that changed hands, at one moment';
