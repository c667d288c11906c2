-- tube_attached(tube, tbl, order_col): the attachment of a backfill. Raises RT001, and RT005 if the table is not
-- attached, or has no such column or one that cannot be sorted. Locks the attachment's row, so that only one backfill of it starts at a time. Before
-- that it locks the tube's row and the table, in the same order as the functions that drop tubes and triggers. Writes
-- nothing.
CREATE OR REPLACE FUNCTION tube_attached(tube text, tbl regclass, order_col text) RETURNS tube_attachment
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_keep(tube);
    a tube_attachment;
    kind text;
BEGIN
    IF tube_qualified(tbl) IS NOT NULL THEN
        EXECUTE format('LOCK TABLE %s IN ACCESS SHARE MODE', tube_qualified(tbl));
    END IF;
    SELECT * INTO a FROM tube_attachment x WHERE x.tube = t.tube AND x.tbl = tube_attached.tbl AND x.root = x.tbl
        FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM tube_refuse('RT005', format('table %s is not attached to tube %L', tbl, tube), 'attach it first');
    END IF;
    SELECT format_type(c.atttypid, c.atttypmod) INTO kind FROM pg_attribute c
        WHERE c.attrelid = a.tbl AND c.attname = order_col AND c.attnum > 0 AND NOT c.attisdropped;
    IF NOT FOUND THEN
        PERFORM tube_refuse('RT005', format('table %s has no column %L to order its backfill by', tbl, order_col),
            'name a column of the table, id for example');
    END IF;
    BEGIN
        EXECUTE format('SELECT FROM (SELECT NULL::%s AS sort_key) AS one WHERE sort_key > NULL::%1$s ORDER BY sort_key',
            kind);
    EXCEPTION WHEN undefined_function OR datatype_mismatch OR ambiguous_function THEN
        PERFORM tube_refuse('RT005', format('a backfill of table %s cannot be ordered by column %I: its type %s has no '
            'order', tbl, order_col, kind), 'name another column of the table, id for example');
    END;
    RETURN a;
END
$$;

-- tube_backfilling(tube, tbl, shard): whether this table's shard is being backfilled: its backfill is not finished, or
-- control pods of it are still in the tube. Backfills of other tables in the shard do not count. Writes nothing.
CREATE OR REPLACE FUNCTION tube_backfilling(tube text, tbl regclass, shard integer) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    own tube_backfill;
    waiting boolean;
BEGIN
    SELECT * INTO own FROM tube_backfill b WHERE b.tube = tube_backfilling.tube AND b.tbl = tube_backfilling.tbl;
    IF own.finished IS FALSE THEN
        RETURN true;
    END IF;
    EXECUTE format($sql$
        SELECT EXISTS (
            SELECT FROM %I p
            WHERE cardinality(p.ids) = 0 AND p.shard = ANY ($1)
                AND p.payload ->> 'type' IN ('backfill_start', 'backfill_end')
                AND (p.payload ->> 'start_seq' = $2 OR NOT EXISTS (
                    SELECT FROM tube_backfill b
                    WHERE b.tube = $3 AND b.start_seq = p.payload ->> 'start_seq' AND p.shard = ANY (b.shards))))
    $sql$, tube) INTO waiting USING own.shards || shard, own.start_seq, tube;
    RETURN waiting;
END
$$;

