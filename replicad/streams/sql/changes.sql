-- Streams of changes: triggers write each change of a table into a table of ours, which is a stream like any other.
-- docs/changes.md explains it.
--
-- The triggers run once per statement and read its transition tables change_new and change_old. One function per stream
-- serves all events and all partitions. It has the statements of one shape of the table (stream_shape_now); where the
-- table has another shape, it has stream_change_sql make them anew for each write, until stream_changes_ensure renews it.

-- stream_fixed(): the settings under which values become text (replicad/fixed_settings.py), as pg_proc.proconfig has them.
CREATE OR REPLACE FUNCTION stream_fixed() RETURNS text[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY[{fixed_settings}]
$$;

-- stream_path_text(path): the search_path under which an expression runs.
CREATE OR REPLACE FUNCTION stream_path_text(path name[]) RETURNS text
LANGUAGE sql STABLE AS $$
{path_text}$$;

-- stream_safe_path(path): the schemas of path in which names of expressions may be looked up. Raises a NOTICE for each
-- schema that it leaves out.
CREATE OR REPLACE FUNCTION stream_safe_path(path name[]) RETURNS name[]
LANGUAGE plpgsql STABLE AS $$
{safe_path}$$;

-- stream_key_types(tbl, key): the types of these columns, as casts name them; of a domain the type below it. NULL for a
-- column that the table does not have.
CREATE OR REPLACE FUNCTION stream_key_types(tbl regclass, key name[]) RETURNS text[]
LANGUAGE plpgsql STABLE AS $$
{key_types}$$;

-- stream_belong(what): gives `TABLE name` to the owner of this schema, whoever made it. Does nothing for a role that may not.
CREATE OR REPLACE FUNCTION stream_belong(what text) RETURNS void
LANGUAGE plpgsql AS $$
{belong}$$;

-- stream_columns(tbl, numbers): the names of these columns in the order of the numbers. NULL: all columns in their order,
-- without virtual generated columns, which triggers do not see. Numbers of dropped columns are left out.
CREATE OR REPLACE FUNCTION stream_columns(tbl regclass, numbers smallint[]) RETURNS name[]
LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(a.attname ORDER BY coalesce(n.place, a.attnum)), '{}')
    FROM pg_attribute a LEFT JOIN unnest(numbers) WITH ORDINALITY AS n (number, place) ON n.number = a.attnum
    WHERE a.attrelid = tbl AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> 'v'
        AND (numbers IS NULL OR n.number IS NOT NULL)
$$;

-- stream_filter_columns(c): the names of the filters of a stream of changes, each at the place of its number. NULL for one whose
-- column was dropped: its number stays its own, since old changes have its values.
CREATE OR REPLACE FUNCTION stream_filter_columns(c stream_changes) RETURNS name[]
LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(a.attname ORDER BY f.n), '{}')
    FROM unnest(c.filters) WITH ORDINALITY AS f (number, n)
        LEFT JOIN pg_attribute a ON a.attrelid = c.source AND a.attnum = f.number AND NOT a.attisdropped
$$;

