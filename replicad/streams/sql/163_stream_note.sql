-- stream_note(number, generation, position, writers, positions, at): keeps what a daemon has published in that generation;
-- positions only grow. Keeps the table's files too, and which of its partitions were detached. Returns false, and writes
-- nothing, where the generation is not the present one, or is not valid on this server any more: what the daemon has
-- published may be of another history. Writes stream_position, stream_generation, stream, and now and then stream_mark.
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