-- tube_control_removal_sql(tube, condition): the statement that deletes the control pods p for which the condition is true.
-- It leaves those that a worker is acking: they go with the ack, and whoever waited for one could hold what the worker
-- waits for next. Writes nothing itself.
CREATE OR REPLACE FUNCTION tube_control_removal_sql(tube text, condition text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT format('DELETE FROM %1$I WHERE ctid = ANY (ARRAY('
        'SELECT p.ctid FROM %1$I p WHERE cardinality(p.ids) = 0 AND %2$s FOR UPDATE SKIP LOCKED))', tube, condition)
$$;

-- tube_backfill_stop(tube, tbl): removes the table's backfill that has begun and not finished, with its control pods; ids
-- that are in the tube stay. Returns how many (0 or 1). The caller has locked the attachment. Writes tube_backfill,
-- tube_shard and the tube.
CREATE OR REPLACE FUNCTION tube_backfill_stop(tube text, tbl regclass) RETURNS integer
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    b tube_backfill;
BEGIN
    DELETE FROM tube_backfill x WHERE x.tube = tube_backfill_stop.tube AND x.tbl = tube_backfill_stop.tbl
        AND NOT x.finished RETURNING * INTO b;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    PERFORM tube_shards_note(b.tube, b.shards);
    IF to_regclass(quote_ident(tube)) IS NOT NULL THEN
        EXECUTE tube_control_removal_sql(tube, 'p.shard = ANY ($1) AND p.payload ->> ''start_seq'' = $2'
            ' AND p.payload ->> ''type'' IN (''backfill_start'', ''backfill_end'')') USING b.shards, b.start_seq;
    END IF;
    RETURN 1;
END
$$;

-- tube_backfill_unschedule(tube, tbl): removes the control pods that schedule a backfill of the table. Writes the tube.
CREATE OR REPLACE FUNCTION tube_backfill_unschedule(tube text, tbl regclass) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF to_regclass(quote_ident(tube)) IS NOT NULL THEN
        EXECUTE tube_control_removal_sql(tube, 'p.payload ->> ''type'' = ''backfill_schedule'''
            ' AND (p.payload ->> ''oid'' = $1 OR p.payload ->> ''tbl'' = $2)') USING tbl::oid::text, tube_qualified(tbl);
    END IF;
END
$$;

-- tube_backfill_control(tube, type, start_seq, shards): one control pod of that type per shard. Writes the tube.
CREATE OR REPLACE FUNCTION tube_backfill_control(tube text, type text, start_seq text, shards integer[]) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format('INSERT INTO %I (op, shard, ids, payload)'
        ' SELECT ''B'', s, ''{}'', $2 FROM unnest($1) AS s ORDER BY s', tube)
        USING shards, jsonb_build_object('type', type, 'start_seq', start_seq);
END
$$;

-- tube_backfill_begin(a, start_seq, order_col, shard, shards): records a new backfill and marks its beginning in
-- shards. Returns false, and writes nothing, if one is running. Raises RT005. Writes tube_backfill and the tube. It
-- locks the tube for writing before it reads it: raising a read lock later could deadlock with the replacement of an
-- index.
CREATE OR REPLACE FUNCTION tube_backfill_begin(
    a tube_attachment, start_seq text, order_col text, shard integer, shards integer[]
) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF start_seq IS NULL OR start_seq !~ '^[0-9]{1,19}$' THEN
        PERFORM tube_refuse('RT005', format('%L is not what step 1 of a backfill returned', start_seq),
            'call tube_backfill_step1() and tube_backfill_step2() first, each in its own transaction');
    END IF;
    EXECUTE format('LOCK TABLE %I IN ROW EXCLUSIVE MODE', a.tube);
    IF tube_backfilling(a.tube, a.tbl, shard) THEN
        RAISE NOTICE 'shard % of % is being backfilled already', shard, a.tbl;
        RETURN false;
    END IF;
    DELETE FROM tube_backfill b WHERE b.tube = a.tube AND b.tbl = a.tbl;
    INSERT INTO tube_backfill (tube, tbl, shard, start_seq, order_col, shards, approx_ids)
        SELECT a.tube, a.tbl, shard, start_seq, order_col, shards, sum(c.reltuples)
        FROM tube_members(a.tbl) m JOIN pg_class c ON c.oid = m WHERE c.reltuples >= 0 AND c.relkind <> 'p';
    PERFORM tube_backfill_control(a.tube, 'backfill_start', start_seq, shards);
    RETURN true;
END
$$;

-- tube_backfill_progress(a, more, finished): adds to the number of ids in the tube, and marks the end if finished.
-- Writes tube_backfill and the tube.
CREATE OR REPLACE FUNCTION tube_backfill_progress(a tube_attachment, more bigint, finished boolean) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    b tube_backfill;
BEGIN
    UPDATE tube_backfill x
        SET ids = x.ids + more, finished = tube_backfill_progress.finished, updated_at = clock_timestamp()
        WHERE x.tube = a.tube AND x.tbl = a.tbl RETURNING * INTO b;
    IF finished THEN
        PERFORM tube_backfill_control(b.tube, 'backfill_end', b.start_seq, b.shards);
    END IF;
END
$$;
