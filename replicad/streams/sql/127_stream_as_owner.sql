-- stream_as_owner(tbl, query): the rows of a query on this table, whose one column is text, run as the table's owner (see
-- stream_reader_ensure), or as the asking role where stream_runs_as() says so. Raises what the query raises.
CREATE OR REPLACE FUNCTION stream_as_owner(tbl regclass, query text) RETURNS SETOF text
LANGUAGE plpgsql SET row_security = off AS $$
DECLARE
    owner oid := stream_runs_as(tbl);
    path text := (SELECT s.reset_val FROM pg_settings s WHERE s.name = 'search_path');
    reader text;
    line text;
    failure json;
BEGIN
    IF owner IS NULL THEN
        PERFORM set_config('search_path', path, true);
        RETURN QUERY EXECUTE query;
        RETURN;
    END IF;
    PERFORM stream_reader_ensure(tbl);
    reader := stream_reader(owner);
    FOR line IN EXECUTE format('SELECT * FROM %s($1, $2, $3, $4)', reader)
        USING tbl::oid, query, path, 9223372036854775807
    LOOP
        IF line LIKE '!%' THEN
            failure := substr(line, 2);
            RAISE EXCEPTION USING ERRCODE = failure ->> 'sqlstate', MESSAGE = failure ->> 'message',
                DETAIL = failure ->> 'detail', HINT = failure ->> 'hint';
        END IF;
        RETURN NEXT line;
    END LOOP;
END
$$;
