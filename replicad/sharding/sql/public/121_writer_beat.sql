-- writer_beat(stream, instance, term): a sign of life: the new beat. Raises 42501, RS001, RS002, and RS011 where this membership
-- has ended. Writes writer_member.
CREATE OR REPLACE FUNCTION writer_beat(stream text, instance text, term bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    w writer_sharding := writer_find_own(stream);
    new_beat bigint;
BEGIN
    UPDATE writer_member m SET beat = nextval('writer_term_seq'), beat_at = clock_timestamp()
        WHERE m.stream = w.stream AND m.instance = writer_beat.instance AND m.term = writer_beat.term
        RETURNING m.beat INTO new_beat;
    IF NOT FOUND THEN
        PERFORM writer_expelled(stream, instance, term);
    END IF;
    RETURN new_beat;
END
$$;
COMMENT ON FUNCTION writer_beat(text, text, bigint) IS 'A writer''s sign of life';
