-- tube_backfill_chunk(step1, tube, tbl, order_col, shard, max_ids, insert_chunk_size): step 3 of a backfill in pieces:
-- puts the next max_ids ids into the tube and records where it stopped. ids is how many it put (NULL if the shard is
-- skipped, see step 3), finished whether that was the end. Each call is a short transaction; regular pods are read
-- between the calls, and a crash loses no progress. The next call, from any session, goes on with the start_seq, order
-- and shard of the first call. An index on order_col makes the calls cheap; without one each reads the whole table. A
-- row whose place in the order changes meanwhile may be missed or put twice; its change has touched it anyway. Raises
-- RT001, RT005. Writes the tube and tube_backfill.
CREATE OR REPLACE FUNCTION tube_backfill_chunk(
    step1 text, tube text, tbl regclass, order_col text, shard integer = NULL,
    max_ids integer = 100000, insert_chunk_size integer = 250, OUT ids bigint, OUT finished boolean
)
LANGUAGE plpgsql SET search_path FROM CURRENT SET row_security = off SET datestyle = 'ISO, MDY' SET timezone = 'UTC'
SET intervalstyle = 'postgres' SET extra_float_digits = 1 SET bytea_output = 'hex' SET lc_monetary = 'C' AS $$
DECLARE
    a tube_attachment := tube_attached(tube, tbl, order_col);
    b tube_backfill;
    home integer := coalesce(shard, a.shard);
    page record;
BEGIN
    PERFORM tube_check_touch(home, 'B', insert_chunk_size);
    SELECT * INTO b FROM tube_backfill x WHERE x.tube = a.tube AND x.tbl = a.tbl AND NOT x.finished;
    IF NOT FOUND THEN
        -- The first page is read before the tube is locked for writing: without an index on order_col it may take long, and
        -- the tube's position does not move while a transaction has that lock.
        b.order_col := order_col;
        b.shard := home;
        SELECT * INTO page FROM tube_backfill_page(a, b, greatest(max_ids, 1));
        IF NOT tube_backfill_begin(a, step1, order_col, home,
                CASE WHEN a.routing IS NULL THEN ARRAY[home] ELSE tube_shards_past(a) END) THEN
            finished := true;
            RETURN;
        END IF;
        SELECT * INTO b FROM tube_backfill x WHERE x.tube = a.tube AND x.tbl = a.tbl;
    ELSE
        SELECT * INTO page FROM tube_backfill_page(a, b, greatest(max_ids, 1));
    END IF;
    PERFORM tube_backfill_put(b, page.ids, page.shards, insert_chunk_size);
    ids := cardinality(page.ids);
    finished := ids < greatest(max_ids, 1);
    IF ids > 0 THEN
        UPDATE tube_backfill x SET after_value = page.last_value, after_id = page.ids[cardinality(page.ids)]
            WHERE x.tube = a.tube AND x.tbl = a.tbl;
    END IF;
    PERFORM tube_backfill_progress(a, ids, finished);
END
$$;

-- tube_backfill_page(a, b, max_ids): the next max_ids ids of a backfill with their shards, in order (NULLs last), and
-- the sort key of the last of them as text. Writes nothing.
CREATE OR REPLACE FUNCTION tube_backfill_page(
    a tube_attachment, b tube_backfill, max_ids integer, OUT ids bigint[], OUT shards integer[], OUT last_value text
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    kind text := (SELECT format_type(c.atttypid, c.atttypmod) FROM pg_attribute c
        WHERE c.attrelid = a.tbl AND c.attname = b.order_col);
    path text := tube_path_text((tube_find(a.tube)).path || a.path);
    source text := tube_backfill_source(a, b.order_col, b.shard);
    with_key text := format('SELECT * FROM (%s) AS stored WHERE sort_key IS NOT NULL%s ORDER BY sort_key, id LIMIT %s',
        source, CASE WHEN b.after_value IS NOT NULL THEN format(' AND (sort_key, id) > (%L::%s, %L)', b.after_value, kind, b.after_id) END,
        max_ids);
    without_key text := format('SELECT * FROM (%s) AS stored WHERE sort_key IS NULL%s ORDER BY id LIMIT %s',
        source, CASE WHEN b.after_value IS NULL AND b.after_id IS NOT NULL THEN format(' AND id > %L', b.after_id) END, max_ids);
    read json;
BEGIN
    read := tube_as_owner(a.tbl, format('WITH page AS MATERIALIZED ('
        'SELECT shard, id, sort_key, row_number() OVER (ORDER BY sort_key IS NULL, sort_key, id) AS n'
        ' FROM (%s) AS found'
        ' ORDER BY n LIMIT %s'
        ') SELECT json_build_object(''ids'', coalesce(array_agg(id ORDER BY n), ''{}''),'
        ' ''shards'', coalesce(array_agg(shard ORDER BY n), ''{}''),'
        ' ''last'', (SELECT sort_key::text FROM page ORDER BY n DESC LIMIT 1))::text FROM page',
        CASE WHEN b.after_value IS NULL AND b.after_id IS NOT NULL THEN without_key
            ELSE format('(%s) UNION ALL (%s)', with_key, without_key) END, max_ids), path);
    ids := ARRAY(SELECT json_array_elements_text(read -> 'ids')::bigint);
    shards := ARRAY(SELECT json_array_elements_text(read -> 'shards')::integer);
    last_value := read ->> 'last';
END
$$;

-- tube_backfill_put(b, ids, shards, chunk): puts the ids into the tube, after a backfill_start for each shard that is
-- new to the backfill. Writes the tube and tube_backfill.
CREATE OR REPLACE FUNCTION tube_backfill_put(b tube_backfill, ids bigint[], shards integer[], chunk integer)
RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    fresh integer[] := ARRAY(SELECT DISTINCT s FROM unnest(shards) s WHERE s <> ALL (b.shards) ORDER BY s);
BEGIN
    IF fresh <> '{}' THEN
        PERFORM tube_backfill_control(b.tube, 'backfill_start', b.start_seq, fresh);
        UPDATE tube_backfill x SET shards = x.shards || fresh WHERE x.tube = b.tube AND x.tbl = b.tbl;
    END IF;
    EXECUTE format('SELECT sum(%I.%I(placed.shard, placed.ids, ''B'', NULL, $3)) FROM ('
        'SELECT given.shard, array_agg(given.id ORDER BY given.n) AS ids'
        ' FROM unnest($1, $2) WITH ORDINALITY AS given(id, shard, n) GROUP BY 1 ORDER BY 1) AS placed',
        current_schema(), tube_object_name(b.tube, '_touch')) USING ids, shards, chunk;
END
$$;
