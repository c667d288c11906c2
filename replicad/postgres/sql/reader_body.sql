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
        IF pg_catalog.concat_ws('|',
            pg_catalog.current_setting('row_security'), pg_catalog.current_setting('TimeZone'),
            pg_catalog.current_setting('DateStyle'), pg_catalog.current_setting('IntervalStyle'),
            pg_catalog.current_setting('extra_float_digits'), pg_catalog.current_setting('bytea_output'),
            pg_catalog.current_setting('xmlbinary'), pg_catalog.current_setting('lc_monetary'),
            pg_catalog.current_setting('lc_numeric'), pg_catalog.current_setting('lc_time'),
            pg_catalog.current_setting('xmloption'), pg_catalog.current_setting('timezone_abbreviations'),
            pg_catalog.current_setting('array_nulls'), pg_catalog.current_setting('transform_null_equals'),
            pg_catalog.current_setting('standard_conforming_strings'), pg_catalog.current_setting('backslash_quote'),
            pg_catalog.current_setting('quote_all_identifiers'), pg_catalog.current_setting('gin_fuzzy_search_limit')
        ) OPERATOR(pg_catalog.<>) 'off|UTC|ISO, MDY|postgres|1|hex|base64|C|C|C|content|Default|on|off|on|safe_encoding|off|0' THEN
            PERFORM pg_catalog.set_config(fixed.name, fixed.setting, true)
                FROM (VALUES
                    ('row_security', 'off'), ('TimeZone', 'UTC'), ('DateStyle', 'ISO, MDY'),
                    ('IntervalStyle', 'postgres'), ('extra_float_digits', '1'), ('bytea_output', 'hex'),
                    ('xmlbinary', 'base64'), ('lc_monetary', 'C'), ('lc_numeric', 'C'), ('lc_time', 'C'),
                    ('xmloption', 'content'), ('timezone_abbreviations', 'Default'), ('array_nulls', 'on'),
                    ('transform_null_equals', 'off'), ('standard_conforming_strings', 'on'),
                    ('backslash_quote', 'safe_encoding'), ('quote_all_identifiers', 'off'),
                    ('gin_fuzzy_search_limit', '0')
                ) AS fixed (name, setting);
        END IF;
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
