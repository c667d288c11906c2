-- stream_rewind(number, seen, upto): rows above `upto` were not sent to readers, though they lie at or below a position that
-- was published. Begins a generation that shares with the one before what there is up to `upto`, so that readers get all
-- rows above it again. In contrast to stream_fork, ids are the same rows as before: what was trimmed, or taken out of the
-- stream, stays so. Returns `begun`: the id of the new one, or NULL where nothing was done. Then `wait` has the seconds
-- after which it may be tried again: each time within an hour doubles the pause before the next one. Or it is NULL:
-- `seen` is not the present generation, or not valid on this server any more, so that rows are read anew in any case.
-- Writes stream_generation, stream_position, stream_ack.
CREATE OR REPLACE FUNCTION stream_rewind(
    stream_number integer, seen text, upto bigint, OUT begun text, OUT wait double precision
)
LANGUAGE plpgsql AS $$
DECLARE
    s stream;
    g stream_generation;
    times integer;
    latest timestamptz;
    shared bigint;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = stream_number FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'RS001', MESSAGE = 'the stream was removed', HINT = 'load the streams again';
    END IF;
    g := stream_generation_now(s);
    IF g.id IS DISTINCT FROM seen OR NOT stream_continues(s, g) THEN
        RETURN;
    END IF;
    SELECT count(*), max(x.created_at) INTO times, latest FROM stream_generation x
        WHERE x.stream = s.number AND x.reason = 'rows_skipped' AND x.created_at > clock_timestamp() - interval '1 hour';
    wait := extract(epoch FROM latest - clock_timestamp()) + least(600, 5 * 2 ^ least(times, 9));
    IF wait > 0 THEN
        RETURN;
    END IF;
    wait := NULL;
    shared := greatest(least(upto, (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0)),
        s.trimmed_upto);
    begun := stream_generation_add(s, shared, '{}', '{}', 'rows_skipped');
    UPDATE stream_position p SET published_at = clock_timestamp(), position = least(p.position, shared)
    WHERE p.stream = s.number;
    UPDATE stream_ack a SET generation = begun, token = least(a.token, shared)
    WHERE a.stream = s.number AND a.generation = g.id;
END
$$;
