-- The positions that daemons publish: how they are noted, taken back and kept.

-- stream_mark_position(number, position, at): notes the position of the stream, once a minute at most, and thins out the
-- notes of yesterday to one per hour. Writes stream_mark.
CREATE OR REPLACE FUNCTION stream_mark_position(stream_number integer, new_position bigint, at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    latest stream_mark;
BEGIN
    SELECT * INTO latest FROM stream_mark m WHERE m.stream = stream_number ORDER BY m.at DESC LIMIT 1;
    IF latest.at > stream_mark_position.at - interval '1 minute' OR latest.position >= new_position THEN
        RETURN;
    END IF;
    INSERT INTO stream_mark (stream, at, position, hourly)
    VALUES (stream_number, stream_mark_position.at, new_position,
        coalesce(date_trunc('hour', latest.at) < date_trunc('hour', stream_mark_position.at), true))
    ON CONFLICT DO NOTHING;
    DELETE FROM stream_mark m
    WHERE m.stream = stream_number AND NOT m.hourly AND m.at < stream_mark_position.at - interval '1 day';
END
$$;

-- stream_note(number, generation, position, writers, positions, at): notes the positions that a daemon has published in
-- that generation; they only grow. Notes the table's files too, and the partitions that were detached. Returns false, and
-- writes nothing, where the generation is not the present one, or is not valid on this server any more: the positions that
-- the daemon has published may be of another history. Writes stream_position, stream_generation, stream, and now and then
-- stream_mark.
CREATE OR REPLACE FUNCTION stream_note(
    stream_number integer, in_generation text, linear_position bigint, writers integer[], positions bigint[],
    at timestamptz = clock_timestamp()
) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    s stream;
    g stream_generation;
    files text;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = stream_number FOR KEY SHARE;  -- waits for a fork that is under way
    files := stream_files(s.relation);  -- before the sequence is seen to have its file still
    g := stream_generation_now(s);
    IF s.number IS NULL OR g.id IS DISTINCT FROM in_generation OR NOT stream_continues(s, g) THEN
        RETURN false;
    END IF;
    IF g.table_files IS DISTINCT FROM files THEN
        UPDATE stream x SET parted = x.parted || left_over.tables
        FROM (
            SELECT array_agg(f::oid) AS tables FROM stream_fed_elsewhere(s.sequence, s.relation) f
            WHERE f::oid <> ALL (s.parted)
                AND f::oid::text IN (SELECT split_part(noted.file, ':', 1) FROM unnest(string_to_array(g.table_files, ',')) AS noted (file))
        ) AS left_over
        WHERE x.number = s.number AND left_over.tables IS NOT NULL;
        UPDATE stream_generation x SET table_files = files WHERE x.stream = g.stream AND x.number = g.number;
    END IF;
    INSERT INTO stream_position AS p (stream, writer, position, published_at)
    SELECT stream_number, w, max(n), at
    FROM (SELECT 0, linear_position UNION ALL SELECT * FROM unnest(writers, positions)) new(w, n)
    GROUP BY w ORDER BY w  -- in one order, so that two daemons do not wait for each other in a circle
    ON CONFLICT (stream, writer) DO UPDATE SET position = excluded.position, published_at = excluded.published_at
    WHERE p.position < excluded.position;
    PERFORM stream_mark_position(stream_number, linear_position, at);
    RETURN true;
END
$$;

-- stream_rewind(number, seen, upto): for rows above `upto` that were not sent to readers, though they lie at or below a
-- position that was published: begins a generation that shares with the generation before the rows up to `upto`, so that
-- readers get all rows above it again. In contrast to stream_fork, ids are the same rows as before: rows that were trimmed,
-- or taken out of the stream, stay so. Returns `begun`: the id of the new generation, or NULL where nothing was done. Then
-- `wait` has the seconds after which it may be tried again: each rewind within an hour doubles the pause before the next
-- rewind. Or it is NULL: `seen` is not the present generation, or not valid on this server any more, so that rows are read
-- anew in any case. Writes stream_generation, stream_position, stream_ack.
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

-- stream_keep(number, generation, lowest, published, trimmed): notes the lowest id of a stream's table (NULL: it is empty),
-- read after `published` was published. Where it has grown since the last note, rows were removed without stream_trim; then
-- tokens below are expired, as after a trim, but only up to the published position: below that no row is in flight. Returns
-- `gone`: the id up to which rows are gone now, if it is higher than before. `trimmed` is the trimmed_upto of the snapshot
-- in which the lowest id was read. Where the id lies at or below it, rows are there again (a table that was loaded again, a
-- partition that was attached again): the retained rows begin with them. Returns `back`: the token from which on they are
-- retained. If somebody has trimmed since, the lowest id may be of a row that is gone, and nothing is taken back. Does
-- nothing where the generation is not the present one, or not valid on this server. Writes stream, stream_kept.
CREATE OR REPLACE FUNCTION stream_keep(
    stream_number integer, in_generation text, lowest bigint, published bigint, trimmed bigint,
    OUT gone bigint, OUT back bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    s stream;
    g stream_generation;
    k stream_kept;
    shared bigint;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = stream_number FOR NO KEY UPDATE;
    g := stream_generation_now(s);
    IF s.number IS NULL OR g.id IS DISTINCT FROM in_generation OR NOT stream_continues(s, g) THEN
        RETURN;
    END IF;
    SELECT * INTO k FROM stream_kept x WHERE x.stream = stream_number;
    SELECT min(x.began_at) INTO shared FROM stream_generation x WHERE x.stream = stream_number AND x.number > k.generation;
    IF k.lowest <= coalesce(shared, k.lowest) AND (lowest > k.lowest OR lowest IS NULL) THEN
        gone := least(lowest - 1, greatest(least(k.published, shared), published));
        UPDATE stream x SET trimmed_upto = gone WHERE x.number = stream_number AND coalesce(x.trimmed_upto < gone, true);
        IF NOT FOUND THEN
            gone := NULL;
        END IF;
    END IF;
    IF lowest <= s.trimmed_upto AND s.trimmed_upto = trimmed THEN
        back := greatest(lowest, -9223372036854775807) - 1;
        UPDATE stream x SET trimmed_upto = back WHERE x.number = stream_number;
    END IF;
    INSERT INTO stream_kept AS x VALUES (stream_number, g.number, lowest, greatest(least(k.published, shared), published))
    ON CONFLICT (stream) DO UPDATE SET generation = excluded.generation, lowest = excluded.lowest, published = excluded.published;
END
$$;

-- stream_position_at(name, at): the position of the stream at that time, from the notes of its daemons: the latest note
-- that is not after it, NULL where the notes do not go back so far. Raises RS001.
CREATE OR REPLACE FUNCTION stream_position_at(name text, at timestamptz) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT (SELECT m.position FROM stream_mark m WHERE m.stream = s.number AND m.at <= stream_position_at.at
            ORDER BY m.at DESC LIMIT 1)
    FROM stream_find(name) s
$$;
COMMENT ON FUNCTION stream_position_at(text, timestamptz) IS 'Where a stream stood at a time in the past';
