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

-- tube_few_sql(tube, op, rows, rows_before): the statement for the usual case: at most 16 rows of one shard become one
-- pod with one plain INSERT. For no rows, for more rows, and if rows_before (a query like rows, or NULL) returns other
-- ids, it inserts nothing and FOUND is false. Writes nothing itself.
CREATE OR REPLACE FUNCTION tube_few_sql(tube text, op text, rows text, rows_before text) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT tube_noted_sql(tube, format($sql$
        INSERT INTO %1$s (op, shard, ids)
        SELECT %2$s, TG_ARGV[0]::integer, few.ids
        FROM (SELECT ARRAY(%3$s LIMIT 17) AS ids%4$s OFFSET 0) AS few
        WHERE cardinality(few.ids) BETWEEN 1 AND 16%5$s;
        IF FOUND THEN
            RETURN NULL;
        END IF;
    $sql$, tube_relation(tube), op, rows,
        ', ARRAY(' || rows_before || ' LIMIT 17) AS ids_before',
        CASE WHEN rows_before IS NOT NULL THEN ' AND few.ids = few.ids_before' END))
$$;

-- tube_many_sql(tube, op, rows, rows_before, touched): the statements for what tube_few_sql leaves over: the ids of at
-- most a million rows of one shard are collected in one array, which is cut into pods of 250. For no rows in the
-- transition table `touched` the trigger function ends there. For more rows, and if rows_before returns other ids,
-- they insert nothing and the function goes on. Writes nothing itself.
--
-- This takes a quarter of the time of tube_insert_sql, which numbers, sorts and groups the rows, and which has no
-- bound. For a single row it takes a tenth more than tube_few_sql.
CREATE OR REPLACE FUNCTION tube_many_sql(tube text, op text, rows text, rows_before text, touched text) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT tube_noted_sql(tube, format($sql$
        INSERT INTO %1$s (op, shard, ids)
        SELECT %2$s, TG_ARGV[0]::integer, cut.ids[cut.k:cut.k + 249]
        FROM (
            SELECT many.ids, generate_series(1, cardinality(many.ids), 250) AS k
            FROM (SELECT ARRAY(%3$s LIMIT 1000001) AS ids%4$s OFFSET 0) AS many
            WHERE cardinality(many.ids) <= 1000000%5$s
        ) AS cut;
        IF FOUND OR NOT EXISTS (SELECT FROM %6$s) THEN
            RETURN NULL;
        END IF;
    $sql$, tube_relation(tube), op, rows,
        ', ARRAY(' || rows_before || ' LIMIT 1000001) AS ids_before',
        CASE WHEN rows_before IS NOT NULL THEN ' AND many.ids = many.ids_before' END, touched))
$$;

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
        ('UPDATE', 'U', rows_now, rows_either, rows_before, 'tube_new_rows'),
        ('INSERT', 'I', rows_now, rows_now, NULL, 'tube_new_rows'),
        ('DELETE', 'D', rows_before, rows_before, NULL, 'tube_old_rows')
    ) AS e (name, op, few, rows, few_before, touched) LOOP
        body := body || format(E'    IF TG_OP = %L THEN%s%s;\n        RETURN NULL;\n    END IF;\n',
            event.name,
            CASE WHEN routing IS NULL THEN
                tube_few_sql(tube, tube_op_sql(quote_literal(event.op)), event.few, event.few_before)
                || tube_many_sql(tube, tube_op_sql(quote_literal(event.op)), event.few, event.few_before, event.touched)
            END,
            tube_noted_sql(tube, tube_insert_sql(tube, tube_op_sql(quote_literal(event.op)), 'TG_ARGV[0]::integer',
                event.rows, routed => routing IS NOT NULL)));
    END LOOP;
    RETURN format(E'\n#variable_conflict use_column\nBEGIN\n%s    RETURN NULL;\nEND\n', body);
END
$outer$;
