-- stream_writers_retire(name, names, quiet): these writers are listed to readers no more, until they write again. Their
-- numbers stay taken, so that tokens which name them keep their meaning. All are retired or none; returns how many were
-- not retired yet. Refuses (RS002) a name that is not a writer's, one that has rows above the published position or wrote
-- within the last `quiet` seconds, one that a session with an open transaction is called after, any while a transaction
-- is open or prepared that may have rows of it (stream_writer_holder), and the last that is left.
-- Raises RS001. Writes stream_writer.
CREATE OR REPLACE FUNCTION stream_writers_retire(
    name text, names text[], quiet float8 = 60, at timestamptz = clock_timestamp()
) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
    wanted text[] := ARRAY(SELECT DISTINCT stream_instance(n) FROM unnest(names) n);
    settled bigint;
    culprit text;
    remedy text;
    retired integer;
BEGIN
    PERFORM FROM stream x WHERE x.number = s.number FOR NO KEY UPDATE;  -- as stream_writers_ensure: one after another
    SELECT n INTO culprit FROM unnest(wanted) n
    WHERE NOT EXISTS (SELECT FROM stream_writer w WHERE w.stream = s.number AND w.name = n) ORDER BY n LIMIT 1;
    PERFORM stream_refuse(format('stream %s has no writer %L', s.name, culprit),
        format('`replicad streams writers %s` lists those that there are', s.name)) WHERE culprit IS NOT NULL;

    -- Up to where rows are older than `quiet`: all, where nothing was published since; else by the latest note of that age.
    SELECT CASE WHEN p.published_at <= stream_writers_retire.at - make_interval(secs => quiet) THEN p.position
        ELSE (SELECT max(m.position) FROM stream_mark m
              WHERE m.stream = s.number AND m.at <= stream_writers_retire.at - make_interval(secs => quiet)) END
    INTO settled FROM stream_position p WHERE p.stream = s.number AND p.writer = 0;
    PERFORM stream_refuse(format('of stream %s nothing was published %s s ago or earlier, so nobody is known to be quiet',
        s.name, quiet), 'retire writers when a daemon has served the stream for that long') WHERE settled IS NULL;
    SELECT b INTO culprit FROM stream_writers_last(s, settled) b WHERE b = ANY (wanted) ORDER BY b LIMIT 1;
    PERFORM stream_refuse(
        format('writer %s of stream %s has rows above %s, so it wrote not long ago', culprit, s.name, settled),
        format('retire it when it has written nothing for %s s', greatest(quiet, 1))) WHERE culprit IS NOT NULL;
    SELECT format('%s (pid %s)', a.application_name, a.pid) INTO culprit FROM pg_stat_activity a
    WHERE a.datname = current_database() AND a.xact_start IS NOT NULL AND a.pid <> pg_backend_pid()
        AND a.application_name = ANY (wanted) ORDER BY 1 LIMIT 1;
    PERFORM stream_refuse(format('writer %s has an open transaction and may be writing', culprit),
        'end that transaction first') WHERE culprit IS NOT NULL;
    SELECT h.holder, h.remedy INTO culprit, remedy FROM stream_writer_holder(s, wanted) h;
    PERFORM stream_refuse(format('%s has written to stream %s, and its rows may be those of %s', culprit, s.name,
        array_to_string(wanted, ', ')), remedy) WHERE culprit IS NOT NULL;

    UPDATE stream_writer w SET retired_at = stream_writers_retire.at
    WHERE w.stream = s.number AND w.name = ANY (wanted) AND w.retired_at IS NULL;
    GET DIAGNOSTICS retired = ROW_COUNT;
    PERFORM stream_refuse(format('that would leave stream %s without a writer', s.name), 'leave one of them')
    WHERE NOT EXISTS (SELECT FROM stream_writer w WHERE w.stream = s.number AND w.retired_at IS NULL);
    RETURN retired;
END
$$;
COMMENT ON FUNCTION stream_writers_retire(text, text[], float8, timestamptz)
    IS 'Retires writers: they are no longer listed to readers';
