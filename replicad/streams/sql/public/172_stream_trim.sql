-- stream_trim(name, upto, batch): deletes the oldest rows with ids up to `upto`, about `batch` of them; call it until
-- it returns 0. What is gone is noted first, so that a token below it is told. Refuses (RS002) to delete what was not
-- published yet. Until its transaction ends, the stream's position waits, as for any other writer.
-- Writes the stream's table, stream, stream_mark.
CREATE OR REPLACE FUNCTION stream_trim(name text, upto bigint, batch integer = 10000) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
    published bigint := (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
    step bigint;
    deleted bigint;
BEGIN
    IF published IS NULL OR upto > published THEN
        PERFORM stream_refuse(format('stream %s is published up to %s, so rows up to %s cannot be trimmed', s.name,
            coalesce(published::text, 'nothing'), upto), 'rows that no reader was sent must stay');
    END IF;
    EXECUTE format('SELECT max(id) FROM (SELECT t.%I FROM %s AS t WHERE t.%I <= $1 ORDER BY 1 LIMIT $2) oldest(id)',
        s.id_column, s.relation, s.id_column) INTO step USING upto, greatest(batch, 1);
    UPDATE stream x SET trimmed_upto = greatest(x.trimmed_upto, coalesce(step, upto)) WHERE x.number = s.number;
    IF step IS NULL THEN
        DELETE FROM stream_mark m WHERE m.stream = s.number AND m.position < upto
            AND m.at < (SELECT max(x.at) FROM stream_mark x WHERE x.stream = s.number AND x.position <= upto);
        RETURN 0;
    END IF;
    EXECUTE format('DELETE FROM %s AS t WHERE t.%I <= $1', s.relation, s.id_column) USING step;
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN deleted;
END
$$;
COMMENT ON FUNCTION stream_trim(text, bigint, integer) IS 'Deletes a batch of the oldest rows of a stream';
