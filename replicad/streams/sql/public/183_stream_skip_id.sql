-- stream_skip_id(name, id, reason): takes the rows with that id out of the stream: no reader is sent them from now on.
-- The row itself stays. Returns the id up to which the stream was published (NULL: not yet), so that the caller can say
-- whether readers may have been sent the row already. Repeating it keeps the first entry. Raises RS001. Writes
-- stream_skip.
CREATE OR REPLACE FUNCTION stream_skip_id(name text, id bigint, reason text) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    PERFORM stream_refuse(format('%s rows of stream %s are skipped already', count(*), s.name),
        'so many are no accident of single rows: mend the row expression')
    FROM stream_skip k WHERE k.stream = s.number HAVING count(*) >= 10000;
    INSERT INTO stream_skip (stream, id, reason) VALUES (s.number, stream_skip_id.id, coalesce(stream_skip_id.reason, ''))
    ON CONFLICT DO NOTHING;
    RETURN (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
END
$$;
COMMENT ON FUNCTION stream_skip_id(text, bigint, text) IS 'Takes one id out of a stream';
