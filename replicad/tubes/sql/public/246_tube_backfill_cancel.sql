-- tube_backfill_cancel(tube, shard_from, shard_to): cancels the backfills of attached tables with a shard from shard_from
-- to shard_to that are scheduled or have begun; returns how many. Ids that are in the tube stay. A cancelled backfill
-- marks no end, so no reader collects garbage because of it. Waits until the piece that is being written is committed.
-- Raises RT001. Writes the tube, tube_backfill and tube_shard.
CREATE OR REPLACE FUNCTION tube_backfill_cancel(tube text, shard_from integer = 0, shard_to integer = 2147483647)
RETURNS integer
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_lock(tube);
    b tube_backfill;
    cancelled integer := 0;
    more integer;
BEGIN
    FOR b IN SELECT x.* FROM tube_backfill x
        WHERE x.tube = t.tube AND NOT x.finished AND x.shard BETWEEN shard_from AND shard_to ORDER BY x.tbl::oid
    LOOP
        PERFORM FROM tube_attachment a WHERE a.tube = b.tube AND a.tbl = b.tbl FOR NO KEY UPDATE;
        cancelled := cancelled + tube_backfill_stop(b.tube, b.tbl);
    END LOOP;
    EXECUTE tube_control_removal_sql(t.tube, 'p.payload ->> ''type'' = ''backfill_schedule'''
        ' AND p.shard BETWEEN $1 AND $2') USING shard_from, shard_to;
    GET DIAGNOSTICS more = ROW_COUNT;
    RETURN cancelled + more;
END
$$;
COMMENT ON FUNCTION tube_backfill_cancel(text, integer, integer) IS 'Cancels backfills of a range of shards';

-- tube_backfills(of_tube): the backfills of one tube or (NULL) of all that are scheduled or have begun and not finished: the
-- table, the shard, the order, the state (scheduled or running), how many ids are in the tube and how many there are
-- about. Scheduled backfills of a tube whose table cannot be read are left out. Writes nothing.
CREATE OR REPLACE FUNCTION tube_backfills(of_tube text = NULL) RETURNS TABLE (
    tube text, tbl text, shard integer, order_col text, state text, ids bigint, approx_ids bigint
)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    one text;
BEGIN
    RETURN QUERY SELECT b.tube, coalesce(tube_qualified(b.tbl), b.tbl::oid::text), b.shard, b.order_col::text,
            'running'::text, b.ids, b.approx_ids
        FROM tube_backfill b WHERE NOT b.finished AND (of_tube IS NULL OR b.tube = of_tube)
        ORDER BY b.tube, b.shard, b.started_at;
    FOR one IN SELECT r.tube FROM tube_registry r
        WHERE (of_tube IS NULL OR r.tube = of_tube) AND tube_fault(r.tube) IS NULL
        ORDER BY r.tube
    LOOP
        RETURN QUERY EXECUTE format('SELECT %L, coalesce(%I.tube_qualified((p.payload ->> ''oid'')::oid), p.payload ->> ''tbl''),'
            ' p.shard, p.payload ->> ''order_col'', ''scheduled'', 0::bigint, NULL::bigint FROM %s p'
            ' WHERE cardinality(p.ids) = 0 AND p.payload ->> ''type'' = ''backfill_schedule'' ORDER BY p.seq LIMIT 1000',
            one, current_schema(), tube_relation(one));
    END LOOP;
END
$$;
COMMENT ON FUNCTION tube_backfills(text) IS 'Backfills that are scheduled or have begun';
