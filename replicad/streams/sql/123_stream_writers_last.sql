-- stream_writers_last(s, after): the writers of all rows above an id, each once. Reads these rows.
CREATE OR REPLACE FUNCTION stream_writers_last(s stream, after bigint) RETURNS SETOF text
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN QUERY SELECT stream_as_owner(s.relation, format('SELECT DISTINCT %I.stream_instance(%s) FROM %s AS t WHERE t.%I > %L',
        current_schema(), CASE WHEN s.instance_column IS NULL THEN 'NULL' ELSE format('t.%I::text COLLATE "C"',
        s.instance_column) END, stream_qualified(s.relation), s.id_column, after));
END
$$;
