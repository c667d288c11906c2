-- stream_refuse_step(sequence, id, bound): refuses an id that is not above the last value read before it.
CREATE OR REPLACE FUNCTION stream_refuse_step(sequence regclass, id bigint, bound bigint) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM stream_refuse(format('sequence %s issued %s after %s', sequence, id, bound),
        'the sequence of a stream has CACHE 1, and is never set back while writers are at work');
END
$$;
