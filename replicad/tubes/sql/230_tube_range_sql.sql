-- tube_served_sql(): the condition that leaves out the pods for the backfiller. Writes nothing.
CREATE OR REPLACE FUNCTION tube_served_sql() RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT '(cardinality(ids) > 0 OR payload ->> ''type'' IS DISTINCT FROM ''backfill_schedule'')'
$$;

-- tube_range_sql(t, partitions, partition, backfill, after, upto, pods, served): the query of a partition's pods of one
-- priority with after < seq <= upto, by seq, at most pods of them (NULL: no limit). served leaves out the control pods
-- backfill_schedule, which are for the backfiller. It begins behind the low-water mark (tube_low). Writes nothing.
--
-- The tube's index serves its own number of partitions. A larger partition that consists of up to 64 of them (mostly
-- 0/1) is read as their union. A range of another number of partitions, planned before a change, uses the primary key.
CREATE OR REPLACE FUNCTION tube_range_sql(
    t tube_registry, partitions integer, partition integer, backfill boolean,
    after bigint = 0, upto bigint = 9223372036854775807, pods bigint = NULL, served boolean = false
) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN count(*) = 1 THEN min(part.query)
        ELSE format('SELECT * FROM (%s) AS pods ORDER BY seq%s',
            string_agg(format('(%s)', part.query), ' UNION ALL ' ORDER BY part.p), ' LIMIT ' || pods) END
    FROM (
        SELECT numbered.p, format(
            'SELECT * FROM %s WHERE (shard %% %s) = %s AND (op = ''B'')::integer = %s'
            ' AND seq > %s AND seq <= %s%s ORDER BY seq%s',
            tube_relation(t.tube), numbered.n, numbered.p, $4::integer, greatest(after, low.seq), upto,
            CASE WHEN served AND $4 THEN ' AND ' || tube_served_sql() END, ' LIMIT ' || pods) AS query
        FROM (
            SELECT t.partitions AS n, p
            FROM generate_series(partition, t.partitions - 1, partitions) AS p
            WHERE t.partitions % partitions = 0 AND t.partitions / partitions <= 64
            UNION ALL
            SELECT partitions, partition WHERE t.partitions % partitions <> 0 OR t.partitions / partitions > 64
        ) AS numbered
        LEFT JOIN tube_low AS low ON low.tube = t.tube AND low.partitions = numbered.n AND low.partition = numbered.p
            AND low.backfill = $4 AND low.seq <= $6  -- a mark above the position: the sequence was set back
    ) AS part
$$;

-- tube_check_partition(partitions, partition): raises RT005 unless 0 <= partition < partitions <= 32768. Writes
-- nothing.
CREATE OR REPLACE FUNCTION tube_check_partition(partitions integer, partition integer) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path FROM CURRENT AS $$
BEGIN
    IF (partitions BETWEEN 1 AND 32768 AND partition BETWEEN 0 AND partitions - 1) IS NOT TRUE THEN
        PERFORM tube_refuse('RT005', format('%s/%s is no partition', partition, partitions),
            'a partition is written 0/2, 1/2: counted from 0, below their number');
    END IF;
END
$$;

-- tube_check_partitions(tube, partitions): true; raises RT003 if the tube has another number of partitions, RT001 if
-- there is no such tube. Writes nothing.
CREATE OR REPLACE FUNCTION tube_check_partitions(tube text, partitions integer) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    present integer := (tube_find(tube)).partitions;
BEGIN
    IF present IS DISTINCT FROM partitions THEN
        PERFORM tube_refuse('RT003', format('tube %L has %s partitions and not %s', tube, present, partitions),
            format('go on with %s partitions', present));
    END IF;
    RETURN true;
END
$$;
