-- The way from pg-tube (another project with queues of this form, in another schema of the database) to these tubes.
--
-- A mirror is a trigger on the table of a tube of pg-tube: each pod that is inserted there, by its triggers or by hand, is
-- inserted into the tube here too, in the same transaction. So both record the same, and one of them can be read. Then the
-- tables are moved, each in one transaction (docs/pg-tube.md).

-- tube_pg_tube(source_schema): the tubes of pg-tube in that schema, a row for each table that is attached there (or one without a
-- table): their partitions and predicate, the table and its shard, and the oid of the table of pods. Raises RT005 if pg-tube is not
-- there. Writes nothing.
CREATE OR REPLACE FUNCTION tube_pg_tube(source_schema text)
RETURNS TABLE (tube text, source regclass, partitions integer, predicate text, tbl regclass, shard integer)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF source_schema = current_schema() OR to_regprocedure(format('%I._tube_predicate(text)', source_schema)) IS NULL
            OR to_regprocedure(format('%I.tube_list(regclass)', source_schema)) IS NULL THEN
        PERFORM tube_refuse('RT005', format('schema %I has no pg-tube', source_schema),
            'name the schema in which it is installed: --pg-schema SCHEMA. Schema of these tubes: ' || current_schema());
    END IF;
    RETURN QUERY EXECUTE format('SELECT l.tube, to_regclass(format(''%%I.%%I'', %1$L, l.tube)), l.partitions,'
        ' nullif(l.predicate, ''''), l.tbl, l.shard FROM %1$I.tube_list() AS l ORDER BY l.tube, l.shard, l.tbl', source_schema);
END
$$;

-- tube_mirror(tube, source): from now on pods that are inserted into the table of pods `source` are inserted into the tube too.
-- Returns the highest seq of a pod in `source` that is not mirrored (0: none); tube_mirror_copy copies those. Control pods of
-- backfills are left out: their numbers are of the other sequence. Seqs of the tube begin above those of `source`, so a downstream that
-- keeps the highest seq of each row can go on. Waits for the transactions that write to `source`: set lock_timeout. Raises RT001, RT005.
-- Writes {tube}_mirror(), the trigger replicad_mirror of `source`, and tube_seq.
CREATE OR REPLACE FUNCTION tube_mirror(tube text, source regclass) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $outer$
DECLARE
    t tube_registry := tube_lock(tube);
    name text := tube_object_name(tube, '_mirror');
    highest bigint;
    above bigint;
BEGIN
    IF t.keys <> 'bigint' THEN
        PERFORM tube_refuse('RT005', format('tube %L has keys of kind %s, and those of %s are numbers', tube, t.keys, source),
            'mirror it into a tube with keys of kind bigint');
    END IF;
    EXECUTE format('CREATE OR REPLACE FUNCTION %I() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER'
        ' SET search_path = pg_temp AS %L', name, format($body$
BEGIN
    INSERT INTO %s (op, shard, ids, payload)
    SELECT r.op, r.shard, r.ids[k:k + 249], r.payload
    FROM replicad_rows AS r CROSS JOIN pg_catalog.generate_series(1, greatest(cardinality(r.ids), 1), 250) AS k
    WHERE cardinality(r.ids) > 0 OR coalesce(r.payload ->> 'type', '') NOT LIKE 'backfill_%%'
    ORDER BY r.seq, k;
    RETURN NULL;
END
$body$, tube_relation(t.tube)));
    EXECUTE format('REVOKE EXECUTE ON FUNCTION %I() FROM PUBLIC', name);
    PERFORM tube_belong(format('FUNCTION %I()', name));
    EXECUTE format('CREATE OR REPLACE TRIGGER replicad_mirror AFTER INSERT ON %s REFERENCING NEW TABLE AS replicad_rows'
        ' FOR EACH STATEMENT EXECUTE FUNCTION %I()', tube_qualified(source), name);
    EXECUTE format('SELECT coalesce(max(p.seq), 0) FROM %s p', tube_qualified(source)) INTO highest;
    above := highest + 1000000000;  -- far above what other tubes of pg-tube give out meanwhile
    IF coalesce(pg_sequence_last_value('tube_seq'), 0) < above THEN
        PERFORM setval('tube_seq', above);
    END IF;
    EXECUTE format('COMMENT ON FUNCTION %I() IS %L', name, format('replicad: mirrors %s from seq %s on', source::oid, highest + 1));
    RETURN highest;
END
$outer$;
COMMENT ON FUNCTION tube_mirror(text, regclass) IS 'Records in a tube what is recorded in a tube of pg-tube';

-- tube_mirror_copy(tube, source, upto): copies the pods of `source` with a seq up to that of tube_mirror, which are there still; returns
-- how many. Raises RT001. Writes the tube.
CREATE OR REPLACE FUNCTION tube_mirror_copy(tube text, source regclass, upto bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_keep(tube);
    pods bigint;
BEGIN
    EXECUTE format('INSERT INTO %s (op, shard, ids, payload) SELECT r.op, r.shard, r.ids[k:k + 249], r.payload'
        ' FROM %s AS r CROSS JOIN generate_series(1, greatest(cardinality(r.ids), 1), 250) AS k'
        ' WHERE r.seq <= $1 AND (cardinality(r.ids) > 0 OR coalesce(r.payload ->> ''type'', '''') NOT LIKE ''backfill_%%'')'
        ' ORDER BY r.seq, k', tube_relation(t.tube), tube_qualified(source)) USING upto;
    GET DIAGNOSTICS pods = ROW_COUNT;
    EXECUTE format('COMMENT ON FUNCTION %I() IS %L', tube_object_name(tube, '_mirror'),
        format('replicad: mirrors %s, complete', source::oid));
    RETURN pods;
