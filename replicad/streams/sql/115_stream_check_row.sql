-- stream_check_row(tbl, id_column, row_sql): tries a row expression on no row and on the newest hundred, as reading
-- will. Returns what it yields: json, jsonb or text. Raises RS002. Names in it are looked up as a new session looks
-- them up.
CREATE OR REPLACE FUNCTION stream_check_row(tbl regclass, id_column name, row_sql text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    kind text;
    probe text;
    failure text;
    target text := stream_qualified(tbl);
BEGIN
    IF row_sql IS NULL THEN
        RETURN 'json';
    END IF;
    PERFORM stream_reader_ensure(tbl);
    BEGIN
        kind := stream_as_owner(tbl, format(E'SELECT pg_typeof((SELECT (%s\n) FROM %s AS t LIMIT 0))::text', row_sql, target));
        -- The id beside it and the coalesce refuse aggregates and functions that return sets, as reading would.
        FOR probe IN SELECT stream_as_owner(tbl, format(E'SELECT line FROM (SELECT t.%I, coalesce((%s\n)::text, ''null'')'
            ' FROM %s AS t ORDER BY 1 DESC LIMIT 100) q(id, line)', id_column, row_sql, target))
        LOOP
            PERFORM CASE WHEN kind NOT IN ('json', 'jsonb') THEN probe::json END;
        END LOOP;
    EXCEPTION WHEN OTHERS THEN
        failure := SQLERRM;
    END;
    IF kind IS NOT NULL AND kind NOT IN ('json', 'jsonb', 'text', 'character varying') THEN
        PERFORM stream_refuse(format('the row expression yields %s, not JSON', kind),
            format('wrap it: to_jsonb(%s)', row_sql));
    ELSIF failure IS NOT NULL THEN
        PERFORM stream_refuse(format('the row expression fails: %s', failure), 'it is one SQL expression that yields '
            'JSON from the columns of the table, which is called t: jsonb_build_array(t.a, t.b)');
    END IF;
    RETURN CASE WHEN kind IN ('json', 'jsonb') THEN kind ELSE 'text' END;
END
$$;
