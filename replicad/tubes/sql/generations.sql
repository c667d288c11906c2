-- Generations: stretches of the history of these tubes that did not fork (docs/positions.md). All tubes of a schema have one
-- history, because one sequence numbers their pods. The daemon, or the next CLAIM, begins a generation where history may
-- have forked; every statement under a lease checks that the lease's generation is the present one and still valid.

-- tube_incarnation(): which run of which server this is, and which database; as stream_incarnation. Writes nothing.
CREATE OR REPLACE FUNCTION tube_incarnation() RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
{incarnation}$$;

-- tube_generation_now(): the present generation; NULL if none has begun, or while a dump is being restored. Writes nothing.
CREATE OR REPLACE FUNCTION tube_generation_now() RETURNS tube_generation
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT g FROM tube_generation g ORDER BY g.number DESC LIMIT 1
$$;

-- tube_run(): which run of the server this is: its timeline, its start, and when its statistics began (stream_incarnation
-- says why). Of two servers, no two runs are the same. Without a subquery, which PL/pgSQL would give to the executor. Writes
-- nothing.
CREATE OR REPLACE FUNCTION tube_run() RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN {run};
END
$$;

-- tube_generation_valid(): the id of the present generation if it is valid still: the run of the server, the database, the
-- sequence and its file are those in which it began. NULL if it is not: history may have forked. Writes nothing. Each
-- statement under a lease calls it, so it must cost little: pg_control_system() reads a file, and a session keeps the run of
-- its server in the setting replicad.tube_run. A process of Postgres belongs to one run; and where the kept run is not that of
-- the generation, it is read anew, since statistics can be reset meanwhile.
CREATE OR REPLACE FUNCTION tube_generation_valid() RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    g tube_generation;
BEGIN
    SELECT * INTO g FROM tube_generation x ORDER BY x.number DESC LIMIT 1;
    IF g.sequence = 'tube_seq'::regclass::oid AND g.file = pg_relation_filepath(g.sequence)
        AND (g.run = current_setting('replicad.tube_run', true) OR g.run = set_config('replicad.tube_run', tube_run(), false))
    THEN
        RETURN g.id;
    END IF;
    RETURN NULL;
END
$$;

-- tube_generation_sql(): the expression for tube_generation_valid() in a prepared statement, without the call of a function
-- where the session knows its run. Writes nothing.
CREATE OR REPLACE FUNCTION tube_generation_sql() RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT format($sql$(SELECT CASE WHEN g.sequence = %L::regclass::oid AND g.file = pg_relation_filepath(g.sequence)
            AND g.run = current_setting('replicad.tube_run', true) THEN g.id ELSE %s() END
        FROM %s AS g ORDER BY g.number DESC LIMIT 1)$sql$,
        tube_relation('tube_seq'), tube_relation('tube_generation_valid'), tube_relation('tube_generation'))
$$;

-- tube_later(sequence, a_second): sets a sequence to a number above all numbers that it can have given out in any history,
-- the lost ones too: to the time since 2025, in parts of which there are a_second in a second. Only a fork reads the clock. A
-- sequence that is above that number, or was never used, stays as it is. Raises 42501 with the GRANT. Writes the sequence.
CREATE OR REPLACE FUNCTION tube_later(sequence regclass, a_second integer) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    present bigint := pg_sequence_last_value(sequence);
    later bigint := (extract(epoch FROM clock_timestamp()) - 1735689600) * a_second;
BEGIN
    IF NOT has_sequence_privilege(sequence, 'UPDATE') THEN
        RAISE EXCEPTION USING ERRCODE = '42501',
            MESSAGE = format('sequence %s cannot be moved beyond the numbers of lost pods and leases after a fork', sequence),
            HINT = format('run: GRANT UPDATE ON SEQUENCE %s TO %I', sequence, current_user);
    END IF;
    IF present < later THEN
        PERFORM setval(sequence, later);
    END IF;
END
$$;

-- tube_fork(seen, why): history has forked, or may have: begins a generation, unless seen is no longer the id of the present
-- generation (NULL: there is none yet). So several daemons that notice a fork begin one generation. Returns the id of the
-- present generation.
--  - A lease of before gives no right any more. Its row stays, because its holder may not know that yet: until it is released
--    or expires, only this holder may claim the partition. Low-water marks begin anew.
--  - Later pods and leases get numbers above those of the lost history (tube_later). So a seq or a term that somebody kept is
--    not given to another pod or lease again, and a downstream that keeps the highest of them can go on.
--  - Shared with the generation before is what was noted (tube_note). Where ids may have come again (ids_went_back,
--    sequence_changed) nothing is.
-- Raises RT009 while a dump is being restored, whose primary keys come last, and 42501 without a right. Writes
-- tube_generation, tube_low, tube_trigger_seen, tube_attempt and the sequences.
CREATE OR REPLACE FUNCTION tube_fork(seen text, why text) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    g tube_generation;
    noted tube_noted;
    new_id text := left(md5(gen_random_uuid()::text), 16);
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('replicad tube generations ' || current_schema()));
    g := tube_generation_now();
    IF g.id IS DISTINCT FROM seen THEN
        RETURN g.id;
    END IF;
    PERFORM FROM tube_generation x WHERE x.number = g.number FOR UPDATE;  -- waits for those who go on in it
    IF NOT (SELECT bool_and(i.indisvalid) AND count(*) = 2 FROM pg_index i
            WHERE i.indrelid IN ('tube_generation'::regclass, 'tube_lease'::regclass) AND i.indisprimary) THEN
        PERFORM tube_refuse('RT009', 'a dump is being restored into this database: its tubes have no primary keys yet',
            'wait until that is done; restore in one transaction, or while no daemon runs');
    END IF;
    DELETE FROM tube_low;
    IF why IN ('other_server', 'restored') THEN
        DELETE FROM tube_trigger_seen;  -- a dump makes the triggers anew
        DELETE FROM tube_attempt;  -- of processes that have ended long ago
    END IF;
    IF g.id IS NOT NULL THEN
        PERFORM tube_later('tube_seq', 1000000), tube_later('tube_term_seq', 250);
    END IF;
    SELECT * INTO noted FROM tube_noted n;
    IF why IN ('ids_went_back', 'sequence_changed') THEN
        noted := NULL;
    END IF;
    DELETE FROM tube_generation x WHERE x.number <= g.number - 999;
    INSERT INTO tube_generation (number, id, reason, shared, shared_at, after_term, incarnation, run, sequence, file)
        VALUES (coalesce(g.number, 0) + 1, new_id, why,
            coalesce(noted.positions, '{}'), noted.noted_at,
            coalesce(pg_sequence_last_value('tube_term_seq'), 0) << 24 | 16777215,
            tube_incarnation(), tube_run(), 'tube_seq'::regclass, pg_relation_filepath('tube_seq'));
    RETURN new_id;
