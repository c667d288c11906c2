-- stream_sequence_fault(sequence, method): why no stream can be fed by this sequence, and the remedy; NULLs where it
-- can. Asked when a stream is added and again while it is served.
CREATE OR REPLACE FUNCTION stream_sequence_fault(
    sequence regclass, method text, OUT problem text, OUT remedy text
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s pg_sequence;
BEGIN
    SELECT * INTO s FROM pg_sequence q WHERE q.seqrelid = sequence;
    IF NOT FOUND THEN
        problem := format('%s is not a sequence', sequence);
        remedy := 'name the sequence that the ids come from';
    ELSIF s.seqcache > 1 THEN
        problem := format('sequence %s has CACHE %s: sessions keep ids for later, so no position can be trusted',
            sequence, s.seqcache);
        remedy := format('run: ALTER SEQUENCE %s CACHE 1', sequence);
    ELSIF s.seqincrement < 0 THEN
        problem := format('sequence %s counts downwards (INCREMENT %s)', sequence, s.seqincrement);
        remedy := 'the ids of a stream grow: feed the column from a sequence that counts upwards';
    ELSIF s.seqcycle THEN
        problem := format('sequence %s starts again at its end (CYCLE)', sequence);
        remedy := format('run: ALTER SEQUENCE %s NO CYCLE', sequence);
    ELSIF (SELECT c.relpersistence FROM pg_class c WHERE c.oid = sequence) <> 'p' THEN
        problem := format('sequence %s is not logged: after a crash it issues ids again', sequence);
        remedy := format('run: ALTER SEQUENCE %s SET LOGGED', sequence);
    ELSIF method = 'reservation' AND s.seqmin < 1 THEN
        problem := format('sequence %s can go below 1, which the lock of a reservation cannot carry', sequence);
        remedy := format('run: ALTER SEQUENCE %s MINVALUE 1', sequence);
    END IF;
END
$$;
