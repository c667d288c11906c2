-- stream_trim(name, upto, batch): deletes the oldest rows with ids up to `upto`, about `batch` of them; call it until
-- it returns 0. What is gone is noted first, so that a token below it is told. Refuses (RS002) to delete what was not
-- published yet. Until its transaction ends, the stream's position waits, as for any other writer.
-- To delete runs the triggers of the table's owner, as the asking role: so the owner calls it himself, with a connection of
-- his own, or a superuser for a superuser's table; refused otherwise.
-- Writes the stream's table, and by stream_trim_note stream and stream_mark.
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
    IF stream_runs_as(s.relation) IS NOT NULL THEN
        PERFORM stream_refuse(format('to trim stream %s runs code of role %I, which owns %s, with the rights of %I', s.name,
            pg_get_userbyid(stream_runs_as(s.relation)), s.relation, current_user),
            format('connect as role %I, and trim again', pg_get_userbyid(stream_runs_as(s.relation))));
    END IF;
    EXECUTE format('SELECT max(id) FROM (SELECT t.%I FROM %s AS t WHERE t.%I <= $1 ORDER BY 1 LIMIT $2) oldest(id)',
        s.id_column, s.relation, s.id_column) INTO step USING upto, greatest(batch, 1);
    PERFORM stream_trim_note(s.number, coalesce(step, upto), step IS NULL);
    IF step IS NULL THEN
        RETURN 0;
    END IF;
    EXECUTE format('DELETE FROM %s AS t WHERE t.%I <= $1', s.relation, s.id_column) USING step;
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN deleted;
END
$$;
COMMENT ON FUNCTION stream_trim(text, bigint, integer) IS 'Deletes a batch of the oldest rows of a stream';
