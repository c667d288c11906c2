-- The checks before a stream is registered or changed.

-- stream_sequence_fault(sequence, method): why no stream can be fed by this sequence, and the remedy; NULLs where it
-- can. Asked when a stream is added and again while it is served.
CREATE OR REPLACE FUNCTION stream_sequence_fault(
    sequence regclass, method text, OUT problem text, OUT remedy text
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s pg_sequence;
BEGIN
    SELECT * INTO s FROM pg_sequence q WHERE q.seqrelid = sequence;
    IF NOT FOUND THEN
        problem := format('%s is not a sequence', sequence);
        remedy := 'name the sequence that the ids come from';
    ELSIF s.seqcache > 1 THEN
        problem := format('sequence %s has CACHE %s: sessions keep ids for later, so no position can be trusted',
            sequence, s.seqcache);
        remedy := format('run: ALTER SEQUENCE %s CACHE 1', sequence);
    ELSIF s.seqincrement < 0 THEN
        problem := format('sequence %s counts downwards (INCREMENT %s)', sequence, s.seqincrement);
        remedy := format('let it count upwards and begin above all ids: ALTER SEQUENCE %s INCREMENT BY 1, and setval()',
            sequence);
    ELSIF s.seqcycle THEN
        problem := format('sequence %s starts again at its end (CYCLE)', sequence);
        remedy := format('run: ALTER SEQUENCE %s NO CYCLE', sequence);
    ELSIF (SELECT c.relpersistence FROM pg_class c WHERE c.oid = sequence) <> 'p' THEN
        problem := format('sequence %s is not logged: after a crash it issues ids again', sequence);
        remedy := format('run: ALTER SEQUENCE %s SET LOGGED', sequence);
    ELSIF method = 'reservation' AND s.seqmin < 1 THEN
        problem := format('sequence %s can go below 1, which the lock of a reservation cannot carry', sequence);
        remedy := format('run: ALTER SEQUENCE %s MINVALUE 1', sequence);
    END IF;
END
$$;

-- stream_check_name(name): refuses a text that cannot be the name of a stream, and a name that is taken.
CREATE OR REPLACE FUNCTION stream_check_name(name text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    -- by code point, since what [:space:] and [:cntrl:] mean beyond ASCII depends on the database's locale
    unprintable text := E'[[:space:][:cntrl:]\\u0080-\\u00a0\\u2000-\\u200f\\u2028-\\u202f\\u205f\\u3000\\ufeff]';
BEGIN
    IF coalesce(name, '') = '' OR length(name) > 200 OR name ~ unprintable OR name LIKE 'tube:%' THEN
        PERFORM stream_refuse_argument(format('%L is no name for a stream', left(name, 240)),
            '1 to 200 characters, none of them white space or unprintable, and not beginning with tube:');
    END IF;
    IF EXISTS (SELECT FROM stream s WHERE s.name = stream_check_name.name) THEN
        PERFORM stream_refuse(format('there is a stream %s already', name),
            format('take another name, or run: SELECT %I.stream_remove(%L)', current_schema(), name));
    END IF;
END
$$;

-- stream_check_table(tbl): refuses a relation that cannot be a stream's table, its partitions and heirs included.
CREATE OR REPLACE FUNCTION stream_check_table(tbl regclass) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    part record;
BEGIN
    IF tbl IS NULL OR NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = tbl) THEN
        PERFORM stream_refuse('there is no such table', 'name it with its schema, such as public.events');
    END IF;
    FOR part IN SELECT t AS name, c.relkind, c.relpersistence FROM stream_tables(tbl) t JOIN pg_class c ON c.oid = t
    LOOP
        IF part.relkind IN ('v', 'm') THEN
            PERFORM stream_refuse(format('%s is a view', part.name), 'register the table that is written to');
        ELSIF part.relkind = 'f' THEN
            PERFORM stream_refuse(format('%s is a foreign table', part.name),
                'writes on another server cannot be watched from here: register the table where it lives');
        ELSIF part.relkind = 'S' THEN
            PERFORM stream_refuse(format('%s is a sequence', part.name), 'register the table whose ids it gives');
        ELSIF part.relkind NOT IN ('r', 'p') THEN
            PERFORM stream_refuse(format('%s is not a table', part.name), 'register the table that is written to');
        ELSIF part.relpersistence = 't' THEN
            PERFORM stream_refuse(format('%s is temporary: no other session can read it', part.name),
                'use a permanent table');
        ELSIF part.relpersistence <> 'p' THEN
            PERFORM stream_refuse(format('%s is unlogged: a crash empties it', part.name),
                format('run: ALTER TABLE %s SET LOGGED', part.name));
        END IF;
    END LOOP;
END
$$;

-- stream_check_id(tbl, id_column): refuses a column that cannot be a stream's id, apart from the sequence that feeds it.
CREATE OR REPLACE FUNCTION stream_check_id(tbl regclass, id_column name) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    kind regtype := stream_column_type(tbl, id_column);
    bare regclass;
BEGIN
    IF kind NOT IN ('bigint'::regtype, 'integer'::regtype) THEN
        PERFORM stream_refuse(format('column %I of %s is of type %s', id_column, tbl, kind),
            'the id of a stream is a bigint (or an integer) that a sequence feeds');
    END IF;
    SELECT t INTO bare FROM stream_tables(tbl) t JOIN pg_class c ON c.oid = t
    WHERE c.relkind = 'r' AND NOT EXISTS (
        SELECT FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid JOIN pg_am m ON m.oid = x.relam
        JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
        WHERE i.indrelid = t AND i.indisvalid AND i.indpred IS NULL AND m.amname = 'btree' AND a.attname = id_column)
    LIMIT 1;
    IF FOUND THEN
        -- CONCURRENTLY does not exist for a partitioned table
        PERFORM stream_refuse(
            format('%s has no index on %I, so every look at the stream would read all of it', bare, id_column),
            format('run: CREATE INDEX %sON %s (%I)',
                CASE (SELECT c.relkind FROM pg_class c WHERE c.oid = tbl) WHEN 'p' THEN '' ELSE 'CONCURRENTLY ' END,
                CASE (SELECT c.relispartition FROM pg_class c WHERE c.oid = bare) WHEN true THEN tbl ELSE bare END,
                id_column));
    END IF;
END
$$;

-- stream_check_max_row(bytes): the bound on the length of a line, in bytes, if it is possible. Raises RS007 if it is not.
CREATE OR REPLACE FUNCTION stream_check_max_row(bytes bigint) RETURNS integer
LANGUAGE plpgsql AS $$
BEGIN
    IF bytes IS NULL OR bytes NOT BETWEEN 1024 AND 67108864 THEN
        PERFORM stream_refuse_argument(format('a row of at most %s bytes is not possible', bytes),
            'the bound lies between 1024 and 67108864 (64 MiB), which is what clients take');
    END IF;
    RETURN bytes;
END
$$;

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

-- stream_check_positions(positions): refuses a table that cannot hold the positions that writers publish themselves.
CREATE OR REPLACE FUNCTION stream_check_positions(positions regclass) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF positions IS NULL THEN
        PERFORM stream_refuse_argument('the method positions_table needs the table in which the writers publish',
            'name it; it has the columns stream_name, instance_name and stream_id');
    END IF;
    IF stream_column_type(positions, 'stream_name') IS NULL OR stream_column_type(positions, 'instance_name') IS NULL
        OR stream_column_type(positions, 'stream_id') NOT IN ('bigint'::regtype, 'integer'::regtype) THEN
        PERFORM stream_refuse(format('column stream_id of %s is not a bigint', positions),
            'it holds the id up to which the writer has finished');
    END IF;
END
$$;

-- stream_check_parts(s): refuses an entry that cannot be a stream (RS002 or RS007, the reason, the remedy), apart from its
-- name; returns the type of its rows.
CREATE OR REPLACE FUNCTION stream_check_parts(s stream) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    fault record;
BEGIN
    IF s.method IS NULL OR s.method NOT IN ('lock_watch', 'reservation', 'positions_table') THEN
        PERFORM stream_refuse_argument(format('there is no method %L', s.method),
            'methods: lock_watch, reservation, positions_table');
    END IF;
    PERFORM stream_check_table(s.relation);
    PERFORM stream_check_id(s.relation, s.id_column);
    IF s.instance_column IS NOT NULL THEN
        PERFORM stream_column_type(s.relation, s.instance_column);
    END IF;
    IF s.sequence IS NULL THEN
        PERFORM stream_refuse(format('no sequence feeds column %I of %s', s.id_column, s.relation), format(
            'run: ALTER TABLE %s ALTER COLUMN %I ADD GENERATED BY DEFAULT AS IDENTITY, or name the sequence that the '
            'application takes its ids from', s.relation, s.id_column));
    END IF;
    SELECT * INTO fault FROM stream_sequence_fault(s.sequence, s.method);
    PERFORM stream_refuse(fault.problem, fault.remedy);
    SELECT * INTO fault FROM stream_ids_fault(s);
    PERFORM stream_refuse(fault.problem, fault.remedy);
    IF s.method = 'positions_table' THEN
        PERFORM stream_check_positions(s.positions);
    ELSIF s.positions IS NOT NULL THEN
        PERFORM stream_refuse_argument('a table of positions goes with the method positions_table only', 'leave it out');
    END IF;
    PERFORM stream_reader_ensure(r) FROM unnest(ARRAY[s.relation, s.sequence, s.positions]) r WHERE r IS NOT NULL;
    RETURN stream_check_row(s.relation, s.id_column, s.row_sql);
END
$$;

-- stream_check(s): the same, and refuses a name that is taken or cannot be one.
CREATE OR REPLACE FUNCTION stream_check(s stream) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM stream_check_name(s.name);
    RETURN stream_check_parts(s);
END
$$;
