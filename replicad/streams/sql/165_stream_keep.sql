-- stream_keep(number, generation, lowest, published, trimmed): notes the lowest id of a stream's table (NULL: it is empty), read
-- after `published` was published. Where it has grown since the last note, rows were
-- removed without stream_trim; then tokens below are expired, as after a trim, but only up to what was published: below that no row
-- is in flight. Returns `gone`: up to where rows are gone now, if that is more than before.
-- `trimmed` is the trimmed_upto of the snapshot in which the lowest id was read. Where the id lies at or below it, rows are there again (a table that was loaded again, a partition that was attached again): what
-- is retained begins with them. Returns `back`: the token from which on it is. If somebody has trimmed since,
-- the lowest id may be of a row that is gone, and nothing is taken back.
-- Does nothing where the generation is not the present one, or not valid on this server. Writes stream, stream_kept.
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
