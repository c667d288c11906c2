-- writer_take(stream, instance, member, wanted, seen, patience): takes slots that are nobody's.
--   member    the term of this writer's membership
--   wanted    slots, and `seen` the terms under which they were seen: one that has changed since is left alone
--   patience  see writer_lock_slots; a slot into which somebody who lost it is still writing is left alone as well
-- Returns the slots that are this writer's from now on, each with its new term. Raises 42501, RS001, RS002, RS011.
-- Locks writer_sharding and the slots, writes writer_slot.
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

-- writer_give(stream, instance, given, terms, receivers, patience): gives slots away, each to the writer of the same
-- place in `receivers`. A slot that is not this writer's under that term, whose receiver is not there or about to leave,
-- or into which a write is in flight stays as it is. Returns the slots that are the others' from now on, with their new
-- terms. Raises 42501, RS001, RS002. Locks writer_sharding and the slots, writes writer_slot.
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
