-- stream_max_row(name, bytes): sets the bound on the length of the stream's lines. Raises RS001, and RS007 beyond what
-- clients take. Writes stream.
CREATE OR REPLACE FUNCTION stream_max_row(name text, bytes bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    IF bytes IS NULL OR bytes NOT BETWEEN 1024 AND 67108864 THEN
        PERFORM stream_refuse_argument(format('a row of at most %s bytes is not possible', bytes),
            'the bound lies between 1024 and 67108864 (64 MiB), which is what clients take');
    END IF;
    UPDATE stream x SET max_row = bytes WHERE x.number = s.number;
END
$$;
COMMENT ON FUNCTION stream_max_row(text, bigint) IS 'Sets the bound on the length of the lines of a stream';
