-- stream_writers_ensure(number, names): gives each writer of a stream its small number, the next one to a new name. One
-- that was retired keeps its number and is retired no more. Returns the numbers of those asked for. Names are brought into the form of stream_instance(). Writes stream_writer.
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
