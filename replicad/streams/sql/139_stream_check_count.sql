-- stream_check_count(n): refuses a number of ids that is not between 1 and 10,000: an array is kept in memory.
CREATE OR REPLACE FUNCTION stream_check_count(n integer) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF n IS NULL OR n NOT BETWEEN 1 AND 10000 THEN
        PERFORM stream_refuse(format('cannot reserve %s ids at once', n), 'ask for 1 to 10000');
    END IF;
END
$$;
