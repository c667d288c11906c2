-- tube_fault(tube): why the tube's table cannot be read; NULL if it can. Waits only briefly for its lock and keeps it
-- until the transaction ends, so that later reads do not wait. Writes nothing.
CREATE OR REPLACE FUNCTION tube_fault(tube text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET lock_timeout = '200ms' AS $$
BEGIN
    EXECUTE format('SELECT seq::bigint, (op = ''B'')::integer, shard::integer, cardinality(ids), payload ->> ''type'', ts'
        ' FROM %s LIMIT 0', tube_relation(tube));
    RETURN NULL;
EXCEPTION WHEN OTHERS THEN
    RETURN SQLERRM;
END
$$;
COMMENT ON FUNCTION tube_fault(text) IS 'Why a tube''s table cannot be read';

-- tube_count(t, partition, backfill, exact): the columns of tube_stats for one kind of pods in one partition; all NULL
-- if t is NULL. Writes nothing.
CREATE OR REPLACE FUNCTION tube_count(
    t tube_registry, partition integer, backfill boolean, exact integer,
    OUT pods bigint, OUT ids bigint, OUT min_seq bigint, OUT max_seq bigint,
    OUT min_ts timestamptz, OUT max_ts timestamptz, OUT estimated boolean
)
LANGUAGE plpgsql STABLE STRICT SET search_path FROM CURRENT AS $$
DECLARE
    condition text := format(
        '(shard %% %s) = %s AND (op = ''B'')::integer = %s', t.partitions, partition, backfill::integer);
    pages bigint := pg_relation_size(tube_relation(t.tube)) / current_setting('block_size')::integer;
    share numeric := least(100, 100 * 200 / greatest(pages, 1)::numeric);  -- in per cent: about 200 pages
BEGIN
    EXECUTE format('SELECT count(*), coalesce(sum(cardinality(ids)), 0), count(*) > $1 FROM (%s) AS oldest',
        tube_range_sql(t, t.partitions, partition, backfill, pods => exact + 1)) INTO pods, ids, estimated USING exact;
    EXECUTE format('SELECT seq, ts FROM (%s) AS oldest',
        tube_range_sql(t, t.partitions, partition, backfill, pods => 1)) INTO min_seq, min_ts;
    EXECUTE format(
        'SELECT seq, ts FROM %I WHERE %s AND seq > 0 AND seq <= 9223372036854775807 ORDER BY seq DESC LIMIT 1',
        t.tube, condition) INTO max_seq, max_ts;
    IF estimated THEN
        EXECUTE format('SELECT greatest($1, count(*) * 100 / %1$s), greatest($2, sum(cardinality(ids)) * 100 / %1$s)'
            ' FROM %2$I TABLESAMPLE SYSTEM (%1$s) WHERE %3$s', share, t.tube, condition) INTO pods, ids USING pods, ids;
    END IF;
END
$$;
COMMENT ON FUNCTION tube_count(tube_registry, integer, boolean, integer)
    IS 'Counts or estimates one kind of pods in one partition';

-- tube_count_control(tube, partitions, partition): the number of control pods of a partition; NULL if tube is NULL.
-- Writes nothing.
CREATE OR REPLACE FUNCTION tube_count_control(tube text, partitions integer, partition integer) RETURNS bigint
LANGUAGE plpgsql STABLE STRICT SET search_path FROM CURRENT AS $$
DECLARE
    pods bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM %I WHERE cardinality(ids) = 0 AND shard %% $1 = $2', tube)
        INTO pods USING partitions, partition;
    RETURN pods;
END
$$;
COMMENT ON FUNCTION tube_count_control(text, integer, integer) IS 'How many control pods a partition has';
