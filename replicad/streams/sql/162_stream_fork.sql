-- stream_floor(sequence): the position below all ids that the sequence can give out.
CREATE OR REPLACE FUNCTION stream_floor(sequence regclass) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce(greatest((SELECT q.seqmin FROM pg_sequence q WHERE q.seqrelid = $1), -9223372036854775807), 1) - 1
$$;
-- stream_generation_add(s, began_at, writers, positions, reason): the next generation of a stream, on the server and with
-- the table and sequence of now. The caller has locked the stream's row. Keeps the last 1,000. Raises RS002 while a dump
-- is being restored, which adds the primary keys last: a row from here would be in its way. Writes stream_generation.
CREATE OR REPLACE FUNCTION stream_generation_add(
    s stream, began_at bigint, writers integer[], positions bigint[], reason text
) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    latest integer := coalesce((stream_generation_now(s)).number, 0);
    new_id text := left(md5(gen_random_uuid()::text), 16);
BEGIN
    IF NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = 'stream_generation'::regclass AND i.indisprimary) THEN
        PERFORM stream_refuse('a dump is being restored into this database: its table stream_generation has no primary key',
            'wait until that is done; restore in one transaction, or while no daemon runs');
    END IF;
    DELETE FROM stream_generation g WHERE g.stream = s.number AND g.number <= latest - 999;
    INSERT INTO stream_generation VALUES (s.number, latest + 1, new_id, began_at, writers, positions, reason,
        clock_timestamp(), stream_incarnation(), s.relation::oid, s.sequence::oid, pg_relation_filenode(s.sequence),
        stream_files(s.relation));
    RETURN new_id;
END
$$;
-- stream_fork(number, seen, reason): history has forked, or may have: begins a generation. Done once where several daemons
-- ask for it: only while `seen` is still the id of the present one. Returns the id of the present generation.
-- Shared with the generation before is, up to where:
--  - `sequence_kept` (stream_sequence_changed): what was noted;
--  - another file of the same sequence (ALTER SEQUENCE, TRUNCATE ... RESTART IDENTITY), or `ids_went_back` (setval): what the
--    rows prove (stream_kept_upto). The sequence may have been lower than at the time when somebody looked. Nothing is
--    shared with a sequence that was made anew, from a dump, and restarted since: the number of its first file is its oid;
--  - `table_changed` (stream_alter with a table whose rows are not known to be the same): nothing;
--    Where the rows cannot prove it, and a user has to say it (stream_question), no generation begins;
--  - otherwise: what was noted in the database, which was restored, replicated or kept together with the rows.
-- What was noted and acknowledged beyond that is lowered to it; ids beyond it are skipped no more. Raises RS001 where the
-- stream was removed, and RS002 where the sequence changed and may not be read.
-- Writes stream, stream_generation, stream_position, stream_mark, stream_ack, stream_skip.
CREATE OR REPLACE FUNCTION stream_fork(stream_number integer, seen text, reason text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    s stream;
    g stream_generation;
    shared bigint;  -- NULL: nothing
    changed boolean;
    ahead integer[] := '{}';
    upto bigint[] := '{}';
    new_id text;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = stream_number FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'RS001', MESSAGE = 'the stream was removed', HINT = 'load the streams again';
    END IF;
    g := stream_generation_now(s);
    IF g.id IS DISTINCT FROM seen THEN
        RETURN g.id;
    END IF;
    changed := g.sequence = s.sequence::oid AND g.relation = s.relation::oid
        AND g.file IS DISTINCT FROM pg_relation_filenode(s.sequence);
    IF reason IN ('sequence_changed', 'sequence_kept') AND NOT changed THEN
        RETURN g.id;  -- the change was rolled back
    ELSIF reason NOT IN ('sequence_kept', 'sequence_restarted', 'ids_went_back', 'table_changed')
            AND (stream_question_of(s)).problem IS NOT NULL THEN
        RETURN g.id;  -- a user has to say first what has happened (stream_fault)
    ELSIF reason = 'sequence_kept' THEN
        shared := (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
        reason := 'sequence_changed';
    ELSIF reason <> 'table_changed' AND (changed OR reason = 'ids_went_back') THEN
        shared := stream_kept_upto(s, g, reason = 'ids_went_back');
        reason := CASE WHEN reason = 'ids_went_back' THEN reason WHEN shared IS NULL THEN 'sequence_restarted'
            ELSE 'sequence_changed' END;
    ELSIF g.sequence IS DISTINCT FROM s.sequence::oid AND s.sequence::oid <> pg_relation_filenode(s.sequence) THEN
        reason := 'sequence_restarted';
    ELSIF reason NOT IN ('sequence_restarted', 'table_changed') THEN
        shared := (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
        SELECT coalesce(array_agg(p.writer ORDER BY p.writer), '{}'), coalesce(array_agg(p.position ORDER BY p.writer), '{}')
        INTO ahead, upto
        FROM stream_position p WHERE p.stream = s.number AND p.writer <> 0
            AND p.position > coalesce(shared, stream_floor(s.sequence));
    END IF;
    shared := coalesce(shared, stream_floor(s.sequence));
    new_id := stream_generation_add(s, shared, ahead, upto, reason);
    UPDATE stream x SET trimmed_upto = shared WHERE x.number = s.number AND x.trimmed_upto > shared;
    DELETE FROM stream_mark m WHERE m.stream = s.number AND m.position > shared;
    DELETE FROM stream_skip k WHERE k.stream = s.number AND k.id > shared;  -- these ids are other rows now
    UPDATE stream_position p SET published_at = clock_timestamp(),
        position = coalesce((SELECT u FROM unnest(ahead, upto) a (w, u) WHERE a.w = p.writer), least(p.position, shared))
    WHERE p.stream = s.number;
    UPDATE stream_ack a SET generation = new_id, token = least(a.token, shared)
    WHERE a.stream = s.number AND a.generation = g.id;
    RETURN new_id;
END
$$;
-- stream_continue(): begins a generation of each stream whose present one is not valid any more.
-- Returns how many. To be called before anything is read for readers. Writes what stream_fork writes.
CREATE OR REPLACE FUNCTION stream_continue() RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    s stream;
    g stream_generation;
    forked integer := 0;
    old text[];
    present text[] := string_to_array(stream_incarnation(), '/');
BEGIN
    FOR s IN SELECT * FROM stream x ORDER BY x.number LOOP
        g := stream_generation_now(s);
        CONTINUE WHEN stream_continues(s, g) OR (stream_question_of(s)).problem IS NOT NULL
            OR NOT has_sequence_privilege(s.sequence, 'SELECT');  -- it is not served (stream_denied), and goes on with the right
        old := string_to_array(g.incarnation, '/');
        PERFORM stream_fork(s.number, g.id, CASE
            WHEN old[1] <> present[1] THEN 'other_server'
            WHEN old[2] <> present[2] THEN 'promoted'
            WHEN old[3] <> present[3] OR g.relation <> s.relation::oid OR g.sequence <> s.sequence::oid THEN 'restored'
            WHEN (old[4], old[5]) IS DISTINCT FROM (present[4], present[5]) THEN 'restarted'
            ELSE 'sequence_changed' END);
        forked := forked + 1;
    END LOOP;
    RETURN forked;
END
$$;
