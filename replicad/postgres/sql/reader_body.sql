DECLARE
    line pg_catalog.text;
    size pg_catalog.int8 := 0;
    guarded pg_catalog.bool := false;
    finished pg_catalog.bool := false;
    ending pg_catalog.text;
    sentence pg_catalog.text;
    more pg_catalog.text;
    advice pg_catalog.text;
    cancelled pg_catalog.text;
    prepared pg_catalog.text;
BEGIN
    BEGIN
        PERFORM pg_catalog.set_config('role', 'none', true);
    EXCEPTION WHEN insufficient_privilege THEN
        guarded := true;
    END;
    IF guarded AND CURRENT_USER OPERATOR(pg_catalog.=) (SELECT pg_catalog.pg_get_userbyid(c.relowner)
            FROM pg_catalog.pg_class AS c WHERE c.oid OPERATOR(pg_catalog.=) tbl) THEN
        NULL;
    ELSE
        RAISE EXCEPTION USING ERRCODE = 'RS006', MESSAGE = 'the table changed its owner, or its reader was altered',
            HINT = 'drop the function and run stream_reader_ensure';
    END IF;
    BEGIN
        SET LOCAL transaction_read_only = on;
        PERFORM pg_catalog.set_config('search_path', path, true);
        FOR line IN EXECUTE query LOOP
            RETURN NEXT line;
            size := size OPERATOR(pg_catalog.+) pg_catalog.octet_length(line);
            IF size OPERATOR(pg_catalog.>) bound THEN
                ending := '+';
                EXIT;
            END IF;
        END LOOP;
        finished := true;
        RAISE EXCEPTION USING ERRCODE = 'RS099', MESSAGE = 'roll back';
    EXCEPTION
        WHEN query_canceled OR assert_failure THEN
            cancelled := SQLSTATE;
            GET STACKED DIAGNOSTICS sentence = MESSAGE_TEXT;
        WHEN OTHERS THEN
            IF NOT finished THEN
                GET STACKED DIAGNOSTICS sentence = MESSAGE_TEXT, more = PG_EXCEPTION_DETAIL, advice = PG_EXCEPTION_HINT;
                ending := '!' OPERATOR(pg_catalog.||) pg_catalog.json_build_object('sqlstate', SQLSTATE,
                    'message', pg_catalog.left(sentence, 500), 'detail', pg_catalog.left(more, 300),
                    'hint', pg_catalog.left(advice, 300))::pg_catalog.text;
            END IF;
    END;
    FOR prepared IN SELECT p.name FROM pg_catalog.pg_prepared_statements AS p
        WHERE p.from_sql AND p.prepare_time OPERATOR(pg_catalog.>=) pg_catalog.statement_timestamp()
    LOOP
        EXECUTE 'DEALLOCATE ' OPERATOR(pg_catalog.||) pg_catalog.quote_ident(prepared);
    END LOOP;
    IF cancelled IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = cancelled, MESSAGE = sentence;
    END IF;
    IF ending IS NOT NULL THEN
        RETURN NEXT ending;
    END IF;
END
