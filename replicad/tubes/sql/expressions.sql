-- The SQL that users give (predicates, routing), and the statements that put pods into a tube.

-- Predicates and routings run inside the triggers, with the rights of the triggers' owner. Their names are looked up in
-- the search_path of the user who set them, which is stored. Schemas in which everybody may create objects are left
-- out: there another user could create an operator that would be called instead of the intended one.

-- tube_safe_path(path): the schemas of path in which names of expressions may be looked up. Raises a NOTICE for each
-- schema that it leaves out. Writes nothing.
CREATE OR REPLACE FUNCTION tube_safe_path(path name[]) RETURNS name[]
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
{safe_path}$$;

-- tube_path_text(path): the search_path under which an expression runs. Writes nothing.
CREATE OR REPLACE FUNCTION tube_path_text(path name[]) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
{path_text}$$;

-- tube_where(VARIADIC predicates): their conjunction as the end of a WHERE clause; empty if all are NULL. Each is on
-- its own lines, so that a comment at its end hides nothing else. Writes nothing.
CREATE OR REPLACE FUNCTION tube_where(VARIADIC predicates text[]) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT coalesce(string_agg(E' AND (\n' || p || E'\n)', '' ORDER BY n), '')
    FROM unnest(predicates) WITH ORDINALITY AS given(p, n) WHERE p IS NOT NULL
$$;

-- tube_check_expression(tbl, what, expression, path): raises RT005 unless the expression gives one value per row of the
-- table: a boolean for what = 'predicate', an integer or smallint for 'routing'. Reads no row. Writes nothing. A lock that
-- is not had in time, or any other failure that says nothing about the expression, is raised as it is.
--
-- It is tried on what a trigger sees of a row. A transition table has no system columns, its rows have no type of their own,
-- and virtual generated columns are NULL in it. A query that is a table has the same limits; virtual columns are left out.
-- In a table with virtual columns, the whole row (which would lack them in silence) cannot be named either.
CREATE OR REPLACE FUNCTION tube_check_expression(tbl regclass, what text, expression text, path name[]) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    their_path text := tube_path_text(path);
    -- WHERE allows neither aggregates nor sets, and a number no OR behind a bracket that the expression closes. The
    -- alias is the one that the triggers use.
    row_seen text := (
        SELECT format('(SELECT %s FROM %s) AS %I',
            string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) FILTER (WHERE a.attgenerated <> 'v'),
            tube_qualified(tbl), CASE WHEN bool_or(a.attgenerated = 'v') THEN 'a row without virtual columns' ELSE 'tube_row' END)
        FROM pg_attribute a WHERE a.attrelid = tbl AND a.attnum > 0 AND NOT a.attisdropped);
    trial text := format(E'SELECT ''''::text FROM %s WHERE num_nulls(\n%s\n) = 2 LIMIT 0', row_seen, expression);
    typing text := format(E'SELECT pg_typeof((SELECT (\n%s\n) FROM %s LIMIT 0))::oid::text', expression, row_seen);
    remedy text := format('write SQL on the columns of %s alone, without system columns and virtual generated columns, which '
        'triggers do not see; names were looked up along %s', tbl, their_path);
    kind regtype;
    refusal text;
BEGIN
    IF expression IS NULL THEN
        RETURN;
    ELSIF btrim(expression) = '' THEN
        PERFORM tube_refuse('RT005', format('the %s for table %s is empty', what, tbl), 'leave it out, or say NULL');
    END IF;
    BEGIN
        PERFORM tube_as_owner(tbl, trial, their_path);
        kind := (SELECT named::oid::regtype FROM tube_as_owner(tbl, typing, their_path) AS named);
    EXCEPTION WHEN OTHERS THEN
        IF left(SQLSTATE, 2) IN ('08', '40', '53', '55', '57', '58', 'XX') THEN
            RAISE;  -- a lock, a deadlock, the disk: nothing is wrong with the expression
        END IF;
        refusal := SQLERRM;
    END;
    IF refusal IS NULL AND what = 'predicate' AND kind <> 'boolean'::regtype THEN
        refusal := format('it yields %s instead of boolean', kind);
    ELSIF refusal IS NULL AND what = 'routing' AND kind NOT IN ('integer'::regtype, 'smallint'::regtype) THEN
        refusal := format('it yields %s instead of integer', kind);
        remedy := format('cast it, for example ((%s) %% 1024)::integer', expression);
    END IF;
    IF refusal IS NOT NULL THEN
        PERFORM tube_refuse('RT005',
            format('the %s %L does not fit table %s: %s', what, expression, tbl, refusal), remedy);
    END IF;
END
$$;

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

-- tube_rows_sql(source, key, kind, predicate, routing): the query of the ids (and shards) of the rows of source that have a
-- key and pass the predicate.
CREATE OR REPLACE FUNCTION tube_rows_sql(source text, key name[], kind text, predicate text, routing text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT format('SELECT %s%s AS id FROM %s AS tube_row WHERE %s%s',
        E'(\n' || routing || E'\n)::integer AS tube_shard, ', tube_key_sql(key, kind), source, tube_key_present_sql(key),
        predicate)
$$;
