-- Generations: stretches of a stream's history that did not fork, and how a fork is noticed and noted (docs/positions.md).

-- stream_incarnation(): which run of which server this is, and which database: the system identifier, the timeline, the
-- oid of the database, when the server was started, and when it has last begun to count anew (`pg_stat_*.stats_reset`).
-- After a crash of any of its processes Postgres starts again by itself: the postmaster and its start stay, and all its
-- statistics are discarded, so that the earliest of these times is a new one. It changes without a crash only where
-- somebody resets the statistics of all three kinds. The history of a table can only have forked where this differs, or
-- where the table or its sequence is another one. `standby` on a standby.
CREATE OR REPLACE FUNCTION stream_incarnation() RETURNS text
LANGUAGE sql STABLE AS $$
{incarnation}$$;

-- stream_generation_now(s): the present generation of a stream; NULL while a dump is being restored that has not come
-- to the generations.
CREATE OR REPLACE FUNCTION stream_generation_now(s stream) RETURNS stream_generation
LANGUAGE sql STABLE AS $$
    SELECT g FROM stream_generation g WHERE g.stream = s.number ORDER BY g.number DESC LIMIT 1
$$;

-- stream_epoch(s): the id of the present generation, which is the epoch of tokens.
CREATE OR REPLACE FUNCTION stream_epoch(s stream) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT (stream_generation_now(s)).id
$$;

-- stream_continues(s, g): whether generation `g` is valid still: the server, the table, the sequence and the sequence's
-- file are those in which it began. A sequence that is gone is a fault of its own (stream_fault), no fork.
CREATE OR REPLACE FUNCTION stream_continues(s stream, g stream_generation) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT g.incarnation = stream_incarnation() AND g.relation = s.relation::oid AND g.sequence = s.sequence::oid
        AND g.file IS NOT DISTINCT FROM coalesce(pg_relation_filenode(s.sequence), g.file)
$$;

-- stream_files(tbl): the files of a table and all its partitions and heirs, as `oid:file` with commas.
CREATE OR REPLACE FUNCTION stream_files(tbl regclass) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT string_agg(format('%s:%s', t::oid, pg_relation_filenode(t)), ',' ORDER BY t::oid)
    FROM stream_tables(tbl) t WHERE pg_relation_filenode(t) IS NOT NULL
$$;

-- stream_rewritten(s, g): whether a table that is left of the stream has another file than when a position was noted last in
-- generation `g` (stream_note), or none is left. TRUNCATE ... RESTART IDENTITY replaces the files, and so do commands that write
-- each row anew.
CREATE OR REPLACE FUNCTION stream_rewritten(s stream, g stream_generation) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    present text[] := string_to_array(stream_files(s.relation), ',');
    known text[] := string_to_array(g.table_files, ',');
BEGIN
    RETURN (known && present) IS NOT TRUE OR EXISTS (SELECT FROM unnest(present) f WHERE f <> ALL (known)
        AND split_part(f, ':', 1) IN (SELECT split_part(k, ':', 1) FROM unnest(known) k));
END
$$;

-- stream_question(s, g, noted, since): the question that a user must answer before the stream goes on from generation `g`;
-- NULLs where there is none. `noted`: the position that was noted last; `since`: the transaction that noted it. The
-- sequence and the table have other files, and the next id is above the note. ALTER COLUMN ... TYPE does that: then each
-- row has the id that it had. TRUNCATE ... RESTART IDENTITY with other rows under the same ids does it, too. Nothing that
-- is left distinguishes the two, equal ids least of all, where the id column or the definition of the sequence was altered
-- since the note, or where the table has another TOAST table, as after SET UNLOGGED and SET LOGGED. Where nothing of that
-- is so, it was a TRUNCATE; where the table is empty, or the next id is not above the note, nothing is lost by beginning
-- again.
CREATE OR REPLACE FUNCTION stream_question(
    s stream, g stream_generation, noted bigint, since xid, OUT problem text, OUT remedy text
) LANGUAGE plpgsql STABLE AS $$
DECLARE
    command text := format('replicad streams alter %s --sequence-changed ', stream_shell(s.name));
BEGIN
    IF g.file IS NOT DISTINCT FROM pg_relation_filenode(s.sequence) OR noted IS NULL OR s.method = 'positions_table'
            OR g.sequence IS DISTINCT FROM s.sequence::oid OR g.relation IS DISTINCT FROM s.relation::oid
            OR (CASE WHEN has_sequence_privilege(s.sequence, 'USAGE, SELECT')
                THEN (pg_sequence_last_value(s.sequence) >= noted) IS NOT TRUE ELSE false END)
            OR NOT EXISTS (
                SELECT FROM pg_sequence q WHERE q.seqrelid = s.sequence AND age(q.xmin) < age(since)
                UNION ALL
                SELECT FROM pg_attribute a
                WHERE a.attrelid = s.relation AND a.attname = s.id_column AND age(a.xmin) < age(since)
                UNION ALL
                SELECT FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.reltoastrelid AND a.attnum = 1
                WHERE c.oid::text IN (SELECT split_part(k, ':', 1) FROM unnest(string_to_array(g.table_files, ',')) k)
                    AND age(a.xmin) < age(since))
            OR (SELECT sum(pg_relation_size(t)) FROM stream_tables(s.relation) t) = 0
            OR NOT stream_rewritten(s, g) THEN
        RETURN;
    END IF;
    problem := format('%s and sequence %s were written anew, as by ALTER COLUMN %I TYPE or SET LOGGED, and nothing shows whether '
        'the rows up to %s, the noted position, are the same', s.relation, s.sequence, s.id_column, noted);
    remedy := format('if every row has the id that it had, run: %ssame; if ids began again (TRUNCATE ... RESTART IDENTITY), so that '
        'readers need all rows anew, run: %srestarted', command, command);
