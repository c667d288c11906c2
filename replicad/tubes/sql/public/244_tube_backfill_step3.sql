-- tube_backfill_step3(step1, tube, tbl, order_col, shard, fetch_chunk_size, insert_chunk_size): puts all ids of the
-- table that pass the predicates into the tube, in the order of order_col, between control pods backfill_start and
-- backfill_end; returns how many. A shard that is already being backfilled is skipped: NULL.
-- With a routing, shards that the table once had rows in get control pods too: there may be garbage of them downstream.
--   step1              the result of step 1; step 2 must have been called after it
--   shard              if there is no routing; by default the attachment's
--   fetch_chunk_size   ids between two NOTICEs of progress
-- Raises RT001, RT005. Writes the tube and tube_backfill. It is one transaction, during which the tube's position does
-- not move and regular pods wait. For large tables use tube_backfill_chunk.
CREATE OR REPLACE FUNCTION tube_backfill_step3(
    step1 text, tube text, tbl regclass, order_col text, shard integer = NULL,
    fetch_chunk_size integer = 20000, insert_chunk_size integer = 250
) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT SET row_security = off AS $$
DECLARE
    t tube_registry := tube_find(tube);
    a tube_attachment := tube_attached(tube, tbl, order_col);
    home integer := coalesce(shard, a.shard);
    path text := tube_path_text(t.path || a.path);
    source text := tube_backfill_source(a, order_col, home);
    shards integer[] := ARRAY[home];
    numbered text;
    inserted bigint;
BEGIN
    PERFORM tube_check_touch(home, 'B', insert_chunk_size);
    IF a.routing IS NOT NULL THEN
        shards := ARRAY(
            SELECT unnest(tube_backfill_shards(a.tbl, source, path)) UNION SELECT unnest(tube_shards_past(a)) ORDER BY 1);
    END IF;
    IF NOT tube_backfill_begin(a, step1, order_col, home, shards) THEN
        RETURN NULL;
    END IF;
    numbered := format('SELECT stored.shard, stored.id, row_number() OVER (%s ORDER BY stored.sort_key) - 1 AS n'
        ' FROM (%s) AS stored', CASE WHEN a.routing IS NOT NULL THEN 'PARTITION BY stored.shard' END, source);
    IF tube_runs_as(a.tbl) IS NOT NULL THEN
        numbered := format('SELECT r.tube_shard AS shard, r.id, r.n FROM %I.tube_owner_rows(%L::oid::regclass, %L, %L) AS r',
            current_schema(), a.tbl::oid,
            format('SELECT owned.shard AS tube_shard, owned.id, owned.n FROM (%s) AS owned', numbered), path);
    END IF;
    inserted := tube_insert_numbered(ARRAY[a.tube], numbered,
        path, CASE WHEN a.routing IS NULL THEN home END, 'B',
        (SELECT b.approx_ids FROM tube_backfill b WHERE b.tube = a.tube AND b.tbl = a.tbl),
        greatest(fetch_chunk_size, 1), insert_chunk_size);
    PERFORM tube_backfill_progress(a, inserted, true);
    RETURN inserted;
END
$$;
COMMENT ON FUNCTION tube_backfill_step3(text, text, regclass, text, integer, integer, integer)
    IS 'Third step of a backfill: all ids of a table';
