-- stream_check_max_row(bytes): the bound on the length of a line, in bytes, if it is possible. Raises RS007 if it is not.
CREATE OR REPLACE FUNCTION stream_check_max_row(bytes bigint) RETURNS integer
LANGUAGE plpgsql AS $$
BEGIN
    IF bytes IS NULL OR bytes NOT BETWEEN 1024 AND 67108864 THEN
        PERFORM stream_refuse_argument(format('a row of at most %s bytes is not possible', bytes),
            'the bound lies between 1024 and 67108864 (64 MiB), which is what clients take');
    END IF;
    RETURN bytes;
END
$$;