END
$$;

-- tube_continue(unattended): the present generation; begins one if there is none, or if it is not valid any more. To be
-- called before anything is read for workers. unattended: the caller remembers nothing of the generation before, so that
-- after a promotion, a restore, or on another server, all touches since the last note count as unknown (missed.sql). Raises
-- as tube_fork. Writes what tube_fork and tube_miss write.
CREATE OR REPLACE FUNCTION tube_continue(unattended boolean = false) RETURNS tube_generation
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    g tube_generation := tube_generation_now();
    old text[];
    present text[];
    present_id text;
BEGIN
    IF g.id = tube_generation_valid() THEN
        RETURN g;
    END IF;
    old := string_to_array(g.incarnation, '/');
    present := string_to_array(tube_incarnation(), '/');
    IF cardinality(present) = 1 THEN
        PERFORM tube_refuse('RT009', 'this server is a standby', 'connect to its primary');
    END IF;
    present_id := tube_fork(g.id, CASE
        WHEN g.id IS NULL THEN 'first'
        WHEN old[1] <> present[1] THEN 'other_server'
        WHEN old[2] <> present[2] THEN 'promoted'
        WHEN old[3] <> present[3] OR g.sequence <> 'tube_seq'::regclass::oid THEN 'restored'
        WHEN (old[4], old[5]) IS DISTINCT FROM (present[4], present[5]) THEN 'restarted'
        ELSE 'sequence_changed' END);
    g := tube_generation_now();
    IF unattended AND g.id = present_id AND g.reason IN ('other_server', 'promoted', 'restored') THEN
        PERFORM tube_miss(r, 'fork ' || g.id, coalesce((g.shared ->> r.tube)::bigint, 0), NULL, coalesce(g.shared_at, g.created_at))
        FROM tube_registry r ORDER BY r.tube;
    END IF;
    RETURN g;
END
$$;

-- tube_generation_check(in_generation): raises RT002 unless that is the present generation, valid still. Until the
-- transaction ends no other generation begins. Locks the generation's row: before a tube's row, or two who come at a fork
-- wait for each other.
CREATE OR REPLACE FUNCTION tube_generation_check(in_generation text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM FROM tube_generation g WHERE g.id = in_generation FOR KEY SHARE;  -- waits for a fork that is under way
    IF in_generation IS DISTINCT FROM tube_generation_valid() THEN
        PERFORM tube_refuse('RT002', 'history forked', 'read the present generation');
    END IF;
END
$$;

-- tube_note(in_generation, positions): notes the positions of tubes, {tube: position}, that a daemon has read in that
-- generation; they only grow. So the note belongs to the same history as the pods: after a restore, a promotion or a crash
-- the database has all pods up to the note in it. Returns the number of the note. Raises RT002. Writes tube_noted.
CREATE OR REPLACE FUNCTION tube_note(in_generation text, positions jsonb) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    noted bigint;
BEGIN
    PERFORM tube_generation_check(in_generation);
    INSERT INTO tube_noted AS n (positions) VALUES (tube_note.positions)
    ON CONFLICT (one) DO UPDATE SET number = n.number + 1, noted_at = clock_timestamp(), positions = (
        SELECT coalesce(jsonb_object_agg(p.tube, p.upto), '{}') FROM (
            SELECT k.key AS tube, max(k.value::bigint) AS upto
            FROM (SELECT * FROM jsonb_each_text(n.positions) UNION ALL SELECT * FROM jsonb_each_text(excluded.positions)) AS k
            WHERE k.key IN (SELECT r.tube FROM tube_registry r)
            GROUP BY 1
        ) AS p)
    RETURNING n.number INTO noted;
    RETURN noted;
END
$$;

-- tube_shared(tube, in_generation): up to which seq the pods that somebody read in that generation are pods of the present
-- history; 0 if that generation is not in the list, because the database was restored to a time before it began. NULL: it is
-- the present one. Writes nothing.
CREATE OR REPLACE FUNCTION tube_shared(tube text, in_generation text) RETURNS bigint
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE
        WHEN NOT EXISTS (SELECT FROM tube_generation g WHERE g.id = $2) THEN 0
        ELSE (SELECT min(coalesce((later.shared ->> $1)::bigint, 0)) FROM tube_generation g
            JOIN tube_generation later ON later.number > g.number WHERE g.id = $2) END
$$;
