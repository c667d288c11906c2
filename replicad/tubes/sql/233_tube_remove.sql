-- tube_remove(tube, partitions, partition, seqs): deletes those of the pods that belong to the partition, without any
-- check; returns how many. Writes the tube.
CREATE OR REPLACE FUNCTION tube_remove(tube text, partitions integer, partition integer, seqs bigint[]) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    removed bigint;
BEGIN
    EXECUTE format('DELETE FROM %I WHERE seq = ANY ($1) AND (shard %% %s) = %s', tube, partitions, partition)
        USING seqs;
    GET DIAGNOSTICS removed = ROW_COUNT;
    RETURN removed;
END
$$;
COMMENT ON FUNCTION tube_remove(text, integer, integer, bigint[]) IS 'Deletes pods without asking for a lease';
