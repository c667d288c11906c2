-- stream_max_row(name, bytes): sets the bound on the length of the stream's lines. Raises RS001, and RS007 beyond what
-- clients take. Writes stream.
CREATE OR REPLACE FUNCTION stream_max_row(name text, bytes bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    UPDATE stream x SET max_row = stream_check_max_row(bytes) WHERE x.number = s.number;
END
$$;
COMMENT ON FUNCTION stream_max_row(text, bigint) IS 'Sets the bound on the length of the lines of a stream';
