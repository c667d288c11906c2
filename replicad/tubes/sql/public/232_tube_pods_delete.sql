-- tube_pods_delete(tube, partitions, partition, seqs): deletes these pods of the partition, for readers without a
-- lease; returns how many there were. Raises RT001, RT003, RT005. Locks the tube's row in tube_registry, writes the
-- tube.
CREATE OR REPLACE FUNCTION tube_pods_delete(tube text, partitions integer, partition integer, seqs bigint[])
RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM FROM tube_registry r WHERE r.tube = tube_pods_delete.tube FOR SHARE;
    PERFORM tube_check_partitions(tube, partitions);
    RETURN tube_remove(tube, partitions, partition, seqs);
END
$$;
COMMENT ON FUNCTION tube_pods_delete(text, integer, integer, bigint[]) IS 'Deletes pods of a partition';
