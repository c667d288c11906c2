-- The writers of a stream: their numbers, idle writers, and how writers are retired.

-- stream_writers_ensure(number, names): gives each writer of a stream its small number, and the next number to a new name.
-- A writer that was retired keeps its number and is retired no more. Returns the numbers of the given writers. Names are
-- brought into the form of stream_instance(). Writes stream_writer.
CREATE OR REPLACE FUNCTION stream_writers_ensure(stream_number integer, names text[])
RETURNS TABLE (writer text, writer_number integer)
LANGUAGE plpgsql AS $$
DECLARE
    wanted text[] := ARRAY(SELECT DISTINCT stream_instance(n) FROM unnest(names) n);
BEGIN
    IF EXISTS (SELECT FROM unnest(wanted) n
               WHERE NOT EXISTS (SELECT FROM stream_writer w WHERE w.stream = stream_number AND w.name = n
                                 AND w.retired_at IS NULL)) THEN
        PERFORM FROM stream s WHERE s.number = stream_number FOR NO KEY UPDATE;  -- one after another
        UPDATE stream_writer w SET retired_at = NULL
        WHERE w.stream = stream_number AND w.name = ANY (wanted) AND w.retired_at IS NOT NULL;
        INSERT INTO stream_writer (stream, number, name)
        SELECT stream_number,
            (SELECT coalesce(max(w.number), 0) FROM stream_writer w WHERE w.stream = stream_number)
                + row_number() OVER (ORDER BY n),
            n
        FROM unnest(wanted) n
        WHERE NOT EXISTS (SELECT FROM stream_writer w WHERE w.stream = stream_number AND w.name = n);
    END IF;
    RETURN QUERY SELECT w.name, w.number FROM stream_writer w WHERE w.stream = stream_number AND w.name = ANY (wanted);
END
$$;

