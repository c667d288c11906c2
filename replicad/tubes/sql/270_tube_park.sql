-- tube_park(tube, partitions, partition, term, seq, ids, tries, error): moves ids of a pod that keep failing to
-- tube_parked, with the number of tries and the error; without ids (NULL or empty) the whole pod, also a control pod. A
-- pod without remaining ids is deleted. Ids given for a control pod are garbage that a reader collects because of it:
-- they are parked as touches of its shard, and the control pod stays. Returns how many ids (1 for a control pod); 0 if
-- there is no such pod. Raises RT002, RT005. Locks the tube's row in tube_registry, to which tube_parked refers, and
-- the lease's row; writes the tube, tube_parked and tube_shard.
CREATE OR REPLACE FUNCTION tube_park(
    tube text, partitions integer, partition integer, term bigint, seq bigint, ids bigint[], tries integer, error text
) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    pod record;
    bad bigint[];
    good bigint[] := '{}';
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_keep(tube);
    PERFORM tube_lease_hold(tube, partitions, partition, term);
    EXECUTE format('LOCK TABLE %I IN ROW EXCLUSIVE MODE', tube);  -- before it is read: see tube_backfill_begin
    EXECUTE format('SELECT * FROM %I WHERE seq = $1 AND shard %% $2 = $3 FOR UPDATE', tube)
        INTO pod USING seq, partitions, partition;
    bad := pod.ids;
    IF pod.ids = '{}' AND cardinality(ids) > 0 THEN
        INSERT INTO tube_parked (tube, seq, op, shard, ids, ts, tries, error)
            VALUES (tube, pod.seq, 'T', pod.shard, ids, pod.ts,
                coalesce(tries, 1), coalesce(error, 'no error was given'));
        RETURN cardinality(ids);
    ELSIF coalesce(cardinality(ids), 0) > 0 THEN
        bad := ARRAY(SELECT u FROM unnest(pod.ids) u WHERE u = ANY (tube_park.ids));
        good := ARRAY(SELECT u FROM unnest(pod.ids) u WHERE u <> ALL (tube_park.ids));
    END IF;
    IF pod.seq IS NULL OR (bad = '{}' AND good <> '{}') THEN
        RETURN 0;
    END IF;
    PERFORM tube_shards_note(tube, ARRAY[pod.shard]);
    INSERT INTO tube_parked (tube, seq, op, shard, ids, payload, ts, tries, error)
        VALUES (tube, pod.seq, pod.op, pod.shard, bad, pod.payload, pod.ts,
            coalesce(tries, 1), coalesce(error, 'no error was given'));
    IF good = '{}' THEN
        EXECUTE format('DELETE FROM %I WHERE seq = $1', tube) USING seq;
    ELSE
        EXECUTE format('UPDATE %I SET ids = $2 WHERE seq = $1', tube) USING seq, good;
    END IF;
    RETURN greatest(cardinality(bad), 1);
END
$$;
