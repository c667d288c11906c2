-- Snapshots of streams of changes: the rows that are in the table become changes with op r, in chunks by key, beside live writers.
--
-- A chunk must not take a row back to an older state: its r must come after each change of that row that it does not show, or before
-- one that follows. So stream_snapshot_step takes the ids of a chunk first. It waits until all transactions have ended that may
-- have lower ids, and only then reads the rows: they show all changes with lower ids, and every other change has a higher id, so that
-- it is sent after the r. (DBLog, by A. Andreakis and I. Papapanagiotou, compares watermarks in the log instead; here ids are its order.)
-- While it waits it has a lock on the table of changes that stops no writer, and none on the source.

-- stream_snapshot_request(name, condition, anew, member, path): asks for a snapshot of the rows that meet the condition (SQL on a
-- row called t; NULL: of all), or of one partition. anew: a TRUNCATE is sent before, so that readers drop what they have; it
-- takes the place of snapshots that are not finished. Daemons work it off, and `replicad streams snapshot`. Returns its number.
-- Raises RS001, RS002. Writes stream_snapshot, stream_changes and the table of changes.
CREATE OR REPLACE FUNCTION stream_snapshot_request(
    name text, condition text = NULL, anew boolean = false, member regclass = NULL, path name[] = current_schemas(false)
) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
    c stream_changes;
    trial stream_changes;
    made integer;
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = s.number FOR UPDATE;
    PERFORM stream_refuse(format('stream %s has the rows of %s and no changes', name, s.relation),
        'a snapshot belongs to a stream that was added with --changes') WHERE c.stream IS NULL;
    PERFORM stream_refuse('a snapshot anew sends all rows', 'leave the condition out') WHERE anew AND condition IS NOT NULL;
    trial := c;
    trial.predicate := condition;
    trial.path := c.path || CASE WHEN condition IS NULL THEN '{}' ELSE stream_safe_path(path) END;
    PERFORM stream_change_check_predicate(trial);
    IF anew THEN
        PERFORM stream_changes_ensure(c.stream);
        DELETE FROM stream_snapshot x WHERE x.stream = c.stream AND x.finished_at IS NULL;
        EXECUTE format('INSERT INTO change_%s (op, schema) VALUES (''t'', $1)', c.stream) USING stream_shape_ensure(c.stream);
        PERFORM stream_changes_note(c.stream);
        UPDATE stream_changes x SET missed = NULL, missed_at = NULL WHERE x.stream = c.stream;
    END IF;
    EXECUTE format('INSERT INTO change_%s (op, "row", schema) VALUES (''s'', $1, $2)', c.stream)
        USING stream_shape_text(c), stream_shape_ensure(c.stream);
    INSERT INTO stream_snapshot (stream, number, condition, path, member)
        VALUES (c.stream, (SELECT 1 + coalesce(max(x.number), 0) FROM stream_snapshot x WHERE x.stream = c.stream), condition, trial.path, member)
        RETURNING number INTO made;
    DELETE FROM stream_snapshot x WHERE x.stream = c.stream AND x.finished_at IS NOT NULL AND x.number < made - 20;
    RETURN made;
END
$$;
COMMENT ON FUNCTION stream_snapshot_request(text, text, boolean, regclass, name[]) IS 'Asks for the rows of a table in its stream of changes';

-- stream_snapshot_waits(tbl, awaited, newest): the transactions that may have written to a table with ids that were taken before `awaited`
-- was read: those of awaited (virtual transactions) that still have their locks, and prepared transactions with xids below
-- newest. NULL for awaited: all transactions that have a lock for writing, but our own.
CREATE OR REPLACE FUNCTION stream_snapshot_waits(tbl regclass, awaited text[], newest xid8) RETURNS text[]
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(array_agg(DISTINCT l.virtualtransaction), '{}')
    FROM pg_locks l
    WHERE l.locktype = 'relation' AND l.relation = tbl AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
        AND (awaited IS NULL OR l.virtualtransaction = ANY (awaited) OR l.virtualtransaction LIKE '-1/%' AND
            -- xids of 32 bits, which begin again
            (newest::text::numeric - split_part(l.virtualtransaction, '/', 2)::numeric) % 4294967296 BETWEEN 1 AND 2147483648)
$$;