-- stream_writers_discover(s): gives numbers to the writers of the newest 100,000 rows: enough for writers that are alive,
-- and bounded. Other writers get a number when they write again; so do writers beyond the number that a daemon lists.
-- Without rows, and without an instance column, there is one writer: master.
CREATE OR REPLACE FUNCTION stream_writers_discover(s stream) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    names text[] := ARRAY['master'];
BEGIN
    IF s.instance_column IS NOT NULL THEN
        names := ARRAY(SELECT stream_as_owner(s.relation, format('SELECT DISTINCT instance FROM ('
            'SELECT coalesce(t.%I::text, '''') COLLATE "C" FROM %s AS t ORDER BY t.%I DESC LIMIT 100000) newest(instance)'
            ' LIMIT 10001', s.instance_column, stream_qualified(s.relation), s.id_column)));
    END IF;
    PERFORM stream_writers_ensure(s.number, coalesce(nullif(names, '{}'), ARRAY['master']));
END
$$;

-- stream_writers(name): all writers of a stream, and the published position of each: its own position where that is ahead,
-- else the position of all writers together. Raises RS001.
CREATE OR REPLACE FUNCTION stream_writers(
    name text, OUT number integer, OUT writer text, OUT "position" bigint, OUT created_at timestamptz,
    OUT retired_at timestamptz
) RETURNS SETOF record
LANGUAGE sql STABLE AS $$
    SELECT w.number, w.name, greatest(p.position, l.position), w.created_at, w.retired_at
    FROM stream_find(stream_writers.name) s
    JOIN stream_writer w ON w.stream = s.number
    LEFT JOIN stream_position p ON p.stream = s.number AND p.writer = w.number
    LEFT JOIN stream_position l ON l.stream = s.number AND l.writer = 0
    ORDER BY w.number
$$;
COMMENT ON FUNCTION stream_writers(text) IS 'All writers of a stream and their positions';

-- stream_writer_holder(s, names): a transaction that may yet commit rows of one of these writers (NULL: of any writer), and
-- how it is ended; NULLs where there is none. Such a transaction has written to the table, or holds ids of a reserved
-- stream, and is prepared (the name of its session is not known any more) or belongs to a session that is called after no
-- other writer.
CREATE OR REPLACE FUNCTION stream_writer_holder(s stream, names text[], OUT holder text, OUT remedy text)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    one record;
BEGIN
    SELECT l.pid, a.application_name, p.gid INTO one
    FROM pg_locks l
    LEFT JOIN pg_stat_get_activity(NULL) a ON a.pid = l.pid
    LEFT JOIN pg_locks x ON l.pid IS NULL AND x.locktype = 'transactionid' AND x.pid IS NULL
        AND x.virtualtransaction = l.virtualtransaction
    LEFT JOIN pg_prepared_xact() p ON p.transaction = x.transactionid
    WHERE l.granted AND l.locktype = 'relation' AND l.pid IS DISTINCT FROM pg_backend_pid()
        AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.relation IN (SELECT t::oid FROM stream_tables(s.relation) t)
        AND (l.pid IS NULL OR names IS NULL OR EXISTS (SELECT FROM unnest(names) n WHERE stream_holds_back(s.number, a.application_name, n)))
    ORDER BY p.gid, l.pid LIMIT 1;
    IF NOT FOUND AND s.method = 'reservation' THEN
        SELECT h.pid, h.session AS application_name, NULL::text AS gid INTO one FROM stream_held(s.number) h
        WHERE h.pid IS NULL OR names IS NULL OR EXISTS (SELECT FROM unnest(names) n WHERE stream_holds_back(s.number, h.session, n))
        ORDER BY h.pid LIMIT 1;
    END IF;
    IF FOUND AND one.pid IS NULL THEN
        holder := coalesce(format('prepared transaction %L', one.gid), 'a prepared transaction');
        remedy := 'COMMIT PREPARED or ROLLBACK PREPARED it first (pg_prepared_xacts lists them)';
    ELSIF FOUND THEN
        holder := format('the session with pid %s (%s)', one.pid, one.application_name);
        remedy := format('end its transaction first, or SELECT pg_terminate_backend(%s)', one.pid);
    END IF;
END
$$;

-- stream_writers_last(s, after): the writers of all rows above an id, each once. Reads these rows.
CREATE OR REPLACE FUNCTION stream_writers_last(s stream, after bigint) RETURNS SETOF text
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN QUERY SELECT stream_as_owner(s.relation, format('SELECT DISTINCT %I.stream_instance(%s) FROM %s AS t WHERE t.%I > %L',
        current_schema(), CASE WHEN s.instance_column IS NULL THEN 'NULL' ELSE format('t.%I::text COLLATE "C"',
        s.instance_column) END, stream_qualified(s.relation), s.id_column, after));
END
$$;

-- stream_writers_idle(name, since): the writers that are not retired and have no row above the id `since`. Where these are
-- all writers, the first is left out: a stream keeps one writer. Raises RS001.
CREATE OR REPLACE FUNCTION stream_writers_idle(name text, since bigint, OUT writer text) RETURNS SETOF text
LANGUAGE sql STABLE AS $$
    WITH busy (name) AS MATERIALIZED (
        SELECT stream_writers_last(stream_find(stream_writers_idle.name), since)
    ), active AS (
        SELECT w.number, w.name, EXISTS (SELECT FROM busy b WHERE b.name = w.name) AS busy
        FROM stream_find(stream_writers_idle.name) s
        JOIN stream_writer w ON w.stream = s.number AND w.retired_at IS NULL
    )
    SELECT a.name FROM active a
    WHERE NOT a.busy AND (a.number > (SELECT min(x.number) FROM active x) OR EXISTS (SELECT FROM active x WHERE x.busy))
    ORDER BY a.number
$$;
COMMENT ON FUNCTION stream_writers_idle(text, bigint) IS 'Writers without a row above an id';

-- stream_writers_retire(name, names, quiet): these writers are listed to readers no more, until they write again. Their
-- numbers stay taken, so that tokens which name them keep their meaning. All are retired or none; returns how many were not
-- retired yet. Refuses (RS002) a name that no writer has, a writer that has rows above the published position or wrote
-- within the last `quiet` seconds, a writer after which a session with an open transaction is called, any writer while a
-- transaction is open or prepared that may have rows of it (stream_writer_holder), and the last writer that is left. Raises
-- RS001. Writes stream_writer.
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
