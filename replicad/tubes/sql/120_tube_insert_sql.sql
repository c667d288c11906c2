-- tube_insert_sql(tube, op, shard, rows, chunk, routed): the statement that turns any number of rows into pods of at
-- most chunk ids, in the order of the rows. op, shard and chunk are SQL. rows is a query that returns id and, if
-- routed, tube_shard: shard replaces a NULL, and the sign bit of a negative number is cleared. Writes nothing itself.
CREATE OR REPLACE FUNCTION tube_insert_sql(
    tube text, op text, shard text, rows text, chunk text = '250', routed boolean = false
) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN routed THEN format($sql$
        INSERT INTO %1$s (op, shard, ids)
        SELECT %2$s, placed.shard, array_agg(placed.id ORDER BY placed.n)
        FROM (
            SELECT numbered.shard, numbered.id,
                row_number() OVER (PARTITION BY numbered.shard ORDER BY numbered.n) - 1 AS n
            FROM (
                SELECT coalesce(touched.tube_shard, %3$s) & 2147483647 AS shard, touched.id, row_number() OVER () AS n
                FROM (%4$s) AS touched
            ) AS numbered
        ) AS placed
        GROUP BY placed.shard, placed.n / %5$s ORDER BY placed.shard, placed.n / %5$s
    $sql$, tube_relation(tube), op, shard, rows, chunk)
    ELSE format($sql$
        INSERT INTO %1$s (op, shard, ids)
        SELECT %2$s, %3$s, array_agg(numbered.id ORDER BY numbered.n)
        FROM (SELECT touched.id, row_number() OVER () - 1 AS n FROM (%4$s) AS touched) AS numbered
        GROUP BY numbered.n / %5$s ORDER BY numbered.n / %5$s
    $sql$, tube_relation(tube), op, shard, rows, chunk)
    END
$$;

-- tube_op_sql(op): SQL for the operation of a pod: op, or B in a session whose application_name contains "backfill".
CREATE OR REPLACE FUNCTION tube_op_sql(op text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT format(
        'CASE WHEN strpos(current_setting(''application_name''), ''backfill'') > 0 THEN ''B'' ELSE %s END', op)
$$;

-- tube_rows_sql(source, predicate, routing): the query of the ids (and shards) of the rows of source that pass the
-- predicate.
CREATE OR REPLACE FUNCTION tube_rows_sql(source text, predicate text, routing text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT format('SELECT %sid::bigint AS id FROM %s AS tube_row WHERE id IS NOT NULL%s',
        E'(\n' || routing || E'\n)::integer AS tube_shard, ', source, predicate)
$$;