-- stream_snapshot_step(number, size, patience): the next chunk of the oldest unfinished snapshot of a stream, with up to `size` rows.
-- Returns one row: the snapshot's number, how many rows it has sent, whether it is finished, and the transactions that it waited
-- for longer than `patience` (then nothing was sent); nothing where there is no snapshot, or another session is at it. For a lock on the
-- table itself it waits for 0.1 s only, and so for less than deadlock_timeout: a transaction that locks a partition and then the whole
-- table is not ended for its sake. Raises RS002 above READ COMMITTED. Writes the table of changes and stream_snapshot.
CREATE OR REPLACE FUNCTION stream_snapshot_step(
    stream_number integer, size integer = 2000, patience interval = '10 s', OUT number integer, OUT sent bigint, OUT finished boolean,
    OUT waits_for text[]
) RETURNS SETOF record
LANGUAGE plpgsql AS $$
DECLARE
    c stream_changes;
    w stream_snapshot;
    target regclass;
    ids bigint[];
    newest xid8 := '0';
    until timestamptz := clock_timestamp() + patience;
    pause double precision := 0.001;
    before integer;
    key name[];
    types text[];
    query text;
    shape integer;
    seen bigint;
    count bigint;
    last json;
    lock_patience text := current_setting('lock_timeout');
BEGIN
    PERFORM stream_refuse('a snapshot is taken at the isolation level READ COMMITTED', 'run this in a transaction of its own')
        WHERE current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted');
    SELECT * INTO w FROM stream_snapshot x WHERE x.stream = stream_number AND x.finished_at IS NULL ORDER BY x.number LIMIT 1
        FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR EXISTS (SELECT FROM stream_snapshot x WHERE x.stream = w.stream AND x.finished_at IS NULL AND x.number < w.number) THEN
        RETURN;
    END IF;
    SELECT * INTO c FROM stream_changes x WHERE x.stream = stream_number;
    number := w.number;
    sent := w.rows;
    finished := w.member IS NOT NULL AND NOT EXISTS (SELECT FROM pg_class x WHERE x.oid = w.member);
    target := format('change_%s', c.stream)::regclass;
    shape := stream_shape_ensure(c.stream);
    seen := stream_shape_seen(c.source);
    key := stream_columns(c.source, c.key);
    types := stream_key_types(c.source, key);
    IF NOT finished THEN
        EXECUTE format('LOCK TABLE %s IN ROW EXCLUSIVE MODE', target);
        ids := ARRAY(SELECT nextval(pg_get_serial_sequence(target::text, 'id')) FROM generate_series(1, size));
        waits_for := stream_snapshot_waits(target, NULL, NULL);
        WHILE waits_for <> '{}' LOOP
            IF clock_timestamp() > until THEN
                RETURN NEXT;
                RETURN;
            END IF;
            PERFORM pg_sleep(pause);
            pause := least(2 * pause, 0.05);
            before := cardinality(waits_for);
            waits_for := stream_snapshot_waits(target, waits_for, newest);
            IF cardinality(waits_for) < before THEN  -- what has ended may have been prepared, under another name
                newest := pg_snapshot_xmax(pg_current_snapshot());
                waits_for := stream_snapshot_waits(target, waits_for, newest);
            END IF;
        END LOOP;
        IF stream_shape_seen(c.source) <> seen THEN  -- the next call describes the shape first
            waits_for := NULL;
            RETURN NEXT;
            RETURN;
        END IF;
        query := stream_change_from(c, stream_qualified(coalesce(w.member, c.source)), format(', ARRAY[%s] AS last_key',
                (SELECT string_agg(format('t.%I::text', k.name), ', ' ORDER BY k.n) FROM unnest(key) WITH ORDINALITY AS k (name, n))))
            || CASE WHEN w.condition IS NOT NULL THEN format(E' AND (\n%s\n)', w.condition) ELSE '' END
            || CASE WHEN w.after IS NOT NULL THEN (
                SELECT format(' AND (%s) > (%s)', string_agg(format('t.%I', k.name), ', ' ORDER BY k.n),
                    string_agg(format('%L::%s', w.after[k.n], types[k.n]), ', ' ORDER BY k.n))
                FROM unnest(key) WITH ORDINALITY AS k (name, n)) ELSE '' END
            || (SELECT format(' ORDER BY %s LIMIT %s', string_agg(format('t.%I', k.name), ', ' ORDER BY k.n), size)
                FROM unnest(key) WITH ORDINALITY AS k (name, n));
        c.path := w.path;
        BEGIN
            PERFORM set_config('lock_timeout', '100ms', true);
            SELECT l.count, l.last INTO count, last
                FROM stream_change_lines(c, format('SELECT ''r'' AS op, q.* FROM (%s) AS q', query), 'row', shape, ids) l;
            PERFORM set_config('lock_timeout', lock_patience, true);
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            waits_for := (SELECT array_agg(DISTINCT l.virtualtransaction) FROM pg_locks l JOIN stream_tables(c.source) t ON t::oid = l.relation
                WHERE l.granted AND l.mode = 'AccessExclusiveLock' AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()));
            RETURN NEXT;
            RETURN;
        WHEN undefined_column OR feature_not_supported THEN
            IF stream_shape_seen(c.source) = seen THEN
                RAISE;
            END IF;
            waits_for := NULL;  -- a column was changed in this moment; the next call knows it
            RETURN NEXT;
            RETURN;
        END;
        sent := sent + count;
        finished := count < size;
    END IF;
    waits_for := NULL;
    UPDATE stream_snapshot x SET rows = sent, finished_at = CASE WHEN finished THEN clock_timestamp() END,
        after = coalesce((SELECT array_agg(e.value ORDER BY e.n) FROM json_array_elements_text(last -> 'last_key') WITH ORDINALITY AS e (value, n)), x.after)
        WHERE x.stream = w.stream AND x.number = w.number;
    RETURN NEXT;
