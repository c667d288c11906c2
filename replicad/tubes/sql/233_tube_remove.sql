-- tube_removal_sql(deletion): the statement that runs a DELETE of pods and returns how many there were, and their shards.
-- Writes nothing itself.
CREATE OR REPLACE FUNCTION tube_removal_sql(deletion text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT format('WITH gone AS (%s RETURNING shard)'
        ' SELECT coalesce(sum(counted.pods), 0)::bigint, array_agg(counted.shard)'
        ' FROM (SELECT gone.shard, count(*) AS pods FROM gone GROUP BY gone.shard) AS counted', deletion)
$$;

-- tube_remove(tube, partitions, partition, seqs): deletes those of the pods that belong to the partition, without any
-- check; returns how many. Writes the tube and tube_shard.
CREATE OR REPLACE FUNCTION tube_remove(tube text, partitions integer, partition integer, seqs bigint[]) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    removed bigint;
    shards integer[];
BEGIN
    EXECUTE tube_removal_sql(format('DELETE FROM %I WHERE seq = ANY ($1) AND (shard %% %s) = %s',
        tube, partitions, partition)) INTO removed, shards USING seqs;
    PERFORM tube_shards_note(tube, shards);
    RETURN removed;
END
$$;