-- stream_column_numbers(tbl, columns): their numbers, in the order given; NULL for NULL. Raises RS002 for a column that the
-- table does not have, that is named twice, or that is a virtual generated column.
CREATE OR REPLACE FUNCTION stream_column_numbers(tbl regclass, columns name[]) RETURNS smallint[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    wanted name;
    found smallint[] := '{}';
    number smallint;
BEGIN
    IF columns IS NULL THEN
        RETURN NULL;
    END IF;
    FOREACH wanted IN ARRAY columns LOOP
        PERFORM stream_column_type(tbl, wanted);
        SELECT a.attnum INTO number FROM pg_attribute a WHERE a.attrelid = tbl AND a.attname = wanted AND a.attgenerated <> 'v';
        PERFORM stream_refuse(format('column %I of %s is a virtual generated column, which triggers do not see', wanted, tbl),
            'leave it out, or make it STORED') WHERE number IS NULL;
        PERFORM stream_refuse(format('column %I is named twice', wanted), 'name it once') WHERE number = ANY (found);
        found := found || number;
    END LOOP;
    RETURN found;
END
$$;

-- stream_shape_seen(tbl): the shape of a table: a number that changes when a column is added, dropped or renamed, or gets
-- another type, or when the order of the partition's columns differs. As the snapshot of the transaction sees it.
CREATE OR REPLACE FUNCTION stream_shape_seen(tbl oid) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT hashtextextended(coalesce(string_agg(concat_ws(' ', a.attnum, a.attname, a.atttypid, a.atttypmod, a.attgenerated),
        E'\n' ORDER BY a.attnum), ''), 0)
    FROM pg_attribute a WHERE a.attrelid = tbl AND a.attnum > 0 AND NOT a.attisdropped
$$;

-- stream_shape_now(tbl): the same, computed when the statement is planned: a statement on the transition tables of tbl is
-- planned again after each ALTER TABLE of it, so that the trigger pays nothing for the comparison. It is therefore declared
-- IMMUTABLE. Only right at READ COMMITTED, where the snapshot of the planning sees what has replaced the plan.
CREATE OR REPLACE FUNCTION stream_shape_now(tbl oid) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT hashtextextended(coalesce(string_agg(concat_ws(' ', a.attnum, a.attname, a.atttypid, a.atttypmod, a.attgenerated),
        E'\n' ORDER BY a.attnum), ''), 0)
    FROM pg_attribute a WHERE a.attrelid = tbl AND a.attnum > 0 AND NOT a.attisdropped
$$;

-- stream_shape_text(c): what the line that describes a shape says: table, key, and the columns that rows have, with their types.
CREATE OR REPLACE FUNCTION stream_shape_text(c stream_changes) RETURNS json
LANGUAGE sql STABLE AS $$
    SELECT json_build_object('table', stream_qualified(c.source), 'key', stream_columns(c.source, c.key), 'columns', (
        SELECT json_agg(json_build_object('name', n.name, 'type', format_type(a.atttypid, a.atttypmod)) ORDER BY n.place)
        FROM unnest(stream_columns(c.source, c.columns)) WITH ORDINALITY AS n (name, place)
            JOIN pg_attribute a ON a.attrelid = c.source AND a.attname = n.name))
$$;

-- stream_change_line_sql(): the row expression of a stream of changes.
CREATE OR REPLACE FUNCTION stream_change_line_sql() RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT $sql$'{"op":"' || t.op::text || '"' || coalesce(',"key":' || t.key, '') || coalesce(',"row":' || t."row", '') || coalesce(',"old":' || t.old, '') || ',"schema":' || t.schema || ',"xid":' || t.xid || ',"at":' || to_json(t.at) || '}'$sql$
$$;

-- stream_shape_ensure(number): the number of the table's present shape, for the changes of this stream. A shape that is new gets
-- the next number and a line (op s) that describes it. Transactions that meet a new shape at the same time do so each: all
-- find the same number, since no shape can change while one of them is open, and none waits for another. So the line
-- may come more than once. Writes stream_shape and the table of changes.
CREATE OR REPLACE FUNCTION stream_shape_ensure(stream_number integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET timezone = 'UTC' AS $$
DECLARE
    c stream_changes;
    latest stream_shape;
    seen bigint;
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = stream_number;
    seen := stream_shape_seen(c.source);
    SELECT * INTO latest FROM stream_shape h WHERE h.stream = stream_number ORDER BY h.number DESC LIMIT 1;
    IF latest.shape IS DISTINCT FROM seen THEN
        latest.number := coalesce(latest.number, 0) + 1;
        EXECUTE format('INSERT INTO change_%s AS t (op, "row", schema) VALUES (''s'', $1, $2) RETURNING t.id, %s', stream_number,
            stream_change_line_sql()) INTO latest.since, latest.line USING stream_shape_text(c), latest.number;
        INSERT INTO stream_shape (stream, number, shape, since, line) VALUES (stream_number, latest.number, seen, latest.since, latest.line);
    END IF;
    RETURN latest.number;
END
$$;

-- stream_change_key(key, alias): SQL for the key of a row as JSON: the value, or an array of the values.
CREATE OR REPLACE FUNCTION stream_change_key(key name[], alias text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT format(CASE cardinality(key) WHEN 1 THEN 'to_json(%s)' ELSE 'json_build_array(%s)' END,
        (SELECT string_agg(format('%s.%I', alias, k.name), ', ' ORDER BY k.n) FROM unnest(key) WITH ORDINALITY AS k (name, n)))
$$;

-- stream_change_plain(tbl, columns): how much the JSON of these columns depends on: 'nothing', 'zone' (the time zone), or
-- 'settings'. The type of an element counts for an array.
CREATE OR REPLACE FUNCTION stream_change_plain(tbl regclass, columns name[]) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE max(CASE
            WHEN coalesce(nullif(t.typelem, 0), t.oid) IN ('bool'::regtype, 'int2'::regtype, 'int4'::regtype, 'int8'::regtype,
                'text'::regtype, 'varchar'::regtype, 'bpchar'::regtype, 'numeric'::regtype, 'uuid'::regtype, 'jsonb'::regtype,
                'date'::regtype, 'timestamp'::regtype, 'oid'::regtype) THEN 0
            WHEN coalesce(nullif(t.typelem, 0), t.oid) = 'timestamptz'::regtype THEN 1
            ELSE 2 END)
        WHEN 0 THEN 'nothing' WHEN 1 THEN 'zone' ELSE 'settings' END
    FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = tbl AND a.attname = ANY (columns) AND NOT a.attisdropped
$$;

-- stream_change_from(c, source, extra): the query of key, data (the row as JSON) and the filters' values of the rows of
-- source (SQL; its alias is t) that pass the predicate. extra: SQL for more columns. The columns of the table are named without t,
-- so that stream_change_usual can offer others of these names; the key is in the row, and is taken from there.
CREATE OR REPLACE FUNCTION stream_change_from(c stream_changes, source text, extra text = '') RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    key name[] := stream_columns(c.source, c.key);
    columns name[] := stream_columns(c.source, c.columns);
    -- a value of type json, or of a type of users, may contain line ends
    one_line boolean := NOT EXISTS (
        SELECT FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
        LEFT JOIN pg_type e ON e.oid = coalesce(nullif(t.typelem, 0), t.oid)
        WHERE a.attrelid = c.source AND a.attname = ANY (columns || key) AND NOT a.attisdropped
            AND (e.typnamespace <> 'pg_catalog'::regnamespace OR e.oid = 'json'::regtype));
    wrapped text := CASE WHEN one_line THEN '%s' ELSE 'replace(replace((%s)::text, E''\n'', '' ''), E''\r'', '' '')::json' END;
BEGIN
    IF cardinality(key) < cardinality(c.key) THEN
        PERFORM stream_refuse(format('a column of the key of %s was dropped, so its changes cannot be recorded in stream %s of replicad',
            c.source, (SELECT s.name FROM stream s WHERE s.number = c.stream)),
            'remove the stream: replicad streams remove NAME; and add it again');
    END IF;
    RETURN format(E'SELECT %s AS key, %s AS data%s%s FROM %s AS t, LATERAL (SELECT %s) AS r WHERE true%s',
        format(wrapped, stream_change_key(key, 'r')), format(wrapped, 'row_to_json(r.*)'),  -- r alone may be a column
        (SELECT string_agg(format(', %s::text AS by_%s', CASE WHEN f.name IS NULL THEN 'NULL' WHEN f.name = ANY (columns) THEN format('r.%I', f.name)
                ELSE quote_ident(f.name) END, f.n), '' ORDER BY f.n)
            FROM unnest(stream_filter_columns(c)) WITH ORDINALITY AS f (name, n)),
        extra, source,
        (SELECT string_agg(quote_ident(n.name), ', ' ORDER BY n.place) FROM unnest(columns) WITH ORDINALITY AS n (name, place)),
        CASE WHEN c.predicate IS NOT NULL THEN format(E' AND (\n%s\n)', c.predicate) END);
END
$$;

-- stream_change_large(c): the columns that --unchanged omit may leave out: their values can be long.
CREATE OR REPLACE FUNCTION stream_change_large(c stream_changes) RETURNS name[]
LANGUAGE sql STABLE AS $$
    SELECT ARRAY(
        SELECT n.name FROM unnest(stream_columns(c.source, c.columns)) WITH ORDINALITY AS n (name, place)
            JOIN pg_attribute a ON a.attrelid = c.source AND a.attname = n.name
        WHERE c.omit AND a.attlen = -1 AND a.attstorage IN ('x', 'e') AND a.attnum <> ALL (c.key)
        ORDER BY n.place)
$$;

-- stream_change_same(c, one, other): SQL for whether two rows are the same for all readers: the same key, as text, and the same
-- values of the filters. A row that gets another value of a filter is deleted for the readers of the one and inserted for
-- those of the other.
CREATE OR REPLACE FUNCTION stream_change_same(c stream_changes, one text, other text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN cardinality(c.filters) = 0 THEN format('%s.key::text = %s.key::text', one, other)
        ELSE (SELECT format('json_build_array(%1$s.key, %2$s)::text = json_build_array(%3$s.key, %4$s)::text', one,
                string_agg(format('%s.by_%s', one, f), ', ' ORDER BY f), other, string_agg(format('%s.by_%s', other, f), ', ' ORDER BY f))
            FROM generate_series(1, cardinality(c.filters)) AS f) END
$$;

-- stream_change_update(c): the query of the changes of an UPDATE: op, key, data, before, and the filters' values. An old and
-- a new row belong together as stream_change_same says; a key that only one of them has was changed. A column
-- that is large and has not changed is left out of data, where the stream wants that.
CREATE OR REPLACE FUNCTION stream_change_update(c stream_changes) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    large name[] := stream_change_large(c);
    small stream_changes := c;
    news text;
    olds text;
    data text := 'n.data';
    filters text := coalesce((SELECT string_agg(format(', coalesce(n.by_%s, o.by_%1$s)', f), '' ORDER BY f)
        FROM generate_series(1, cardinality(c.filters)) AS f), '');
BEGIN
    IF large = '{}' THEN
        news := stream_change_from(c, 'change_new');
        olds := stream_change_from(c, 'change_old');
    ELSE
        small.columns := stream_column_numbers(c.source, ARRAY(
            SELECT n.name FROM unnest(stream_columns(c.source, c.columns)) WITH ORDINALITY AS n (name, place)
            WHERE n.name <> ALL (large) ORDER BY n.place));
        news := stream_change_from(small, 'change_new', (SELECT string_agg(format(', t.%I AS large_%s', l.name, l.n), '' ORDER BY l.n)
            FROM unnest(large) WITH ORDINALITY AS l (name, n)));
        olds := stream_change_from(c, 'change_old', (SELECT string_agg(format(', t.%I AS large_%s', l.name, l.n), '' ORDER BY l.n)
            FROM unnest(large) WITH ORDINALITY AS l (name, n)));
        SELECT format('CASE WHEN n.key IS NOT NULL THEN (left(n.data::text, -1)%s || ''}'')::json END', string_agg(format(
            ' || CASE WHEN o.key IS NOT NULL AND pg_column_size(n.large_%s) >= 256 AND record_image_eq(ROW(n.large_%1$s), '
            'ROW(o.large_%1$s)) THEN '''' ELSE concat(%L, coalesce(to_json(n.large_%1$s)::text, ''null'')) END',
            l.n, format(',%s:', to_json(l.name::text))), '' ORDER BY l.n))
            INTO data FROM unnest(large) WITH ORDINALITY AS l (name, n);
        IF position('E''\n''' IN olds) > 0 THEN
            data := format('replace(replace((%s)::text, E''\n'', '' ''), E''\r'', '' '')::json', data);
        END IF;
    END IF;
    RETURN format('SELECT CASE WHEN n.key IS NULL THEN ''d'' WHEN o.key IS NULL THEN ''i'' ELSE ''u'' END, coalesce(n.key, o.key), %s, '
        '%s%s FROM (%s) AS n FULL JOIN (%s) AS o ON %s%s', data, CASE WHEN c.old THEN 'o.data' ELSE 'NULL::json' END,
        filters, news, olds, stream_change_same(c, 'n', 'o'),
        CASE WHEN cardinality(c.filters) > 0 THEN ' ORDER BY n.key IS NOT NULL' END);  -- before a row is inserted, it is deleted

END
$$;

-- stream_change_usual(c, event): the query of the changes of a statement as nearly all are: at READ COMMITTED, with nothing between its writes and
-- its trigger (see stream_change_mixed), on a table that has its present shape, and, if it is an UPDATE, of at most 10,000 rows with the keys and the
-- values of filters that they had. For any other statement it returns nothing, and it fails for none. So one query
-- both checks and records, and a single row costs a sixth less than with a check before it. NULL where the stream needs the old
-- rows of an UPDATE, and where it has a predicate, which may fail on another shape.
--
-- `gone` has the names of all columns: one that the table has no more is found there, and the comparison of the shapes
-- decides. Keys are compared as they are stored, since values that are equal may have different texts.
CREATE OR REPLACE FUNCTION stream_change_usual(c stream_changes, event text) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    columns name[] := stream_columns(c.source, c.columns);
    filters name[] := array_remove(stream_filter_columns(c), NULL);
    same text;  -- SQL for what may not change
BEGIN
    IF c.predicate IS NOT NULL OR event = 'UPDATE' AND (c.old OR stream_change_large(c) <> '{}') THEN
        RETURN NULL;
    END IF;
    SELECT CASE WHEN count(*) = 1 AND bool_and(a.atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'uuid'::regtype, 'text'::regtype))
            THEN min(quote_ident(a.attname)) ELSE format('ROW(%s)', string_agg(quote_ident(a.attname), ', ')) END
        INTO same FROM pg_attribute a
        WHERE a.attrelid = c.source AND (a.attnum = ANY (c.key) OR a.attname = ANY (filters)) AND NOT a.attisdropped;
    RETURN format('SELECT %L::"char", n.key, %s, %s%s FROM (SELECT %s) AS gone, LATERAL (%s AND %I.stream_shape_now(%s::oid) = %L::bigint '
            'AND current_setting(''replicad.change_%s'', true) IS DISTINCT FROM extract(epoch FROM statement_timestamp())::text '
            'AND current_setting(''transaction_isolation'') = ''read committed''%s) AS n',
        CASE event WHEN 'INSERT' THEN 'i' WHEN 'UPDATE' THEN 'u' ELSE 'd' END,
        CASE WHEN event = 'DELETE' THEN 'NULL::json' ELSE 'n.data' END, CASE WHEN event = 'DELETE' AND c.old THEN 'n.data' ELSE 'NULL::json' END,
        (SELECT string_agg(format(', n.by_%s', f), '' ORDER BY f) FROM generate_series(1, cardinality(c.filters)) AS f),
        (SELECT string_agg(DISTINCT format('NULL::text AS %I', x.name), ', ') FROM unnest(columns || filters) AS x (name)),
        stream_change_from(c, CASE WHEN event = 'DELETE' THEN 'change_old' ELSE 'change_new' END),
        current_schema(), c.source::oid, stream_shape_seen(c.source), c.stream,
        CASE WHEN event = 'UPDATE' THEN format(' AND record_image_eq(ROW(ARRAY(SELECT %1$s FROM change_new LIMIT 10001)), '
            'ROW(ARRAY(SELECT %1$s FROM change_old LIMIT 10000)))', same) END);  -- of more rows the arrays have different lengths
END
$$;

-- stream_change_mixed(c, event): the query of the changes of a statement where other statements on the same table may have
-- run between its writes and its trigger: in a trigger or function that it called, or as another part of it. Its rows may
-- have changed again since, and been recorded already. So what is recorded now is the present row of each key that it
-- touched, or that there is none.
CREATE OR REPLACE FUNCTION stream_change_mixed(c stream_changes, event text) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    key name[] := stream_columns(c.source, c.key);
    keys text := (SELECT string_agg(format(', t.%I AS key_%s', k.name, k.n), '' ORDER BY k.n)
        FROM unnest(key) WITH ORDINALITY AS k (name, n));
    filters text := coalesce((SELECT string_agg(format(', CASE WHEN v.n = 1 THEN k.by_%s ELSE p.by_%1$s END', f), '' ORDER BY f)
        FROM generate_series(1, cardinality(c.filters)) AS f), '');
    news text := CASE WHEN event <> 'DELETE' THEN stream_change_from(c, 'change_new', ', false AS present' || keys) END;
    olds text := CASE WHEN event <> 'INSERT' THEN stream_change_from(c, 'change_old', ', true AS present' || keys) END;
    here text := stream_change_from(c, stream_qualified(c.source)) || (
        SELECT string_agg(format(' AND t.%I = k.key_%s', x.name, x.n), '' ORDER BY x.n) FROM unnest(key) WITH ORDINALITY AS x (name, n));
BEGIN
    RETURN format('SELECT CASE WHEN v.n = 1 THEN ''d'' WHEN k.present AND %1$s THEN ''u'' ELSE ''i'' END, k.key, '
        'CASE WHEN v.n = 2 THEN p.data END, %2$s%3$s '
        'FROM (SELECT DISTINCT ON (e.key::text) e.* FROM (%4$s) AS e ORDER BY e.key::text, e.present DESC) AS k '
        'LEFT JOIN LATERAL (%5$s) AS p ON p.key::text = k.key::text CROSS JOIN (VALUES (1), (2)) AS v (n) '
        'WHERE CASE v.n WHEN 1 THEN p.key IS NULL OR k.present AND NOT (%1$s) ELSE p.key IS NOT NULL END ORDER BY v.n',
        stream_change_same(c, 'k', 'p'), CASE WHEN c.old THEN format('CASE WHEN k.present AND (v.n = 1 OR %s) THEN k.data END',
            stream_change_same(c, 'k', 'p')) ELSE 'NULL::json' END, filters,  -- who gets an insert does not get another's row
        concat_ws(' UNION ALL ', news, olds), here);
END
$$;

-- stream_change_sql(number, event, mixed, shape): the statement of a trigger that records the changes of an event (TG_OP), in the
-- present shape of the table, whose number is `shape`. mixed: as stream_change_mixed has it; usual: as stream_change_usual has it, which may be NULL.
-- Raises RS002 where the key is gone.
CREATE OR REPLACE FUNCTION stream_change_sql(stream_number integer, event text, mixed boolean, shape integer, usual boolean = false) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    c stream_changes;
    filters int[];
    query text;
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = stream_number;
    filters := ARRAY(SELECT generate_series(1, cardinality(c.filters)));
    query := CASE
        WHEN usual THEN stream_change_usual(c, event)
        WHEN mixed THEN stream_change_mixed(c, event)
        WHEN event = 'UPDATE' THEN stream_change_update(c)
        WHEN event = 'INSERT' THEN format('SELECT ''i'', n.key, n.data, NULL::json%s FROM (%s) AS n',
            (SELECT string_agg(format(', n.by_%s', f), '' ORDER BY f) FROM unnest(filters) AS f), stream_change_from(c, 'change_new'))
        ELSE format('SELECT ''d'', o.key, NULL::json, %s%s FROM (%s) AS o', CASE WHEN c.old THEN 'o.data' ELSE 'NULL::json' END,
            (SELECT string_agg(format(', o.by_%s', f), '' ORDER BY f) FROM unnest(filters) AS f), stream_change_from(c, 'change_old'))
    END;
    IF query IS NULL THEN
        RETURN NULL;
    END IF;
    RETURN format(E'INSERT INTO %I.change_%s (op, key, "row", old%s, schema)\n'
        '/* This records this write in stream %s of replicad. If it fails, stop recording: replicad streams remove STREAM */\n'
        'SELECT q.*, %s FROM (%s) AS q', current_schema(), c.stream,
        (SELECT string_agg(format(', by_%s', f), '' ORDER BY f) FROM unnest(filters) AS f),
        (SELECT replace(replace(s.name, '*/', '* /'), '/*', '/ *') FROM stream s WHERE s.number = c.stream), shape, query);
END
$$;

-- stream_change_body(number, shape): the source of the trigger function of a stream of changes, for a shape of the table.
--
-- It leaves the moment of the client's statement, as a number, which no setting changes, in a setting of the transaction. Where it finds it there, it has been called
-- for the same statement of the client already: see stream_change_mixed. First it runs the query of stream_change_usual. Where that has recorded
-- nothing, the shape is compared: at READ COMMITTED when the query is planned. In other transactions the plan may be older than their snapshot, so
-- there it is compared each time. It must be a query: an expression alone is planned with the snapshot of the client's statement, which may have
-- waited for an ALTER TABLE.
-- For a row that was moved (stream_change_moves) it is called for the row: that is recorded as stream_change_mixed has it.
-- Each expression of plpgsql is prepared once in each transaction, so there are few. The setting is written by an assignment and not by PERFORM, which
-- would start a query. RETURN NEW, which is NULL in a trigger of statements, takes no expression.
CREATE OR REPLACE FUNCTION stream_change_body(stream_number integer, shape integer) RETURNS text
LANGUAGE plpgsql STABLE AS $outer$
DECLARE
    c stream_changes;
    event record;
    body text := '';
    usual text;
    seen bigint;
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = stream_number;
    seen := stream_shape_seen(c.source);
    FOR event IN SELECT * FROM (VALUES ('UPDATE', 'change_old'), ('INSERT', 'change_new'), ('DELETE', 'change_old')) AS e (name, touched)
    LOOP
        usual := stream_change_sql(c.stream, event.name, false, shape, true);
        body := body || format($sql$
    IF TG_OP = %1$L THEN%8$s
        IF current_setting('transaction_isolation') = 'read committed' THEN
            SELECT %2$I.stream_shape_now(%3$s::oid) = %4$L::bigint INTO change_same FROM %5$s LIMIT 1;
        ELSE
            SELECT %2$I.stream_shape_seen(%3$s::oid) = %4$L::bigint INTO change_same FROM %5$s LIMIT 1;
        END IF;
        IF change_same IS NULL THEN
            RETURN NEW;
        END IF;
        change_mixed := current_setting('replicad.change_%6$s', true) IS NOT DISTINCT FROM extract(epoch FROM statement_timestamp())::text;
        IF NOT change_same THEN
            EXECUTE %2$I.stream_change_sql(%6$s, TG_OP, change_mixed, %2$I.stream_shape_ensure(%6$s));
        ELSIF change_mixed THEN
            %7$s;
        ELSE
            %9$s;
        END IF;
    END IF;$sql$,
            event.name, current_schema(), c.source::oid, seen, event.touched, c.stream,
            stream_change_sql(c.stream, event.name, true, shape),
            CASE WHEN usual IS NOT NULL THEN format($sql$
        %s;
        IF FOUND THEN
            change_moment := set_config('replicad.change_%s', extract(epoch FROM statement_timestamp())::text, true);
            RETURN NEW;
        END IF;$sql$, usual, c.stream) END,
            stream_change_sql(c.stream, event.name, false, shape));
        IF event.name = 'UPDATE' AND EXISTS (SELECT FROM pg_class x WHERE x.oid = c.source AND x.relkind = 'p') THEN
            body := body || format($sql$
    IF TG_LEVEL = 'ROW' THEN
        IF (SELECT %1$I.stream_shape_seen(%2$s::oid)) <> %3$L::bigint THEN
            IF TG_OP = 'INSERT' THEN
                EXECUTE 'WITH change_new AS (SELECT ($1).*) ' || %1$I.stream_change_sql(%4$s, TG_OP, true, %1$I.stream_shape_ensure(%4$s)) USING NEW;
            ELSE
                EXECUTE 'WITH change_old AS (SELECT ($1).*) ' || %1$I.stream_change_sql(%4$s, TG_OP, true, %1$I.stream_shape_ensure(%4$s)) USING OLD;
            END IF;
        ELSIF TG_OP = 'INSERT' THEN
            WITH change_new AS (SELECT NEW.*) %5$s;
        ELSE
            WITH change_old AS (SELECT OLD.*) %6$s;
        END IF;
        change_moment := set_config('replicad.change_%4$s', extract(epoch FROM statement_timestamp())::text, true);
        RETURN NEW;
    END IF;$sql$,
                current_schema(), c.source::oid, seen, c.stream, stream_change_sql(c.stream, 'INSERT', true, shape),
                stream_change_sql(c.stream, 'DELETE', true, shape));
        END IF;
    END LOOP;
    RETURN format($sql$
#variable_conflict use_column
DECLARE
    change_moment text;
    change_mixed boolean;
    change_same boolean;
BEGIN%s
    change_moment := set_config('replicad.change_%s', extract(epoch FROM statement_timestamp())::text, true);
    RETURN NEW;
END
$sql$, body, c.stream);
END
$outer$;

-- stream_change_truncated(): BEFORE TRUNCATE trigger; its argument is the number of the stream. The TRUNCATE of the whole table is
-- one change (op t). That of a single partition is a change for each of its rows (op d). Postgres fires the trigger for each
-- table that a TRUNCATE reaches, the whole table first: where our transaction's last change is t, the rest is recorded already.
CREATE OR REPLACE FUNCTION stream_change_truncated() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET row_security = off AS $$
DECLARE
    c stream_changes;
    target text;
    last_op "char";
    shape integer;
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = TG_ARGV[0]::integer;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    target := format('change_%s', c.stream);
    EXECUTE format('SELECT x.op FROM %I x WHERE x.xid = pg_current_xact_id() AND x.id > $1 ORDER BY x.id DESC LIMIT 1', target) INTO last_op
        USING coalesce((SELECT p.position FROM stream_position p WHERE p.stream = c.stream AND p.writer = 0), 0);
    shape := stream_shape_ensure(c.stream);
    IF c.source = TG_RELID THEN
        EXECUTE format('INSERT INTO %I (op, schema) VALUES (''t'', %s)', target, shape);
    ELSIF last_op IS DISTINCT FROM 't' THEN
        PERFORM stream_refuse(format('partition %s of %s is recorded in a stream of replicad, so TRUNCATE of it alone needs the '
            'isolation level READ COMMITTED: rows that were committed after this transaction began would not be recorded',
            TG_RELID::regclass, c.source), 'run TRUNCATE in a transaction of its own at READ COMMITTED, or use DELETE')
            WHERE current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted');
        PERFORM stream_change_lines(c, format('SELECT ''d'' AS op, q.key, %s AS data%s FROM (%s) AS q', CASE WHEN c.old THEN 'q.data' ELSE 'NULL::json' END,
            (SELECT string_agg(format(', q.by_%s', f), '' ORDER BY f) FROM generate_series(1, cardinality(c.filters)) AS f),
            stream_change_from(c, stream_qualified(TG_RELID))), 'old', shape, NULL);
    END IF;
    RETURN NULL;
END
$$;

-- stream_change_moves(): BEFORE UPDATE trigger of partitioned tables, for each row in which a column changes that a partition depends on; its
-- arguments are the number of the stream, these columns, and the name of a setting. A MERGE shows the rows that it moves to another partition to no trigger
-- of statements: Postgres (15 and 18 do) takes them for deleted and inserted ones, and fires the triggers of DELETE and INSERT only for actions
-- of these names. Triggers for each row see them. So where the statement may be a MERGE, this turns those on, by the setting, and the row's own insertion
-- turns them off. It is none if it stands in the context, or in what the client has sent, without that word; EXECUTE and functions in SQL
-- hide the text. Every other UPDATE is recorded once, by the trigger of statements.
CREATE OR REPLACE FUNCTION stream_change_moves() RETURNS trigger
LANGUAGE plpgsql AS $$
{moves}$$;

-- stream_moves_columns(tbl): the columns on which the partitions of a table depend, at any depth. NULL where one depends on an expression.
CREATE OR REPLACE FUNCTION stream_moves_columns(tbl regclass) RETURNS name[]
LANGUAGE sql STABLE AS $$
{moves_columns}$$;

-- stream_change_lines(c, query, place, shape, ids): runs a query of op, key, data and the filters' values as the owner of the source,
-- and puts what it returns into the table of changes, with data in the column `place` (row or old). ids: their ids in their order
-- (NULL: the next ones). Returns how many there were, and the last of them. Writes the table of changes.
CREATE OR REPLACE FUNCTION stream_change_lines(
    c stream_changes, query text, place text, shape integer, ids bigint[], OUT count bigint, OUT last json
)
LANGUAGE plpgsql AS $$
DECLARE
    filters text := coalesce((SELECT string_agg(format(', by_%s', f), '' ORDER BY f)
        FROM generate_series(1, cardinality(c.filters)) AS f), '');
BEGIN
    EXECUTE format('WITH line AS MATERIALIZED (SELECT l.text::json AS one, l.n FROM stream_as_owner($1, $2, $3) WITH ORDINALITY AS l (text, n)), '
        'stored AS (INSERT INTO change_%s (%s op, key, %I%s, schema) '
        'SELECT %s (one ->> ''op'')::"char", one -> ''key'', CASE WHEN json_typeof(one -> ''data'') <> ''null'' THEN one -> ''data'' END%s, $4 FROM line ORDER BY n) '
        'SELECT count(*), (SELECT one FROM line ORDER BY n DESC LIMIT 1) FROM line',
        c.stream, CASE WHEN ids IS NOT NULL THEN 'id,' END, place, filters,
        CASE WHEN ids IS NOT NULL THEN '$5[n],' END,
        regexp_replace(filters, ', (by_\d+)', ', one ->> ''\1''', 'g'))
        INTO count, last
        USING c.source, format('SELECT row_to_json(x)::text FROM (%s) AS x', query), stream_path_text(c.path), shape, ids;
END
$$;

-- stream_change_triggers(number, tbl): the triggers of a stream of changes on one table: name, event (4 INSERT, 16 UPDATE, 8 DELETE,
-- 32 TRUNCATE; 1 more for those of rows, and 7 for the one before INSERT), the function, and whether it fires in every session. Those that a partition has from its table are left out.
CREATE OR REPLACE FUNCTION stream_change_triggers(stream_number integer, tbl regclass)
RETURNS TABLE (name name, event integer, function regprocedure, fires boolean)
LANGUAGE sql STABLE AS $$
    SELECT g.tgname, CASE g.tgtype WHEN 7 THEN 7 ELSE g.tgtype & 61 END, p.oid::regprocedure, g.tgenabled = 'A' AND (g.tgqual IS NULL) = (g.tgtype & 1 = 0)
    FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
    WHERE g.tgrelid = $2 AND g.tgparentid = 0 AND p.pronamespace = quote_ident(current_schema())::regnamespace
        AND (p.proname = 'change_' || $1 OR p.proname IN ('stream_change_truncated', 'stream_change_moves')
            AND position(convert_to($1::text, getdatabaseencoding()) || decode('00', 'hex') IN g.tgargs) = 1)
$$;

-- stream_change_wanted(number, tbl): the triggers that a stream of changes needs on one table of its source: the event as stream_change_triggers has it,
-- the name, the SQL that follows the name in CREATE TRIGGER, with %s for the table, whether the table and its partitions have it and it fires, and
-- whether it is as wanted now.
--
-- Those of rows are on partitioned sources, from which the partitions have them. That for BEFORE INSERT never fires. Without it, Postgres 18
-- gives the AFTER UPDATE trigger of a MERGE the row that the MERGE inserted last in place of each row that it updates after that:
-- tcs_original_insert_tuple in its nodeModifyTable.c is left set. For the others see stream_change_moves. They name no column that could be dropped or get
-- another type, since Postgres refuses that for a column which a trigger names; it does so anyway for one on which a partition depends. Triggers fire in the
-- order of their names: ~ is behind those of others, which may change such a column.
CREATE OR REPLACE FUNCTION stream_change_wanted(stream_number integer, tbl regclass)
RETURNS TABLE (event integer, name text, sql text, fires boolean, fits boolean)
LANGUAGE sql STABLE AS $$
    SELECT w.event, n.name, format(w.sql, '%s', current_schema(), c.stream, coalesce(m.columns::text, ''),
            (SELECT format('WHEN (NOT pg_catalog.record_image_eq(ROW(%s), ROW(%s)))', string_agg(format('OLD.%I', k), ', '), string_agg(format('NEW.%I', k), ', '))
                FROM unnest(m.columns) k HAVING count(*) > 0), 'replicad.moves_' || c.stream),
        EXISTS (SELECT FROM stream_change_triggers(stream_number, tbl) g WHERE g.event = w.event AND g.fires)
            AND NOT EXISTS (SELECT FROM pg_inherits i JOIN pg_trigger t ON t.tgrelid = i.inhrelid AND t.tgparentid <> 0
                WHERE w.event & 1 = 1 AND i.inhrelid IN (SELECT stream_tables(tbl)) AND t.tgname = n.name AND t.tgenabled <> 'A'),
        w.event <> 17 OR EXISTS (SELECT FROM stream_change_triggers(stream_number, tbl) g JOIN pg_trigger t ON t.tgrelid = tbl AND t.tgname = g.name
            WHERE g.event = 17 AND position(convert_to(coalesce(m.columns::text, ''), getdatabaseencoding()) || decode('00', 'hex') IN t.tgargs) > 0)
    FROM stream_changes c JOIN pg_class x ON x.oid = tbl
        CROSS JOIN LATERAL (SELECT CASE WHEN x.relkind = 'p' AND tbl = c.source THEN stream_moves_columns(tbl) END AS columns) AS m
        CROSS JOIN (VALUES
            (4, 'insert', 'AFTER INSERT ON %s REFERENCING NEW TABLE AS change_new FOR EACH STATEMENT EXECUTE FUNCTION %I.change_%s()'),
            (16, 'update', 'AFTER UPDATE ON %s REFERENCING NEW TABLE AS change_new OLD TABLE AS change_old FOR EACH STATEMENT EXECUTE FUNCTION %I.change_%s()'),
            (8, 'delete', 'AFTER DELETE ON %s REFERENCING OLD TABLE AS change_old FOR EACH STATEMENT EXECUTE FUNCTION %I.change_%s()'),
            (32, 'truncate', 'BEFORE TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION %I.stream_change_truncated(%s)'),
            (7, 'merge', 'BEFORE INSERT ON %s FOR EACH ROW WHEN (false) EXECUTE FUNCTION %I.stream_change_moves(%s)'),
            (17, 'moves', 'BEFORE UPDATE ON %s FOR EACH ROW %5$s EXECUTE FUNCTION %2$I.stream_change_moves(%3$s, %4$L, %6$L)'),
            (9, 'gone', 'AFTER DELETE ON %s FOR EACH ROW WHEN (current_setting(%6$L, true) = ''on'') EXECUTE FUNCTION %2$I.change_%3$s()'),
            (5, 'come', 'AFTER INSERT ON %s FOR EACH ROW WHEN (CASE WHEN current_setting(%6$L, true) = ''on'' THEN set_config(%6$L, ''off'', true) = ''off'' ELSE false END) '
                'EXECUTE FUNCTION %2$I.change_%3$s()')
        ) AS w (event, moment, sql)
        CROSS JOIN LATERAL (SELECT format('%sreplicad_change_%s_%s', CASE w.event & 1 WHEN 1 THEN '~' END, c.stream, w.moment) AS name) AS n
    WHERE c.stream = stream_number AND (w.event & 1 = 0 OR tbl = c.source AND x.relkind = 'p')
$$;

-- stream_owner_remedy(owner, call): what lets the asking role do what only this owner may do: membership, or a superuser who does it.
CREATE OR REPLACE FUNCTION stream_owner_remedy(owner oid, call text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN r.rolsuper THEN '' ELSE format('run: GRANT %I TO %I; or ', r.rolname, current_user) END || 'run as a superuser: ' || call
    FROM pg_roles r WHERE r.oid = owner
$$;

-- stream_change_runner(c): the role to which the trigger function of a stream of changes belongs, since its rights are what the trigger
-- has: the owner of the table, whose code types and predicate may run. A table of a superuser is recorded with the rights of the owner of
-- this schema, if that role may read the table: then daemons can renew the function. A predicate may read more than the
-- table, so there it is the asking role.
CREATE OR REPLACE FUNCTION stream_change_runner(c stream_changes) RETURNS oid
LANGUAGE sql STABLE AS $$
    SELECT coalesce(stream_runs_as(c.source), CASE
        WHEN c.predicate IS NULL AND has_table_privilege(n.nspowner, c.source, 'SELECT') AND pg_has_role(n.nspowner, 'MEMBER')
            AND pg_get_userbyid(n.nspowner) !~ '^pg_' THEN n.nspowner
        ELSE (SELECT r.oid FROM pg_roles r WHERE r.rolname = current_user) END)
    FROM pg_namespace n WHERE n.nspname = current_schema()
$$;

-- stream_change_function_ensure(number): makes the trigger function of a stream of changes as the present shape of its table wants it,
-- if it is not so. Raises insufficient_privilege, with the remedy, where the function belongs to a role that the asking role is no
-- member of. Writes the function, and what stream_shape_ensure writes.
CREATE OR REPLACE FUNCTION stream_change_function_ensure(stream_number integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    c stream_changes;
    runner oid;
    present record;
    signature text := format('%I.change_%s()', current_schema(), stream_number);
    body text := stream_change_body(stream_number, stream_shape_ensure(stream_number));
    path text;
    settings text[];
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = stream_number;
    runner := stream_change_runner(c);
    path := 'search_path=' || stream_path_text(c.path);
    settings := ARRAY[path] || CASE
        WHEN c.predicate IS NOT NULL THEN stream_fixed()
        ELSE CASE stream_change_plain(c.source, stream_columns(c.source, c.columns) || stream_columns(c.source, c.key) || stream_columns(c.source, c.filters))
            WHEN 'nothing' THEN '{}'
            WHEN 'zone' THEN ARRAY['TimeZone=UTC']
            ELSE stream_fixed() END
        END;
    SELECT r.rolname, r.rolsuper, p.proowner, p.prosrc = body AND p.prosecdef AND p.proconfig = settings AS fits INTO present
        FROM pg_proc p JOIN pg_roles r ON r.oid = p.proowner WHERE p.oid = to_regprocedure(signature);
    IF present.fits AND (present.proowner = runner OR present.rolsuper AND stream_runs_as(c.source) IS NULL) THEN
        RETURN;
    ELSIF present.rolname IS NOT NULL AND NOT pg_has_role(present.proowner, 'USAGE') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format(
                'the trigger function %s belongs to role %I, and role %I may not make it anew for the present columns of %s. Changes are '
                'recorded, but each statement that writes there is prepared again', signature, present.rolname, current_user, c.source),
            HINT = stream_owner_remedy(present.proowner, format('SELECT %I.stream_changes_look()', current_schema()));
    END IF;
    IF pg_get_userbyid(runner) = current_user AND NOT has_table_privilege(c.source, 'SELECT') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('role %I may not read %s, whose changes it would record', current_user, c.source),
            HINT = format('run: GRANT SELECT ON %s TO %I', stream_qualified(c.source), current_user);
    END IF;
    EXECUTE format('CREATE OR REPLACE FUNCTION %s RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = %s%s AS %L',
        signature, stream_path_text(c.path), (SELECT string_agg(format(' SET %s = %L', split_part(s.setting, '=', 1),
            split_part(s.setting, '=', 2)), '' ORDER BY s.n) FROM unnest(settings) WITH ORDINALITY AS s (setting, n) WHERE s.n > 1), body);
    EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', signature);
    EXECUTE format('COMMENT ON FUNCTION %s IS %L', signature, 'replicad: records the changes of ' || stream_qualified(c.source));
    IF pg_get_userbyid(runner) <> current_user OR present.rolname <> current_user THEN
        PERFORM stream_give(signature, runner);
    END IF;
    IF stream_runs_as(c.source) IS NOT NULL THEN
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', current_schema(), pg_get_userbyid(runner));
        EXECUTE format('GRANT INSERT ON change_%s TO %I', stream_number, pg_get_userbyid(runner));
    END IF;
END
$$;

-- stream_changes_ensure(number, of_rows): makes the function and the triggers of a stream of changes as they should be: of all partitions, enabled.
-- of_rows: only the triggers of rows, which older versions did not make. Where it changes triggers, writers of the table wait for the transaction's
-- end. Returns whether it made a trigger. Raises RS002 and insufficient_privilege, with the remedy, where only another role may. Writes functions
-- and triggers.
CREATE OR REPLACE FUNCTION stream_changes_ensure(stream_number integer, of_rows boolean = false) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    c stream_changes;
    member regclass;
    wanted record;
    part regclass;
    made boolean := false;
BEGIN
    PERFORM stream_change_function_ensure(stream_number);
    SELECT * INTO c FROM stream_changes x WHERE x.stream = stream_number;
    FOR member IN SELECT t FROM stream_tables(c.source) t LOOP
        FOR wanted IN
            SELECT * FROM stream_change_wanted(c.stream, member) w WHERE NOT (w.fires AND w.fits) AND (w.event & 1 = 1 OR NOT of_rows)
        LOOP
            EXECUTE format('CREATE OR REPLACE TRIGGER %I ', wanted.name) || format(wanted.sql, stream_qualified(member));
            -- also in sessions with session_replication_role = replica
            FOR part IN SELECT t.tgrelid FROM stream_tables(member) m JOIN pg_trigger t ON t.tgrelid = m AND t.tgname = wanted.name AND t.tgenabled <> 'A' LOOP
                EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', stream_qualified(part), wanted.name);
            END LOOP;
            made := true;
        END LOOP;
    END LOOP;
    RETURN made;
EXCEPTION WHEN insufficient_privilege THEN
    IF member IS NULL THEN
        RAISE;  -- by stream_change_function_ensure
    END IF;
    PERFORM stream_refuse(format('role %I cannot make the triggers that record %s: %s', current_user, member, SQLERRM),
        stream_owner_remedy(k.relowner, format('SELECT %I.stream_changes_look()', current_schema()))) FROM pg_class k WHERE k.oid = member;
END
$$;

-- stream_change_check(source, key): the numbers of the columns of the key, after a check that changes of this table can be recorded.
-- key NULL: its primary key. Raises RS002.
CREATE OR REPLACE FUNCTION stream_change_check(source regclass, key name[]) RETURNS smallint[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    numbers smallint[];
    named text;
BEGIN
    PERFORM stream_check_table(source);
    PERFORM stream_refuse(format('%s is a table of replicad', source), 'name a table of yours')
        FROM pg_class c WHERE c.oid = source AND c.relnamespace = quote_ident(current_schema())::regnamespace;
    PERFORM stream_refuse(format('%s is a partition of %s', source, i.inhparent::regclass), format('name the whole table: --table %s', i.inhparent::regclass))
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhrelid = source AND c.relispartition;
    PERFORM stream_refuse(format('%s has heirs (INHERITS), and no key is unique over all of them', source), 'use partitions instead')
        FROM pg_class c WHERE c.oid = source AND c.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid);
    PERFORM stream_refuse(format('%s is filled by a subscription, whose changes fire no triggers of statements', source),
        'record the changes where they are made, on the publisher') FROM pg_subscription_rel r WHERE r.srrelid = source;
    IF key IS NULL THEN
        SELECT i.indkey::smallint[] INTO numbers FROM pg_index i WHERE i.indrelid = source AND i.indisprimary;
        PERFORM stream_refuse(format('%s has no primary key, so a change cannot say which row it is about', source), format(
            'run: ALTER TABLE %s ADD PRIMARY KEY (...); or name the columns of a unique index: --key COLUMN[,COLUMN]', source))
            WHERE NOT FOUND;
        numbers := numbers[0:(SELECT i.indnkeyatts - 1 FROM pg_index i WHERE i.indrelid = source AND i.indisprimary)];
        numbers := ARRAY(SELECT n FROM unnest(numbers) WITH ORDINALITY AS u (n, place) ORDER BY place);
    ELSE
        numbers := stream_column_numbers(source, key);
    END IF;
    named := array_to_string(ARRAY(SELECT quote_ident(n) FROM unnest(stream_columns(source, numbers)) n), ', ');
    IF NOT EXISTS (
            SELECT FROM pg_index i WHERE i.indrelid = source AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL
                AND i.indexprs IS NULL AND i.indnkeyatts = cardinality(numbers)
                AND numbers @> (i.indkey::smallint[])[0:i.indnkeyatts - 1]) THEN
        PERFORM stream_refuse(format('(%s) is not the key of a unique index of %s that is checked at once', named, source),
            'a change names its row by the key, so no two rows may have the same, not even within a transaction: use a unique '
            'index or constraint that is neither partial nor DEFERRABLE');
    END IF;
    PERFORM stream_refuse(format('column %I of the key of %s may be NULL', a.attname, source),
        format('run: ALTER TABLE %s ALTER COLUMN %I SET NOT NULL', source, a.attname))
        FROM pg_attribute a WHERE a.attrelid = source AND a.attnum = ANY (numbers) AND NOT a.attnotnull LIMIT 1;
    PERFORM stream_refuse(format('role %I may not read %s, whose changes it would record', current_user, source),
        format('run: GRANT SELECT ON %s TO %I', source, current_user))
        WHERE stream_runs_as(source) IS NULL AND NOT has_table_privilege(source, 'SELECT');
    PERFORM stream_refuse(stream_hidden(source), 'or use a table without row security') WHERE stream_hidden(source) IS NOT NULL;
    RETURN numbers;
END
$$;

-- stream_change_check_predicate(c): raises RS002 unless the predicate of a stream of changes is a condition on a row of its table. Reads no row.
CREATE OR REPLACE FUNCTION stream_change_check_predicate(c stream_changes) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    refusal text;
BEGIN
    IF c.predicate IS NULL THEN
        RETURN;
    END IF;
    BEGIN
        PERFORM stream_as_owner(c.source, format(E'SELECT ''''::text FROM (SELECT %s FROM %s) AS t WHERE (\n%s\n) IS TRUE LIMIT 0',
            (SELECT string_agg(quote_ident(n), ', ') FROM unnest(stream_columns(c.source, NULL)) AS n), stream_qualified(c.source),
            c.predicate), stream_path_text(c.path));
    EXCEPTION WHEN OTHERS THEN
        IF left(SQLSTATE, 2) IN ('08', '40', '53', '55', '57', '58', 'XX') THEN
            RAISE;  -- a lock, a deadlock, the disk: nothing is wrong with the expression
        END IF;
        refusal := SQLERRM;
    END;
    PERFORM stream_refuse(format('the condition %L does not fit table %s: %s', c.predicate, c.source, refusal), format(
        'write an SQL condition on the columns of the table, which is called t; names were looked up along %s', stream_path_text(c.path)))
        WHERE refusal IS NOT NULL;
END
$$;

-- stream_add_changes(name, source, ...): makes the changes of a table a stream. From the end of this transaction on every INSERT, UPDATE,
-- DELETE and TRUNCATE is recorded in a table of this schema.
--   key        the columns that name a row; default: the primary key. A unique index must have them
--   columns    of the row that are sent, with the key; default: all, and those that are added later
--   predicate  SQL on a row (called t): other rows are not in the stream
--   old        send the row before an UPDATE or DELETE too
--   omit       leave large columns out of an UPDATE that did not change them
--   filters    columns by whose values readers may ask for a part of the stream
--   max_row    as stream_add
--   path       where names of the predicate are looked up; by default the caller's search_path
-- Returns notes. Raises RS002 with the reason and the remedy. Writes stream, stream_changes, stream_shape, and what stream_add writes;
-- creates a table, a function and triggers, for which writers wait.
CREATE OR REPLACE FUNCTION stream_add_changes(
    name text, source regclass, key name[] = NULL, columns name[] = NULL, predicate text = NULL, old boolean = false,
    omit boolean = false, filters name[] = NULL, max_row bigint = 67108864, path name[] = current_schemas(false)
) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    c stream_changes;
    notes text[];
    target text;
    filter integer;
BEGIN
    LOCK TABLE stream IN SHARE ROW EXCLUSIVE MODE;  -- as stream_add, which numbers the stream
    PERFORM stream_check_name(name);
    c.stream := stream_number_next();
    c.source := source;
    c.key := stream_change_check(source, key);
    c.columns := stream_column_numbers(source, columns);
    IF c.columns IS NOT NULL THEN
        c.columns := (SELECT array_agg(k ORDER BY n) FROM unnest(c.key) WITH ORDINALITY AS u (k, n) WHERE k <> ALL (c.columns)) || c.columns;
    END IF;
    c.predicate := predicate;
    c.path := CASE WHEN predicate IS NULL THEN '{}' ELSE stream_safe_path(path) END;
    c.old := old;
    c.omit := omit;
    c.filters := coalesce(stream_column_numbers(source, filters), '{}');
    c.extended := '0';
    PERFORM stream_refuse('a stream has at most 8 filters', 'name the columns that readers ask for')
        WHERE cardinality(c.filters) > 8;
    PERFORM stream_reader_ensure(source);
    PERFORM stream_change_check_predicate(c);
    target := format('change_%s', c.stream);
    EXECUTE format('CREATE TABLE %I (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, op "char" NOT NULL, key json, '
        '"row" json, old json, schema integer NOT NULL, xid xid8 NOT NULL DEFAULT pg_current_xact_id(), '
        'at timestamptz NOT NULL DEFAULT statement_timestamp()%s) PARTITION BY RANGE (id)', target,
        (SELECT string_agg(format(', by_%s text', f), '' ORDER BY f) FROM generate_series(1, cardinality(c.filters)) AS f));
    EXECUTE format('COMMENT ON TABLE %I IS %L', target, format('replicad: changes of %s', stream_qualified(source)));
    FOR filter IN SELECT generate_series(1, cardinality(c.filters)) LOOP
        EXECUTE format('CREATE INDEX %I ON %I (by_%s, id)', format('%s_by_%s', target, filter), target, filter);
    END LOOP;
    PERFORM stream_belong('TABLE ' || quote_ident(target));
    EXECUTE format('CREATE TABLE %I PARTITION OF %I DEFAULT', target || '_rest', target);
    PERFORM stream_belong('TABLE ' || quote_ident(target || '_rest'));
    WHILE stream_change_parts_ensure(c.stream, 0) LOOP
    END LOOP;
    notes := stream_add(name, target::regclass, 'id', max_row => max_row);
    -- What stream_change_line_sql yields is JSON on one line: nothing has to check it again row by row.
    UPDATE stream x SET row_sql = stream_change_line_sql(), row_type = 'jsonb' WHERE x.number = c.stream;
    INSERT INTO stream_changes SELECT c.*;
    PERFORM stream_changes_ensure(c.stream);
    PERFORM stream_changes_note(c.stream);
    RETURN notes;
END
$$;
COMMENT ON FUNCTION stream_add_changes(text, regclass, name[], name[], text, boolean, boolean, name[], bigint, name[])
    IS 'Makes the changes of a table a stream; returns notes worth reading';

-- stream_change_parts(number): the partitions of the table of changes that have a range of ids: the first id, and the last. The other
-- one, change_N_rest, takes rows that no range is made for yet.
CREATE OR REPLACE FUNCTION stream_change_parts(stream_number integer) RETURNS TABLE (part regclass, first bigint, last bigint)
LANGUAGE sql STABLE AS $$
    SELECT p.oid::regclass, b.bounds[1]::bigint, b.bounds[2]::bigint - 1
    FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhrelid
    CROSS JOIN LATERAL (SELECT regexp_match(pg_get_expr(p.relpartbound, p.oid), $x$FROM \('?(\d+)'?\) TO \('?(\d+)'?\)$x$)) AS b (bounds)
    WHERE i.inhparent = to_regclass(format('%I.change_%s', current_schema(), stream_number)) AND b.bounds IS NOT NULL
$$;

-- stream_change_parts_ensure(number, taken): makes the next partition of the table of changes, if fewer than three are ahead of the ids, so
-- that old changes can be removed by whole partitions, which leaves no dead rows. taken: the last id that was given out. A partition has
-- 268 million ids, so that no burst runs past the partitions that are there: stream_changes_extend closes it long before. Writers do not
-- wait: an ATTACH has a lock that lets them write. Readers wait for the end of the transaction, so it should end at once. Where no daemon
-- runs for 800 million changes, ids come into change_N_rest, and ranges begin beyond them. Returns whether it made one: not where a lock is
-- not free within lock_timeout. Writes tables.
CREATE OR REPLACE FUNCTION stream_change_parts_ensure(stream_number integer, taken bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    target text := format('change_%s', stream_number);
    upto bigint := coalesce((SELECT max(p.last) FROM stream_change_parts(stream_number) p), 0);
    made text;
BEGIN
    IF 3 <= (SELECT count(*) FROM stream_change_parts(stream_number) p WHERE p.first > taken + 1) THEN
        RETURN false;
    ELSIF taken > upto AND upto > 0 THEN
        IF pg_relation_size(format('%I', target || '_rest')::regclass) > 64 << 20 THEN
            RETURN false;  -- an ATTACH reads it while writers wait; its rows go by retention first
        END IF;
        upto := taken + 10000;  -- other sessions take ids meanwhile
    END IF;
    made := format('%s_%s', target, upto + 1);
    EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING INDEXES)', made, target);
    PERFORM stream_belong('TABLE ' || quote_ident(made));
    EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)', target, made, upto + 1, upto + 1 + (1 << 28));
    RETURN true;
EXCEPTION WHEN lock_not_available OR check_violation THEN
    RETURN false;  -- the next call tries again
END
$$;

-- stream_change_older(tbl, newest): whether a transaction with a number below newest writes to a table of changes. A statement of it sees only the
-- partitions that there were when it began, and fails if its ids go beyond them. Prepared transactions run no statement.
CREATE OR REPLACE FUNCTION stream_change_older(tbl regclass, newest xid8) RETURNS boolean
LANGUAGE sql VOLATILE AS $$
    SELECT EXISTS (
        SELECT FROM pg_locks l JOIN pg_locks x ON x.virtualtransaction = l.virtualtransaction AND x.locktype = 'transactionid' AND x.mode = 'ExclusiveLock'
        WHERE l.locktype = 'relation' AND l.relation = tbl AND l.mode = 'RowExclusiveLock' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
            AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()) AND l.virtualtransaction NOT LIKE '-1/%'
            AND (newest::text::numeric - x.transactionid::text::numeric) % 4294967296 BETWEEN 1 AND 2147483648)  -- of 32 bits, which begin again
$$;

-- stream_change_kept(number, taken): about how many changes a stream has: of each partition the ids from its first one to its last change.
CREATE OR REPLACE FUNCTION stream_change_kept(stream_number integer, taken bigint) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    p record;
    last bigint;
    kept bigint := 0;
BEGIN
    FOR p IN SELECT * FROM stream_change_parts(stream_number) x WHERE x.first <= taken LOOP
        EXECUTE format('SELECT max(t.id) FROM %s t', p.part) INTO last;
        kept := kept + coalesce(last - p.first + 1, 0);
    END LOOP;
    RETURN kept;
END
$$;

-- stream_changes_extend(): looks after the partitions of the table of each stream of changes: makes the next one, or closes the present one, by moving
-- the sequence to its end, so that old changes go by whole partitions soon. A partition is closed with a quarter as many ids as there
-- are changes, and with at least 100,000. Ids of transactions that are open now stay in it: the positions of readers wait for them, as ever. It is not
-- closed while the only next one was made after a statement began that writes now (stream_change_older); its ids suffice
-- for that. A stream of which another session has a lock longer than lock_timeout is left to the next call. Call it, each time in a transaction of its
-- own, until it returns false. Writes tables, stream_changes, and the sequence.
CREATE OR REPLACE FUNCTION stream_changes_extend() RETURNS boolean
LANGUAGE plpgsql SET lock_timeout = '100ms' AS $$
DECLARE
    c stream_changes;
    s stream;
    taken bigint;
    present record;
    ahead integer;
    old boolean;
BEGIN
    FOR s IN SELECT x.* FROM stream x WHERE EXISTS (SELECT FROM stream_changes y WHERE y.stream = x.number) ORDER BY x.number LOOP
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(hashtext('replicad changes'), s.number);  -- another daemon is at it
        BEGIN
            SELECT x.* INTO c FROM stream_changes x WHERE x.stream = s.number;
            taken := pg_sequence_last_value(s.sequence);
            CONTINUE WHEN c.stream IS NULL OR taken IS NULL;
            IF c.extended IS NULL THEN
                c.extended := pg_snapshot_xmax(pg_current_snapshot());
                UPDATE stream_changes x SET extended = c.extended WHERE x.stream = c.stream;
            END IF;
            SELECT p.* INTO present FROM stream_change_parts(c.stream) p WHERE taken BETWEEN p.first AND p.last;
            SELECT count(*) INTO ahead FROM stream_change_parts(c.stream) p WHERE p.first > taken;
            CONTINUE WHEN ahead >= 3 AND (present.last = taken OR taken - present.first < 99999);
            old := stream_change_older(s.relation, c.extended);
            IF ahead < 3 AND NOT old AND stream_change_parts_ensure(c.stream, taken) THEN
                UPDATE stream_changes x SET extended = NULL WHERE x.stream = c.stream;
                RETURN true;
            ELSIF present.last > taken AND taken - present.first >= 99999 AND (ahead > 1 OR ahead = 1 AND NOT old)
                    AND taken - present.first >= stream_change_kept(c.stream, taken) / 4 THEN
                PERFORM setval(s.sequence, present.last);
                RETURN true;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            CONTINUE;  -- the next call tries again
        END;
    END LOOP;
    RETURN false;
END
$$;

-- stream_changes_remove(number): drops the triggers, the function and the table of a stream of changes. Does nothing for other streams. Raises
-- RS002, with the remedy, where only another role may.
CREATE OR REPLACE FUNCTION stream_changes_remove(stream_number integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    present record;
BEGIN
    IF NOT EXISTS (SELECT FROM stream_changes c WHERE c.stream = stream_number) THEN
        RETURN;
    END IF;
    FOR present IN
        SELECT g.tgname, stream_qualified(g.tgrelid) AS tbl FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
        WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND g.tgparentid = 0
            AND (p.proname = 'change_' || stream_number OR p.proname IN ('stream_change_truncated', 'stream_change_moves')
                AND position(convert_to(stream_number::text, getdatabaseencoding()) || decode('00', 'hex') IN g.tgargs) = 1)
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', present.tgname, present.tbl);
    END LOOP;
    EXECUTE format('DROP FUNCTION IF EXISTS change_%s()', stream_number);
    EXECUTE format('DROP TABLE IF EXISTS change_%s', stream_number);
EXCEPTION WHEN insufficient_privilege THEN
    PERFORM stream_refuse(format('role %I cannot remove what records the changes of %s: %s', current_user, c.source, SQLERRM),
        stream_owner_remedy(k.relowner, format('SELECT %I.stream_remove(%L)', current_schema(), s.name)))
        FROM stream s, stream_changes c JOIN pg_class k ON k.oid = c.source WHERE s.number = stream_number AND c.stream = s.number;
    RAISE;
END
$$;

-- stream_changes_fault(s): what keeps changes of the source of a stream from being recorded, with the remedy; NULL where all are, and for streams of
-- another kind.
CREATE OR REPLACE FUNCTION stream_changes_fault(s stream) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    c stream_changes;
    again text := format('replicad streams snapshot %s --anew', stream_shell(s.name));
    member regclass;
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = s.number;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF NOT EXISTS (SELECT FROM pg_class x WHERE x.oid = c.source) THEN
        RETURN format('the table whose changes it has was dropped; run: replicad streams remove %s', stream_shell(s.name));
    END IF;
    SELECT t INTO member FROM stream_tables(c.source) t
        WHERE EXISTS (SELECT FROM stream_change_wanted(c.stream, t) w WHERE NOT w.fires) LIMIT 1;
    IF FOUND THEN
        RETURN format('triggers of replicad on %s are missing or disabled, so changes of it are not recorded; run: %s', member, again);
    END IF;
    IF stream_hidden(c.source) IS NOT NULL THEN
        RETURN stream_hidden(c.source) || '; then run: ' || again;
    END IF;
    IF c.missed_at IS NOT NULL THEN
        RETURN format('changes of %s may not have been recorded: %s (%s); to send all rows anew, run: %s', c.source, c.missed,
            to_char(c.missed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'), again);
    END IF;
    RETURN NULL;
END
$$;