END
$$;

-- stream_question_of(s): stream_question for the present generation and note.
CREATE OR REPLACE FUNCTION stream_question_of(s stream, OUT problem text, OUT remedy text)
LANGUAGE sql STABLE AS $$
    SELECT q.problem, q.remedy
    FROM (SELECT) one LEFT JOIN stream_position p ON p.stream = s.number AND p.writer = 0
    CROSS JOIN LATERAL stream_question(s, stream_generation_now(s), p.position, p.xmin) q
$$;

-- stream_kept_upto(s, g, went_back): the id up to which the rows of generation `g` are the same for certain, though its
-- sequence was altered (AS bigint, MAXVALUE, CACHE, OWNED BY ...) or, `went_back`, set to a lower value; NULL where nothing
-- is certain.
--  - The tables that are left have the files that they had when a position was noted last (stream_rewritten).
--  - Below the lowest row that was written since that note (whose transaction is newer), and at or below the last value, no id
--    was given out again: a sequence that was lower leaves rows in the gaps. Where it is known to have gone back, no transaction
--    may be under way that can still leave one. An UPDATE makes a row a newer one, so less is shared then.
-- ALTER SEQUENCE waits for all transactions that have taken an id, so all earlier ids are finished. Reads the rows up to
-- the note, once; without an answer within statement_timeout nothing is certain. Raises RS002 where the role may not read
-- the sequence: that is no change of it.
CREATE OR REPLACE FUNCTION stream_kept_upto(s stream, g stream_generation, went_back boolean) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    last bigint;
    noted bigint;
    since xid;
    lowest bigint;
BEGIN
    IF NOT has_sequence_privilege(s.sequence, 'SELECT') THEN
        PERFORM stream_refuse(format('sequence %s may not be read, so nothing is known of the ids that it gives out', s.sequence),
            format('run: GRANT SELECT ON SEQUENCE %s TO %I', s.sequence, current_user));
    END IF;
    IF has_sequence_privilege(s.sequence, 'SELECT') IS NULL OR NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = s.relation) THEN
        RETURN NULL;  -- dropped
    END IF;
    last := pg_sequence_last_value(s.sequence);
    SELECT p.position, p.xmin INTO noted, since FROM stream_position p WHERE p.stream = s.number AND p.writer = 0;
    IF s.method = 'positions_table' OR g.sequence IS DISTINCT FROM s.sequence::oid OR g.relation IS DISTINCT FROM s.relation::oid
            OR last IS NULL OR noted IS NULL OR stream_rewritten(s, g)
            OR (went_back AND (stream_writer_holder(s, NULL)).holder IS NOT NULL) THEN
        RETURN NULL;
    END IF;
    SELECT x INTO lowest FROM stream_as_owner(s.relation, format(
        'SELECT min(t.%I)::text FROM %s AS t WHERE t.%I <= %s AND age(t.xmin) < age(%L::xid)',
        s.id_column, stream_qualified(s.relation), s.id_column, noted, since)) x;
    RETURN least(noted, last, lowest - 1);
EXCEPTION WHEN query_canceled THEN
    RETURN NULL;
END
$$;

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

-- stream_fork(number, seen, reason): history has forked, or may have: begins a generation. It is done once where several
-- daemons ask for it: only while `seen` is still the id of the present generation. Returns the id of the present
-- generation. Shared with the generation before is, up to where:
--  - `sequence_kept` (stream_sequence_changed): what was noted;
--  - another file of the same sequence (ALTER SEQUENCE, TRUNCATE ... RESTART IDENTITY), or `ids_went_back` (setval): what the
--    rows prove (stream_kept_upto). The sequence may have been lower than at the time when somebody looked. Nothing is
--    shared with a sequence that was made anew, from a dump, and restarted since: the number of its first file is its oid;
--  - `table_changed` (stream_alter with a table whose rows are not known to be the same): nothing;
--    Where the rows cannot prove it, and a user has to say it (stream_question), no generation begins;
--  - otherwise: what was noted in the database, which was restored, replicated or kept together with the rows.
-- Noted and acknowledged positions beyond it are lowered to it; ids beyond it are skipped no more. Raises RS001 where the
-- stream was removed, and RS002 where the sequence changed and may not be read. Writes stream, stream_generation,
-- stream_position, stream_mark, stream_ack, stream_skip.
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

-- stream_continue(): begins a generation of each stream whose present generation is not valid any more. Returns how many.
-- To be called before anything is read for readers. Writes what stream_fork writes.
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
            -- without the right it is not served (stream_denied), nor where the sequence was dropped (NULL; stream_fault)
            OR has_sequence_privilege(s.sequence, 'SELECT') IS NOT TRUE;
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

-- stream_generations(name): the generations of a stream, the present one first: when and why each began, and up to which
-- position its history is shared with the generation before. Raises RS001.
CREATE OR REPLACE FUNCTION stream_generations(
    name text, OUT number integer, OUT id text, OUT began_at bigint, OUT reason text, OUT created_at timestamptz
) RETURNS SETOF record
LANGUAGE sql STABLE AS $$
    SELECT g.number, g.id, g.began_at, g.reason, g.created_at
    FROM stream_find(name) s JOIN stream_generation g ON g.stream = s.number ORDER BY g.number DESC
$$;
COMMENT ON FUNCTION stream_generations(text) IS 'The generations of a stream, the present one first';