END
$$;

-- stream_snapshots(): the snapshots of all streams in their order, the latest finished ones too: the stream's number, the snapshot's number,
-- the rows that were sent, and the time at which it was finished, or NULL.
CREATE OR REPLACE FUNCTION stream_snapshots() RETURNS TABLE (stream integer, number integer, rows bigint, finished_at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT w.stream::integer, w.number, w.rows, w.finished_at FROM stream_snapshot w ORDER BY w.stream, w.number
$$;

-- stream_change_marks(number): the tables of the source of a stream of changes, each with what identifies the rows of its triggers in pg_trigger,
-- and whether all triggers of statements fire. A trigger that is disabled and enabled again has another row.
CREATE OR REPLACE FUNCTION stream_change_marks(stream_number integer) RETURNS TABLE (member oid, marks text, fires boolean)
LANGUAGE sql STABLE AS $$
    SELECT t::oid, coalesce(g.marks, ''), coalesce(g.firing, 0) = 4
    FROM stream_changes c CROSS JOIN stream_tables(c.source) t LEFT JOIN LATERAL (
        SELECT string_agg(x.oid || ':' || x.xmin, ' ' ORDER BY x.oid) AS marks, count(*) FILTER (WHERE g.fires AND g.event & 1 = 0) AS firing
        FROM stream_change_triggers(stream_number, t) g JOIN pg_trigger x ON x.tgrelid = t AND x.tgname = g.name
    ) AS g ON true
    WHERE c.stream = stream_number AND EXISTS (SELECT FROM pg_class x WHERE x.oid = c.source)
$$;

-- stream_changes_note(number): the triggers of a stream of changes are as we made them. Writes stream_change_member.
CREATE OR REPLACE FUNCTION stream_changes_note(stream_number integer) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO stream_change_member AS n (stream, member, marks) SELECT stream_number, m.member, m.marks FROM stream_change_marks(stream_number) m
    ON CONFLICT (stream, member) DO UPDATE SET marks = excluded.marks WHERE n.marks <> excluded.marks
$$;

-- stream_changes_look(): to be called regularly: looks after all streams of changes. It makes trigger functions as the present shapes of the
-- tables want them, follows new partitions, and asks for a snapshot of those that have rows already. It notes what may have
-- been missed: triggers that are off or were changed, and partitions that left the table with their rows. Returns the names of streams with
-- problems: the code changes_missed, where changes may be missing (stream_changes_fault); denied, where a right or the table
-- itself kept it from this; locked, where a lock did, so that the next call may succeed. Writes functions, triggers, stream_changes,
-- stream_change_member and stream_snapshot.
CREATE OR REPLACE FUNCTION stream_changes_look() RETURNS TABLE (name text, code text, problem text)
LANGUAGE plpgsql SET lock_timeout = '100ms' AS $$
DECLARE
    c stream_changes;
    m record;
    made text;
    why text;
    remedy text;
    filled boolean;
    ours boolean;  -- whether we have made triggers
    unfit boolean;
BEGIN
    FOR c IN SELECT x.* FROM stream_changes x JOIN pg_class k ON k.oid = x.source ORDER BY x.stream FOR UPDATE OF x SKIP LOCKED LOOP
        SELECT s.name INTO name FROM stream s WHERE s.number = c.stream;
        BEGIN
            why := NULL;
            ours := false;
            FOR m IN
                SELECT coalesce(n.member, seen.member) AS member, n.marks, n.fires, seen.marks AS before
                FROM stream_change_marks(c.stream) n
                    FULL JOIN (SELECT x.* FROM stream_change_member x WHERE x.stream = c.stream) seen ON seen.member = n.member
            LOOP
                IF m.before IS NULL THEN  -- a new partition
                    unfit := EXISTS (SELECT FROM stream_change_wanted(c.stream, c.source) w WHERE NOT w.fits);
                    ours := stream_changes_ensure(c.stream) OR ours;
                    EXECUTE format('SELECT EXISTS (SELECT FROM %s)', stream_qualified(m.member::regclass)) INTO filled;
                    IF filled AND unfit THEN
                        why := coalesce(why, format('the partitions of %s depend on another column, and rows that a MERGE has moved there since '
                            'are not recorded', m.member::regclass));
                    END IF;
                    IF filled THEN
                        PERFORM stream_snapshot_request(name, member => m.member::regclass);
                    END IF;
                    INSERT INTO stream_change_member SELECT c.stream, x.member, x.marks FROM stream_change_marks(c.stream) x WHERE x.member = m.member;
                ELSIF m.marks IS NULL THEN
                    why := coalesce(why, 'a partition was detached or dropped, and its rows were not recorded as deleted');
                    PERFORM stream_change_detach(c.stream, m.member);
                    DELETE FROM stream_change_member x WHERE x.stream = c.stream AND x.member = m.member;
                ELSIF m.marks <> m.before OR NOT m.fires THEN
                    why := coalesce(why, format('the triggers on %s were off or changed', m.member::regclass));
                    UPDATE stream_change_member x SET marks = m.marks WHERE x.stream = c.stream AND x.member = m.member AND x.marks <> m.marks;
                END IF;
            END LOOP;
            IF why IS NOT NULL THEN
                UPDATE stream_changes x SET missed = why, missed_at = coalesce(x.missed_at, clock_timestamp())
                    WHERE x.stream = c.stream AND x.missed IS DISTINCT FROM why;
            END IF;
            SELECT concat_ws(' ', stream_shape_seen(c.source), k.relowner, stream_runs_as(c.source)) INTO made FROM pg_class k WHERE k.oid = c.source;
            IF made IS DISTINCT FROM c.marks THEN
                ours := stream_changes_ensure(c.stream, of_rows => true) OR ours;
                UPDATE stream_changes x SET marks = made WHERE x.stream = c.stream;
            END IF;
            IF ours THEN  -- triggers of the table itself may be others now
                UPDATE stream_change_member x SET marks = n.marks FROM stream_change_marks(c.stream) n
                    WHERE x.stream = c.stream AND x.member = n.member AND n.member = c.source;
            END IF;
            code := NULL;
            problem := NULL;
        EXCEPTION WHEN lock_not_available OR insufficient_privilege OR SQLSTATE 'RS002' THEN
            GET STACKED DIAGNOSTICS remedy = PG_EXCEPTION_HINT;
            code := CASE SQLSTATE WHEN '55P03' THEN 'locked' ELSE 'denied' END;
            problem := CASE
                WHEN code = 'locked' THEN format('new columns and partitions of %s cannot be followed while another session locks it: %s', c.source, SQLERRM)
                ELSE concat_ws('; ', SQLERRM, nullif(remedy, '')) END;
        END;
        SELECT stream_changes_fault(s) INTO why FROM stream s WHERE s.number = c.stream;
        IF why IS NOT NULL THEN
            problem := concat_ws('. Also: ', why, problem);
            code := CASE WHEN code = 'locked' AND c.missed_at IS NULL THEN code ELSE 'changes_missed' END;
        END IF;
        IF problem IS NOT NULL THEN
            RETURN NEXT;
        END IF;
    END LOOP;
END
$$;

-- stream_change_detach(number, tbl): drops the triggers of a stream of changes on one table, if it is still there. Writes triggers.
CREATE OR REPLACE FUNCTION stream_change_detach(stream_number integer, tbl oid) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    found name;
BEGIN
    FOR found IN SELECT g.name FROM stream_change_triggers(stream_number, tbl::regclass) g LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', found, stream_qualified(tbl::regclass));
    END LOOP;
END
$$;
