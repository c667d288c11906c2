-- writer_retire(stream, instance, term): this writer wants to leave: nobody gives it anything more, and it gives away what
-- it has. Raises 42501, RS001, RS002, RS011. Writes writer_member.
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

-- writer_leave(stream, instance, term): ends this membership; what it still has is nobody's, until others take it. False
-- where it had ended already. Raises 42501, RS001, RS002. Writes writer_member.
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
