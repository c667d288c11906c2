-- tube_ack(tube, partitions, partition, term, seqs): deletes pods that the downstream has, if they belong to the
-- partition, and returns how many. Fewer than given: some were deleted before or belong to another partition.
-- The number of partitions is that under which the pods were read. The lease guarantees that no other worker has them.
-- Raises RT002, RT005. Locks the lease's row, writes the tube.
CREATE OR REPLACE FUNCTION tube_ack(tube text, partitions integer, partition integer, term bigint, seqs bigint[])
RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_lease_hold(tube, partitions, partition, term);
    RETURN tube_remove(tube, partitions, partition, seqs);
END
$$;

-- tube_ack_upto(tube, partitions, partition, term, after_regular, after_backfill, upto_regular, upto_backfill): the
-- same for all regular pods with after_regular < seq <= upto_regular and all backfill pods in their range.
CREATE OR REPLACE FUNCTION tube_ack_upto(
    tube text, partitions integer, partition integer, term bigint,
    after_regular bigint, after_backfill bigint, upto_regular bigint, upto_backfill bigint
) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_lease_hold(tube, partitions, partition, term);
    RETURN tube_remove_range(tube, partitions, partition, false, after_regular, upto_regular)
        + tube_remove_range(tube, partitions, partition, true, after_backfill, upto_backfill);
END
$$;

-- tube_remove_range(tube, partitions, partition, backfill, after, upto): deletes a partition's pods of one priority
-- with after < seq <= upto, without any check; returns how many. Writes the tube and tube_shard.
CREATE OR REPLACE FUNCTION tube_remove_range(
    tube text, partitions integer, partition integer, backfill boolean, after bigint, upto bigint
) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    removed bigint := 0;
    shards integer[];
BEGIN
    IF after < upto THEN
        EXECUTE tube_removal_sql(format('DELETE FROM %I WHERE (shard %% %s) = %s AND (op = ''B'')::integer = %s'
            ' AND seq > %s AND seq <= %s AND %s',
            tube, partitions, partition, backfill::integer,
            greatest(after, tube_low_of(tube, partitions, partition, backfill, upto)), upto, tube_served_sql())) INTO removed, shards;
        PERFORM tube_shards_note(tube, shards);
    END IF;
    RETURN removed;
END
$$;
