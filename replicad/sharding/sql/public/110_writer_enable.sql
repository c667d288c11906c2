-- writer_enable(stream, slots): the writers of the stream share its keys from now on; false where they do already, in
-- that number of slots. More slots share more evenly, 256 are enough for dozens of writers. Raises RS001, RS002.
-- Writes writer_sharding and writer_slot.
CREATE OR REPLACE FUNCTION writer_enable(stream text, slots integer = 256) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(stream);
    present integer;
BEGIN
    IF slots IS NULL OR slots NOT BETWEEN 1 AND 4096 THEN
        PERFORM writer_refuse('RS002', format('%s is no number of slots', slots), 'give one from 1 to 4096');
    END IF;
    INSERT INTO writer_sharding (stream, slots) VALUES (s.number, writer_enable.slots) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        SELECT w.slots INTO present FROM writer_sharding w WHERE w.stream = s.number;
        IF present <> slots THEN
            PERFORM writer_refuse('RS002', format('the writers of stream %L share %s slots already', stream, present),
                format('stop them and run `replicad writers disable %s` first: a key''s slot depends on the number',
                    stream));
        END IF;
        RETURN false;
    END IF;
    INSERT INTO writer_slot (stream, slot, term)
        SELECT s.number, n, nextval('writer_term_seq') FROM generate_series(0, slots - 1) n;
    RETURN true;
END
$$;
COMMENT ON FUNCTION writer_enable(text, integer) IS 'Lets the writers of a stream share its keys';
