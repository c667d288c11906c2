-- tube_touch_ensure(tube): creates {tube}_touch(shard, ids, op, payload, chunk_size). Writes that function.
--
-- {tube}_touch inserts pods of at most chunk_size ids in the given order and returns how many. Without ids it inserts
-- one control pod with the payload; without ids and payload, nothing. NULLs among the ids are left out. Raises RT005.
-- It runs with its owner's rights: every user with USAGE on this schema may call it. Writes the tube.
CREATE OR REPLACE FUNCTION tube_touch_ensure(tube text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $outer$
DECLARE
    name text := tube_object_name(tube, '_touch');
    body text := format($body$
DECLARE
    touched bigint[] := ARRAY(SELECT u FROM unnest(ids) u WHERE u IS NOT NULL);
    pods bigint;
BEGIN
    PERFORM %2$I.tube_check_touch(shard, op, chunk_size);
    IF touched = '{}' AND payload IS NULL THEN
        RETURN 0;
    END IF;
    INSERT INTO %1$s (op, shard, ids, payload)
    SELECT %3$s, $1, touched[k:k + chunk_size - 1], $4
    FROM generate_series(1, greatest(cardinality(touched), 1), chunk_size) AS k ORDER BY k;
    GET DIAGNOSTICS pods = ROW_COUNT;
    RETURN pods;
END
$body$, tube_relation(tube), current_schema(), tube_op_sql('$3'));
BEGIN
    IF NOT EXISTS (SELECT FROM pg_proc p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname = name
            AND p.prosrc = body) THEN
        EXECUTE format('CREATE OR REPLACE FUNCTION %I(shard integer, ids bigint[], op character, payload jsonb = NULL,'
            ' chunk_size integer = 250) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_temp'
            ' AS %L', name, body);
        EXECUTE format('COMMENT ON FUNCTION %I(integer, bigint[], character, jsonb, integer) IS %L',
            name, 'replicad: puts ids or a control pod into tube ' || tube);
        PERFORM tube_belong(format('FUNCTION %I(integer, bigint[], character, jsonb, integer)', name));
    END IF;
END
$outer$;

-- tube_check_touch(shard, op, chunk_size): raises RT005 for arguments that no pod can have. Writes nothing.
-- ids are stored in the row, neither compressed nor out of line. So a pod must fit into a page of 8 kB; 900 ids do.
CREATE OR REPLACE FUNCTION tube_check_touch(shard integer, op character, chunk_size integer) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    IF shard IS NULL OR shard < 0 THEN
        PERFORM tube_refuse('RT005',
            format('shard %s: a shard is a whole number from 0 up', coalesce(shard::text, 'NULL')),
            'give the number of the shard that the ids belong to');
    ELSIF op IS NULL OR op NOT IN ('I', 'U', 'D', 'T', 'B') THEN
        PERFORM tube_refuse('RT005', format('there is no operation %L', op),
            'I is insert, U update, D delete, T touch, B backfill');
    ELSIF chunk_size IS NULL OR chunk_size NOT BETWEEN 1 AND 900 THEN
        PERFORM tube_refuse('RT005', format('pods of %s ids: they have 1 to 900', coalesce(chunk_size::text, 'NULL')),
            'the default is 250');
    END IF;
END
$$;
