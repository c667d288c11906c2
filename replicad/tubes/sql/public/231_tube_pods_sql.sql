-- tube_pods_sql(tube, partitions, partition, exclude_backfill): the query that reads one partition: regular pods by
-- seq, then, unless they are excluded, backfill pods by seq. A LIMIT may be appended. The query raises RT003 if the
-- number of partitions has changed when it runs. Raises RT001, RT003, RT005. Writes nothing.
--
-- The query is correct for a single reader that deletes the pods that it has read. A reader that uses a cursor must not
-- read beyond the tube's position: it would miss pods of transactions that commit late (see tube_plan).
CREATE OR REPLACE FUNCTION tube_pods_sql(
    tube text, partitions integer, partition integer, exclude_backfill boolean = false
) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_find(tube);
    statement text;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_check_partitions(tube, partitions);
    -- The check in each half is not parallel safe, and must not be: parallel workers would mix the halves.
    SELECT string_agg(format(
            'SELECT seq, op, shard, ids, payload, ts FROM (%s) AS half WHERE %I.tube_check_partitions(%L, %s)',
            tube_range_sql(t, partitions, partition, backfill), current_schema(), tube, partitions),
            ' UNION ALL ' ORDER BY backfill)
        INTO statement
        FROM (VALUES (false), (true)) AS halves (backfill) WHERE NOT (backfill AND exclude_backfill);
    RETURN statement;
END
$$;
COMMENT ON FUNCTION tube_pods_sql(text, integer, integer, boolean) IS 'The query that reads one partition of a tube';
