-- tube_few_sql(tube, op, rows, rows_before): the statement that touches the usual few: at most 250 rows of one shard as
-- one pod, in one plain INSERT. It does nothing, and says so in FOUND, for none, for more, and where rows_before (a
-- query like rows, or NULL) yields other ids. Writes nothing itself.
CREATE OR REPLACE FUNCTION tube_few_sql(tube text, op text, rows text, rows_before text) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT format($sql$
        INSERT INTO %1$s (op, shard, ids)
        SELECT %2$s, TG_ARGV[0]::integer, few.ids
        FROM (SELECT ARRAY(%3$s LIMIT 251) AS ids%4$s OFFSET 0) AS few
        WHERE cardinality(few.ids) BETWEEN 1 AND 250%5$s;
        IF FOUND THEN
            RETURN NULL;
        END IF;
    $sql$, tube_relation(tube), op, rows,
        ', ARRAY(' || rows_before || ' LIMIT 251) AS ids_before',
        CASE WHEN rows_before IS NOT NULL THEN ' AND few.ids = few.ids_before' END)
$$;
COMMENT ON FUNCTION tube_few_sql(text, text, text, text) IS 'The statement that turns a few rows into one pod';

-- tube_trigger_body(tube, predicate, routing): the source of the trigger function that touches tube for a statement's
-- rows. predicate is what tube_where yields. The function gets the shard as its argument. Writes nothing itself.
--
-- An update touches the rows as they are and, where a row left the predicate, its shard or its id, the row as it was:
-- the downstream has to hear of that too.
-- Names of columns come first (variable_conflict): a table may have columns called like variables of the language.
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
            tube_insert_sql(tube, tube_op_sql(quote_literal(event.op)), 'TG_ARGV[0]::integer', event.rows,
                routed => routing IS NOT NULL));
    END LOOP;
    RETURN format(E'\n#variable_conflict use_column\nBEGIN\n%s    RETURN NULL;\nEND\n', body);
END
$outer$;
COMMENT ON FUNCTION tube_trigger_body(text, text, text) IS 'The source of a tube''s trigger function';
