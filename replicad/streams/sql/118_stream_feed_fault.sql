-- stream_feed_fault(s): another sequence feeds the id column now than the one that the stream was added with, so that its
-- positions say nothing of new rows; NULLs where that is not so. A stream whose sequence never fed the column (named on
-- purpose when it was added) is left alone, and so is a column that no sequence feeds any more: then the writers name
-- the sequence themselves.
CREATE OR REPLACE FUNCTION stream_feed_fault(s stream, OUT problem text, OUT remedy text)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    feeding regclass := CASE WHEN s.fed THEN stream_sequence(s.relation, s.id_column) END;
BEGIN
    IF feeding <> s.sequence THEN
        problem := format('column %I of %s takes its ids from sequence %s now, and the stream follows %s', s.id_column,
            s.relation, feeding, s.sequence);
        remedy := format('run: replicad streams alter %s --table %s (with --same-rows if the new sequence goes on above all '
            'rows that were sent); or give the column its sequence back', stream_shell(s.name),
            stream_shell(s.relation::text));
    END IF;
END
$$;
COMMENT ON FUNCTION stream_feed_fault(stream) IS 'Whether another sequence feeds the id column now, and the remedy';
