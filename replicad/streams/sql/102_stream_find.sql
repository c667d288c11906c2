-- stream_find(name): the registry's row. Raises RS001.
CREATE OR REPLACE FUNCTION stream_find(name text) RETURNS stream
LANGUAGE plpgsql STABLE AS $$
DECLARE
    found_stream stream;
BEGIN
    SELECT * INTO found_stream FROM stream s WHERE s.name = stream_find.name;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'RS001',
            MESSAGE = format('there is no stream %L', left(name, 200)),
            HINT = format('streams: %s', coalesce((SELECT string_agg(s.name, ', ' ORDER BY s.name)
                FROM (SELECT s.name FROM stream s ORDER BY s.name LIMIT 50) s), 'none yet'));
    END IF;
    RETURN found_stream;
END
$$;
