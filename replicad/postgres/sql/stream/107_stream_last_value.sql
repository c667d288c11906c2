-- stream_last_value(sequence): the last id issued; start - 1 where there was none yet. Never a torn read (a SELECT from the
-- sequence would be). Raises RS002 beyond 48 bits, which is all that the lock of a reservation carries.
CREATE OR REPLACE FUNCTION stream_last_value(sequence regclass) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    last bigint := pg_sequence_last_value(sequence);
BEGIN
    IF last IS NULL THEN
        SELECT s.seqstart - 1 INTO last FROM pg_sequence s WHERE s.seqrelid = sequence;
    END IF;
    IF last IS NULL OR last < 0 OR last >> 48 <> 0 THEN
        PERFORM stream_refuse(format('sequence %s stands at %s', sequence, last),
            'a reservation needs a sequence between 0 and 281474976710655 that you may read: GRANT USAGE ON SEQUENCE');
    END IF;
    RETURN last;
END
$$;
COMMENT ON FUNCTION stream_last_value(regclass) IS 'The last id that a sequence issued, as reservations need it';
