-- tube_low_of(tube, partitions, partition, backfill, upto): the low-water mark of a partition's pods of one priority; 0 if
-- there is none. A mark above upto, the tube's position, is not believed: the sequence was set back. Writes nothing.
CREATE OR REPLACE FUNCTION tube_low_of(
    tube text, partitions integer, partition integer, backfill boolean, upto bigint = 9223372036854775807
) RETURNS bigint
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT coalesce(max(l.seq), 0) FROM tube_low l
    WHERE (l.tube, l.partitions, l.partition, l.backfill) = ($1, $2, $3, $4) AND l.seq <= $5
$$;

-- tube_low_raise(tube, partitions, partition, upto): moves the low-water marks of a partition to just below its first
-- pods, but not above upto, which is the tube's position: no pod can appear at or below it. The marks of the tube's own
-- partitions that lie in it are moved too. A mark that would move by less than a thousand stays. Does nothing if there
-- is no such tube, or for a partition that consists of more than 64. Raises RT005. Writes tube_low.
CREATE OR REPLACE FUNCTION tube_low_raise(tube text, partitions integer, partition integer, upto bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry;
    own record;
    first_left bigint;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    SELECT * INTO t FROM tube_registry r WHERE r.tube = tube_low_raise.tube;
    IF NOT FOUND OR t.partitions % partitions <> 0 OR t.partitions / partitions > 64 THEN
        RETURN;
    END IF;
    FOR own IN SELECT p, backfill
        FROM generate_series(partition, t.partitions - 1, partitions) AS p, (VALUES (false), (true)) AS kinds (backfill)
        ORDER BY p, backfill  -- two who raise the same marks do it in the same order
    LOOP
        EXECUTE format('SELECT min(seq) FROM (%s) AS oldest',
            tube_range_sql(t, t.partitions, own.p, own.backfill, upto => upto, pods => 1)) INTO first_left;
        PERFORM tube_low_put(t.tube, t.partitions, own.p, own.backfill, coalesce(first_left - 1, upto));
    END LOOP;
    IF partitions <> t.partitions THEN
        PERFORM tube_low_put(t.tube, partitions, partition, k.backfill, k.seq) FROM (
            SELECT kinds.backfill, min(tube_low_of(t.tube, t.partitions, p, kinds.backfill)) AS seq
            FROM generate_series(partition, t.partitions - 1, partitions) AS p, (VALUES (false), (true)) AS kinds (backfill)
            GROUP BY 1 ORDER BY 1) AS k;
    END IF;
END
$$;

-- tube_low_put(tube, partitions, partition, backfill, seq): sets a mark, if it moves by a thousand at least. Writes
-- tube_low.
CREATE OR REPLACE FUNCTION tube_low_put(tube text, partitions integer, partition integer, backfill boolean, seq bigint)
RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    INSERT INTO tube_low AS l VALUES ($1, $2, $3, $4, $5)
    ON CONFLICT ON CONSTRAINT tube_low_pkey DO UPDATE SET seq = excluded.seq WHERE excluded.seq >= l.seq + 1000
$$;
