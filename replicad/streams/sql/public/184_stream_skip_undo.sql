-- stream_skip_undo(name, id): the rows with that id belong to the stream again; false where they were not skipped.
-- Readers that are past the id are not sent them. Raises RS001. Writes stream_skip.
CREATE OR REPLACE FUNCTION stream_skip_undo(name text, id bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    DELETE FROM stream_skip k WHERE k.stream = s.number AND k.id = stream_skip_undo.id;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION stream_skip_undo(text, bigint) IS 'Takes a skipped id back into a stream';
