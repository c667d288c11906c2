-- stream_add_bounded(..., max_row): stream_add with a bound on the length of lines, in bytes. Its own name: programs of
-- version 1 call stream_add with its eight arguments, and a second function of that name would make this ambiguous.
-- Raises RS002. Writes what stream_add writes.
CREATE OR REPLACE FUNCTION stream_add_bounded(
    name text, tbl regclass, id_column name, instance_column name, row_sql text, method text, positions regclass,
    sequence regclass, max_row bigint
) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    notes text[] := stream_add(name, tbl, id_column, instance_column, row_sql, method, positions, sequence);
BEGIN
    PERFORM stream_max_row(name, max_row);
    RETURN notes;
END
$$;
COMMENT ON FUNCTION stream_add_bounded(text, regclass, name, name, text, text, regclass, regclass, bigint)
    IS 'Makes a table a stream, with a bound on the length of its lines';