END
$$;

-- tube_mirror_state(tube, source): NULL if the tube does not mirror this table of pods; `begun` if the pods from before were not
-- copied; else `complete`. Writes nothing.
CREATE OR REPLACE FUNCTION tube_mirror_state(tube text, source regclass) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN obj_description(p.oid, 'pg_proc') LIKE '% complete' THEN 'complete' ELSE 'begun' END
    FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
    WHERE g.tgrelid = source AND p.pronamespace = quote_ident(current_schema())::regnamespace
        AND p.proname = tube_object_name(tube, '_mirror') AND g.tgenabled IN ('O', 'A')
$$;

-- tube_mirror_end(tube, source): ends the mirror. Writes the trigger and the function of tube_mirror.
CREATE OR REPLACE FUNCTION tube_mirror_end(tube text, source regclass) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format('DROP TRIGGER IF EXISTS replicad_mirror ON %s', tube_qualified(source));
    EXECUTE format('DROP FUNCTION IF EXISTS %I()', tube_object_name(tube, '_mirror'));
END
$$;

-- tube_move(source_schema, tbl): detaches a table from all tubes of pg-tube and attaches it to the tubes of the same names here, in this
-- transaction: a write before it is recorded there and mirrored, a write after it is recorded here. {table}_touch is replaced too.
-- Raises RT005 if a tube is missing here or does not mirror, or if the table is not attached there. Writes what pg-tube's
-- tube_table_ensure_detached and tube_table_ensure_attached write.
CREATE OR REPLACE FUNCTION tube_move(source_schema text, tbl regclass) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    attached record;
    arguments CONSTANT text := '(bigint[], character, jsonb, integer)';
    own_schema name;
    own_name name;
    touch boolean;
    tubes text[];
    shards integer[];
BEGIN
    FOR attached IN SELECT p.* FROM tube_pg_tube(source_schema) p WHERE p.tbl = tube_move.tbl LOOP
        IF tube_mirror_state(attached.tube, attached.source) IS DISTINCT FROM 'complete' THEN
            PERFORM tube_refuse('RT005', format('tube %L does not mirror %s completely, so touches that wait there would be '
                'missing here', attached.tube, attached.source), format('run: replicad tubes pg-tube mirror %s', attached.tube));
        END IF;
        tubes := tubes || attached.tube;
        shards := shards || attached.shard;
    END LOOP;
    IF tubes IS NULL THEN
        PERFORM tube_refuse('RT005', format('table %s is not attached to a tube of pg-tube in schema %I', tbl, source_schema),
            'replicad tubes pg-tube check shows its tables');
    END IF;
    -- {table}_touch stays the same function with another body, since programs call it at this moment, and have prepared statements.
    -- pg-tube drops it by its name, so it has another one meanwhile.
    SELECT n.nspname, tube_object_name(c.relname, '_touch') INTO own_schema, own_name
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl;
    touch := to_regprocedure(format('%I.%I%s', own_schema, own_name, arguments)) IS NOT NULL;
    IF touch THEN
        EXECUTE format('ALTER FUNCTION %I.%I%s RENAME TO replicad_moving', own_schema, own_name, arguments);
    END IF;
    EXECUTE format('SELECT %I.tube_table_ensure_detached(NULL, %L::oid::regclass)', source_schema, tbl::oid);
    IF touch THEN
        EXECUTE format('ALTER FUNCTION %I.replicad_moving%s RENAME TO %I', own_schema, arguments, own_name);
        EXECUTE format('CREATE OR REPLACE FUNCTION %I.%I(ids bigint[], op char = ''T'', payload jsonb = NULL, chunk_size integer = 250)'
            ' RETURNS void LANGUAGE plpgsql AS %L', own_schema, own_name,
            format(E'\n-- replicad: touches the tubes of schema %I\nBEGIN END', current_schema()));  -- it is ours to replace
    END IF;
    FOR n IN 1..cardinality(tubes) LOOP
        PERFORM tube_table_ensure_attached(tubes[n], tbl, shards[n], key => '{id}');
    END LOOP;
END
$$;
COMMENT ON FUNCTION tube_move(text, regclass) IS 'Moves a table from the tubes of pg-tube to those of the same names';
