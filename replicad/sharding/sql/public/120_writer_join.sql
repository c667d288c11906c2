-- writer_join(stream, instance, ttl, address, expired): becomes one of the writers: the membership's term and first beat.
--   ttl      so long without a beat, and the others take its slots over
--   address  where the application reaches this writer, told to the others; may be NULL
--   expired  beats that the caller has watched unchanged for longer than their ttl: a namesake with such a beat is
--            replaced. It may be alive: what it had is its successor's or others' only once its writes have ended.
-- Raises 42501, RS001, RS002, and RS012 where a writer of that name is alive. Writes writer_member.
CREATE OR REPLACE FUNCTION writer_join(
    stream text, instance text, ttl interval, address text = NULL, expired bigint[] = '{}',
    OUT term bigint, OUT beat bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    w writer_sharding := writer_lock(stream);
BEGIN
    IF instance IS DISTINCT FROM stream_instance(instance) THEN
        PERFORM writer_refuse('RS002', format('%L cannot be the name of a writer', left(instance, 200)),
            'give one without blanks, of 1 to 200 characters');
    ELSIF ttl IS NULL OR ttl NOT BETWEEN '0.2 s' AND '1 h' OR length(address) > 500 THEN
        PERFORM writer_refuse('RS002', format('writer %s has a time to live of %s, and an address of %s characters',
            instance, ttl, coalesce(length(address), 0)), 'give 0.2 seconds to an hour, and at most 500 characters');
    END IF;
    DELETE FROM writer_member m
        WHERE m.stream = w.stream AND m.instance = writer_join.instance AND m.beat = ANY (expired);
    IF EXISTS (SELECT FROM writer_member m WHERE m.stream = w.stream AND m.instance = writer_join.instance) THEN
        PERFORM writer_refuse('RS012', format('a writer named %s shares stream %L already', instance, stream),
            'give every process a name of its own, or wait until its time to live has passed without a sign of life');
    ELSIF (SELECT count(*) FROM writer_member m WHERE m.stream = w.stream) >= 1000 THEN
        PERFORM writer_refuse('RS002', format('1000 writers share stream %L already', stream), 'stop some of them');
    END IF;
    term := nextval('writer_term_seq');
    beat := nextval('writer_term_seq');
    INSERT INTO writer_member (stream, instance, term, beat, ttl, address)
        VALUES (w.stream, writer_join.instance, writer_join.term, writer_join.beat, writer_join.ttl, writer_join.address);
    PERFORM writer_changed(w.stream);
END
$$;
COMMENT ON FUNCTION writer_join(text, text, interval, text, bigint[]) IS 'Makes the caller a writer of a stream';
