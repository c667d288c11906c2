-- tube_ensure_exists(tube, partitions, predicate, path): creates the tube, or alters it; writes nothing if the tube is
-- already so. predicate is SQL on a row of any attached table: only rows for which it is true are touched and
-- backfilled. Its names are looked up in path, by default the caller's search_path. Pods and attachments are kept; a
-- table that was dropped by hand is created again. Raises RT005. Writes tube_registry, the tube's table, indexes,
-- {tube}_touch and its trigger functions.
--
-- A new number of partitions needs a new index, and writers wait while it is built. For a tube with millions of pods
-- choose a time with few writes, and set lock_timeout if there are long transactions that write.
CREATE OR REPLACE FUNCTION tube_ensure_exists(
    tube text, partitions integer = 1, predicate text = NULL, path name[] = current_schemas(false)
) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    safe name[] := CASE WHEN predicate IS NULL THEN '{}' ELSE tube_safe_path(path) END;
    a tube_attachment;
BEGIN
    PERFORM tube_check_name(tube);
    IF partitions IS NULL OR partitions NOT BETWEEN 1 AND 32768 THEN
        PERFORM tube_refuse('RT008',
            format('tube %L cannot have %s partitions', tube, coalesce(partitions::text, 'NULL')),
            'a tube has 1 to 32768 partitions');
    END IF;
    INSERT INTO tube_registry VALUES (tube, partitions, predicate, safe) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        PERFORM tube_table_ensure(tube);
    ELSE
        PERFORM tube_lock(tube);
        IF to_regclass(quote_ident(tube)) IS NULL THEN
            PERFORM tube_table_ensure(tube);  -- it was dropped by hand
        END IF;
        UPDATE tube_registry r
            SET partitions = tube_ensure_exists.partitions, predicate = tube_ensure_exists.predicate, path = safe
            WHERE r.tube = tube_ensure_exists.tube AND (r.partitions, r.predicate, r.path)
                IS DISTINCT FROM (tube_ensure_exists.partitions, tube_ensure_exists.predicate, safe);
    END IF;
    FOR a IN SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl
        WHERE x.tube = tube_ensure_exists.tube AND x.tbl = x.root
    LOOP
        PERFORM tube_check_expression(a.tbl, 'predicate', predicate, safe);
        PERFORM tube_trigger_ensure(tube, a.predicate, a.routing, a.path, a.root);
    END LOOP;
    BEGIN
        PERFORM tube_trigger_ensure(tube, NULL, NULL, '{}');
    EXCEPTION WHEN syntax_error THEN
        PERFORM tube_refuse('RT005',
            format('the predicate %L is not SQL: %s', predicate, split_part(SQLERRM, E'\n', 1)),
            'write SQL on the columns that the attached tables have in common');
    END;
    PERFORM tube_index_ensure(tube, partitions);
    PERFORM tube_touch_ensure(tube);
END
$$;
COMMENT ON FUNCTION tube_ensure_exists(text, integer, text, name[]) IS 'Creates a tube, or alters it to be as asked';
