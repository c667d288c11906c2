-- stream_denied(s): what the role that asks may not read of a stream, with the GRANT that mends it; NULL where it may read
-- all. A role may have rights on single columns, so a table counts as denied where it may read none of them. A table that
-- is read as its owner needs no right on it; stream_reader_wanted says what else it needs. Row security counts too.
CREATE OR REPLACE FUNCTION stream_denied(s stream) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT string_agg(n.sentence, '. ' ORDER BY n.place)
    FROM (
        SELECT DISTINCT ON (c.relnamespace) 1 AS place, stream_denial(format('schema %I', ns.nspname),
            format('USAGE ON SCHEMA %I', ns.nspname)) AS sentence
        FROM pg_class c JOIN pg_namespace ns ON ns.oid = c.relnamespace
        WHERE c.oid IN (s.relation, s.sequence, s.positions) AND NOT has_schema_privilege(ns.oid, 'USAGE')
            AND stream_runs_as(c.oid) IS NULL
        UNION ALL
        SELECT 2, stream_denial(format('table %s', t), format('SELECT ON %s', t))
        FROM unnest(ARRAY[s.relation, s.positions]) t
        WHERE t IS NOT NULL AND NOT has_any_column_privilege(t, 'SELECT') AND stream_runs_as(t) IS NULL
        UNION ALL
        SELECT 3, stream_denial(format('sequence %s', s.sequence), format('SELECT ON SEQUENCE %s', s.sequence))
        WHERE NOT has_sequence_privilege(s.sequence, 'SELECT')
        UNION ALL
        SELECT 4, stream_hidden(t) FROM unnest(ARRAY[s.relation, s.positions]) t WHERE stream_hidden(t) IS NOT NULL
    ) n
$$;
