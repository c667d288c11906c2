-- stream_last_value(sequence): the last id issued; start - 1 where there was none yet. Never a torn read (a SELECT from
-- the sequence would be). Raises RS002 beyond 48 bits, which is all that the lock of a reservation carries.
CREATE OR REPLACE FUNCTION stream_last_value(sequence regclass) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    last bigint := pg_sequence_last_value(sequence);
BEGIN
    -- NULL also means that we may not look, which must not pass for "none yet"
    IF last IS NULL AND has_sequence_privilege(sequence, 'USAGE, SELECT') THEN
        SELECT s.seqstart - 1 INTO last FROM pg_sequence s WHERE s.seqrelid = sequence;
    END IF;
    IF last IS NULL OR last < 0 OR last >> 48 <> 0 THEN
        PERFORM stream_refuse(format('sequence %s stands at %s', sequence, coalesce(last::text, 'what you may not see')),
            format('reservation needs a value from 0 to 281474976710655, and the right to use it: GRANT USAGE ON SEQUENCE '
                '%s TO %I', sequence, current_user));
    END IF;
    RETURN last;
END
$$;
