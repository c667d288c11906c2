-- tube_count(t, partition, backfill, exact): what tube_stats says of one kind of pods in one partition. Writes nothing.
CREATE OR REPLACE FUNCTION tube_count(
    t tube_registry, partition integer, backfill boolean, exact integer,
    OUT pods bigint, OUT ids bigint, OUT min_seq bigint, OUT max_seq bigint,
    OUT min_ts timestamptz, OUT max_ts timestamptz, OUT estimated boolean
)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    source text := format('%s WHERE (shard %% %s) = %s AND (op = ''B'')::integer = %s',
        tube_relation(t.tube), t.partitions, partition, backfill::integer);
    plan json;
BEGIN
    EXECUTE format('SELECT count(*), coalesce(sum(cardinality(ids)), 0), count(*) > $1 FROM ('
        'SELECT ids FROM %s ORDER BY seq LIMIT $1 + 1) AS oldest', source) INTO pods, ids, estimated USING exact;
    EXECUTE format('SELECT seq, ts FROM %s ORDER BY seq LIMIT 1', source) INTO min_seq, min_ts;
    EXECUTE format('SELECT seq, ts FROM %s ORDER BY seq DESC LIMIT 1', source) INTO max_seq, max_ts;
    IF estimated THEN
        EXECUTE format('EXPLAIN (FORMAT JSON) SELECT FROM %s', source) INTO plan;
        ids := ids / pods * greatest(pods, (plan #>> '{0,Plan,Plan Rows}')::bigint);
        pods := greatest(pods, (plan #>> '{0,Plan,Plan Rows}')::bigint);
    END IF;
END
$$;
COMMENT ON FUNCTION tube_count(tube_registry, integer, boolean, integer) IS 'Counts or estimates one kind of pods in one partition';

-- tube_count_control(tube, partitions, partition): how many control pods a partition has. Writes nothing.
CREATE OR REPLACE FUNCTION tube_count_control(tube text, partitions integer, partition integer) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    pods bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM %I WHERE cardinality(ids) = 0 AND shard %% $1 = $2', tube)
        INTO pods USING partitions, partition;
    RETURN pods;
END
$$;
COMMENT ON FUNCTION tube_count_control(text, integer, integer) IS 'How many control pods a partition has';
