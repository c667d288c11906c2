-- tube_noted_sql(tube, insertion): an INSERT of a trigger function with a comment. Writes nothing itself.
-- A column that the statement names may be renamed, dropped or get another type. Then each write of the table fails, and
-- Postgres shows the statement. So whoever writes learns what to do. A write that succeeds pays nothing for it; a block
-- with EXCEPTION would cost each of them a subtransaction.
CREATE OR REPLACE FUNCTION tube_noted_sql(tube text, insertion text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT E'\n        INSERT ' || format(
        '/* This records this write in tube %1$s of replicad. If it fails, a column of the table was renamed, dropped or '
        'has another type. Attach the table again with a --predicate and --routing that fit: replicad tubes attach %1$s '
        'TABLE; or stop recording it: replicad tubes detach %1$s TABLE */',
        replace(replace(tube, '*/', '* /'), '/*', '/ *'))  -- comments nest
        || substr(ltrim(insertion, E' \n'), length('INSERT') + 1)
$$;
COMMENT ON FUNCTION tube_noted_sql(text, text) IS 'An INSERT of a trigger function with a comment for error messages';

-- tube_few_sql(tube, op, rows, rows_before): the statement for the usual case: at most 250 rows of one shard become one
-- pod with one plain INSERT. For no rows, for more rows, and if rows_before (a query like rows, or NULL) returns other
-- ids, it inserts nothing and FOUND is false. Writes nothing itself.
CREATE OR REPLACE FUNCTION tube_few_sql(tube text, op text, rows text, rows_before text) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT tube_noted_sql(tube, format($sql$
        INSERT INTO %1$s (op, shard, ids)
        SELECT %2$s, TG_ARGV[0]::integer, few.ids
        FROM (SELECT ARRAY(%3$s LIMIT 251) AS ids%4$s OFFSET 0) AS few
        WHERE cardinality(few.ids) BETWEEN 1 AND 250%5$s;
        IF FOUND THEN
            RETURN NULL;
        END IF;
    $sql$, tube_relation(tube), op, rows,
        ', ARRAY(' || rows_before || ' LIMIT 251) AS ids_before',
        CASE WHEN rows_before IS NOT NULL THEN ' AND few.ids = few.ids_before' END))
$$;
COMMENT ON FUNCTION tube_few_sql(text, text, text, text) IS 'The statement that turns a few rows into one pod';

-- tube_trigger_body(tube, predicate, routing): the source of the trigger function that inserts pods for the rows of a
-- statement. predicate is the result of tube_where. The function gets the shard as its argument. Writes nothing itself.
--
-- An update touches the new rows. If a row no longer passes the predicate, or has another shard or id, the old row is
-- touched too, because the downstream must delete it.
-- variable_conflict use_column: a column of the table may have the name of a variable.
CREATE OR REPLACE FUNCTION tube_trigger_body(tube text, predicate text, routing text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $outer$
DECLARE
    rows_now text := tube_rows_sql('tube_new_rows', predicate, routing);
    rows_before text := tube_rows_sql('tube_old_rows', predicate, routing);
    rows_either text := format('(%1$s) UNION ALL ((%2$s) EXCEPT (%1$s))', rows_now, rows_before);
    event record;
    body text := '';
BEGIN
    FOR event IN SELECT * FROM (VALUES
        ('INSERT', 'I', rows_now, rows_now, NULL),
        ('UPDATE', 'U', rows_now, rows_either, rows_before),
        ('DELETE', 'D', rows_before, rows_before, NULL)
    ) AS e (name, op, few, rows, few_before) LOOP
        body := body || format(E'    IF TG_OP = %L THEN%s%s;\n        RETURN NULL;\n    END IF;\n',
            event.name,
            CASE WHEN routing IS NULL THEN
                tube_few_sql(tube, tube_op_sql(quote_literal(event.op)), event.few, event.few_before) END,
            tube_noted_sql(tube, tube_insert_sql(tube, tube_op_sql(quote_literal(event.op)), 'TG_ARGV[0]::integer',
                event.rows, routed => routing IS NOT NULL)));
    END LOOP;
    RETURN format(E'\n#variable_conflict use_column\nBEGIN\n%s    RETURN NULL;\nEND\n', body);
END
$outer$;
COMMENT ON FUNCTION tube_trigger_body(text, text, text) IS 'The source of a tube''s trigger function';
