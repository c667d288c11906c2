-- tube_plan(tube, partitions, partition, term, after_regular, after_backfill, upto, max_pods, max_ids, max_backfill):
-- how far a reader at the cursor (after_regular, after_backfill) gets: the cursor behind the last of its next pods, the
-- number of pods and of ids.
--   upto          the tube's position: no pod can appear at or below it
--   max_pods      at most so many pods
--   max_backfill  at most so many backfill pods among them (NULL: no limit); they come after all regular pods
--   max_ids       about so many ids (NULL: no limit, and ids is NULL): a pod that exceeds it is left out, unless it is
--                 the first
-- Raises RT001, RT002, RT003, RT005, RT006. Writes nothing. It is volatile, so that the snapshot of the pods is taken
-- after the lock on their table: a stable function would find no pod where it waits for a session that rewrites the table.
CREATE OR REPLACE FUNCTION tube_plan(
    tube text, partitions integer, partition integer, term bigint,
    after_regular bigint, after_backfill bigint, upto bigint,
    max_pods integer, max_ids bigint = NULL, max_backfill integer = NULL,
    OUT regular bigint, OUT backfill bigint, OUT pods integer, OUT ids bigint
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_find(tube);
    half record;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_lease_check(tube, partitions, partition, term);
    IF partitions <> 1 THEN
        PERFORM tube_check_partitions(tube, partitions);
    END IF;
    IF greatest(after_regular, after_backfill) > upto THEN
        PERFORM tube_refuse('RT006',
            format('cursor %s.%s lies beyond position %s of tube %L', after_regular, after_backfill, upto, tube),
            'pods below it can still appear, or the database was restored from a backup: read from the start');
    END IF;
    backfill := after_backfill;
    SELECT * INTO half FROM tube_plan_half(
        tube_range_sql(t, partitions, partition, false, after_regular, upto, max_pods), max_ids, 1);
    regular := coalesce(half.last, after_regular);
    pods := half.pods;
    ids := half.ids;
    max_backfill := least(max_backfill, max_pods - pods);
    IF half.cut OR max_backfill <= 0 THEN
        RETURN;
    END IF;
    SELECT * INTO half FROM tube_plan_half(
        tube_range_sql(t, partitions, partition, true, after_backfill, upto, max_backfill, true),
        max_ids - ids, 1 - least(pods, 1));
    backfill := coalesce(half.last, after_backfill);
    pods := pods + half.pods;
    ids := ids + half.ids;
END
$$;

-- tube_plan_half(range, max_ids, at_least): the first pods of a range, by seq, that have at most max_ids ids together,
-- but at least at_least pods: the last seq (NULL: none), the number of pods and (with max_ids) of ids, and whether
-- max_ids left pods out. Writes nothing.
CREATE OR REPLACE FUNCTION tube_plan_half(
    range text, max_ids bigint, at_least integer, OUT last bigint, OUT pods integer, OUT ids bigint, OUT cut boolean
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF max_ids IS NULL THEN
        EXECUTE format('SELECT max(seq), count(*), false FROM (%s) AS range', range) INTO last, pods, cut;
    ELSE
        EXECUTE format('SELECT max(seq) FILTER (WHERE fits), count(*) FILTER (WHERE fits),'
            ' coalesce(max(upto) FILTER (WHERE fits), 0), count(*) FILTER (WHERE fits) < count(*)'
            ' FROM (SELECT seq, upto, upto <= $1 OR n <= $2 AS fits FROM (SELECT seq, row_number() OVER w AS n,'
            ' sum(cardinality(ids)) OVER w AS upto FROM (%s) AS range WINDOW w AS (ORDER BY seq)) AS counted'
            ') AS judged', range)
            INTO last, pods, ids, cut USING max_ids, at_least;
    END IF;
END
$$;
