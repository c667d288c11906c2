-- tube_pods_insert(tube_or_tubes, query, shard, op, approx_size, fetch_chunk_size, insert_chunk_size, path): touches
-- every id that the query returns, in pods of insert_chunk_size; returns how many ids there were (NULLs are left out).
--   tube_or_tubes      one tube, or several with commas; the query runs once
--   query              returns columns id and row_number; pods follow the order of row_number
--   approx_size        how many ids are expected, for the percentage in the NOTICEs; NULL: unknown
--   fetch_chunk_size   ids between two NOTICEs
--   path               the search_path of the query; by default the caller's
-- Raises RT001, RT005. Writes the tubes. It is one transaction: the positions of the tubes do not move until it ends.
CREATE OR REPLACE FUNCTION tube_pods_insert(
    tube_or_tubes text, query text, shard integer, op character = 'B', approx_size bigint = NULL,
    fetch_chunk_size integer = 20000, insert_chunk_size integer = 250, path name[] = current_schemas(true)
) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT SET row_security = off AS $$
DECLARE
    tubes text[] := tube_split(tube_or_tubes);
    numbered text := format(
        E'SELECT ids.id, row_number() OVER (ORDER BY ids.row_number) - 1 AS n'
        ' FROM (SELECT given.id::bigint AS id, given.row_number FROM (\n%s\n) AS given) AS ids'
        ' WHERE ids.id IS NOT NULL', query);
BEGIN
    PERFORM tube_check_touch(shard, op, insert_chunk_size);
    IF coalesce(fetch_chunk_size, 0) < 1 THEN
        PERFORM tube_refuse('RT005', 'fetch_chunk_size is at least 1', 'the default is 20000');
    END IF;
    RETURN tube_insert_numbered(
        tubes, numbered, tube_path_text(path), shard, op, approx_size, fetch_chunk_size, insert_chunk_size);
EXCEPTION WHEN undefined_column THEN
    PERFORM tube_refuse('RT005', format('the query cannot be run: %s', SQLERRM),
        'it has to return columns called id and row_number');
END
$$;
COMMENT ON FUNCTION tube_pods_insert(text, text, integer, character, bigint, integer, integer, name[])
    IS 'Touches every id that a query returns';
