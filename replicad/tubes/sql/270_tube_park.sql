-- tube_park(tube, partitions, partition, term, seq, ids, tries, error): these ids of a pod of the partition keep
-- failing: moves them to tube_parked, with the number of tries and the error; with no ids (NULL or empty) the whole
-- pod, be it a control pod. A pod without ids left goes. Ids for a control pod are garbage that is collected on its
-- behalf: they are kept as touches of its shard, and the control pod stays. Returns how many ids (1 for a control pod);
-- 0 where the pod is gone. Raises RT002, RT005. Locks the rows of the tube, which what is parked refers to, and of the
-- lease; writes the tube and tube_parked.
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
COMMENT ON FUNCTION tube_park(text, integer, integer, bigint, bigint, bigint[], integer, text)
    IS 'Puts ids that keep failing aside';
