-- stream_reader_missing(tbl, query, path, bound): stands for the reader of a table's owner where there is none. Raises
-- insufficient_privilege with the remedy.
CREATE OR REPLACE FUNCTION stream_reader_missing(tbl oid, query text, path text, bound bigint) RETURNS SETOF text
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
        MESSAGE = coalesce(stream_reader_wanted(tbl::regclass), 'what is needed to read a table was made just now; try again');
END
$$;
