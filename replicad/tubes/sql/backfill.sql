-- Backfills: all ids of an attached table go into its tube once, in chunks, while the table is written.

-- tube_backfill_step1(): returns, as text, a number from the sequence of pods: pods with this seq or less are older
-- than the backfill. It is start_seq in the control pods. Writes tube_seq. Its transaction must end before step 2
-- begins.
CREATE OR REPLACE FUNCTION tube_backfill_step1() RETURNS text
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT nextval('tube_seq')::text
$$;
COMMENT ON FUNCTION tube_backfill_step1() IS 'First step of a backfill: note the sequence';

-- tube_writers(): the transactions that hold a lock for writing pods of a tube, or rows of an attached table:
-- virtualtransaction, pid (NULL for a prepared transaction). Writes nothing.
CREATE OR REPLACE FUNCTION tube_writers() RETURNS TABLE (virtualtransaction text, pid integer)
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT DISTINCT l.virtualtransaction, l.pid
    FROM pg_locks l
    WHERE l.locktype = 'relation' AND l.granted AND l.mode = 'RowExclusiveLock'
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.relation IN (
            SELECT to_regclass(format('%I.%I', current_schema(), r.tube)) FROM tube_registry r
            UNION ALL SELECT a.tbl FROM tube_attachment a)
        AND l.pid IS DISTINCT FROM pg_backend_pid()
$$;

-- tube_backfill_step2(timeout): waits until every transaction that was writing pods, or rows of an attached table, when it was
-- called has ended. So no pod with a seq below the number of step 1 can appear after the backfill, and the backfill reads
-- every row that was written under an earlier predicate or routing, which may have left it out. Raises 55P03, with the transaction,
-- if one lasts longer than timeout; then call it again. It needs READ COMMITTED. Writes nothing.
--
-- A writer locks the table, and the tube before it gets a seq, and keeps the locks until it ends, so only their holders must
-- be waited for. A prepared transaction may change its virtualtransaction (after a restart), so there is a second round.
CREATE OR REPLACE FUNCTION tube_backfill_step2(timeout interval = '60 seconds') RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    deadline timestamptz := clock_timestamp() + timeout;
    awaited text[];
    culprit text;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM tube_refuse('RT005', 'step 2 of a backfill waits for others, which needs READ COMMITTED',
            'call it in a transaction of its own, at the default isolation level');
    END IF;
    FOR round IN 1..2 LOOP
        SELECT array_agg(w.virtualtransaction) INTO awaited FROM tube_writers() w WHERE round = 1 OR w.pid IS NULL;
        WHILE EXISTS (SELECT FROM tube_writers() w WHERE w.virtualtransaction = ANY (awaited)) LOOP
            IF clock_timestamp() >= deadline THEN
                SELECT string_agg(CASE WHEN w.pid IS NULL THEN (
                            SELECT format('prepared transaction %L', x.gid) FROM pg_prepared_xacts x
                                JOIN pg_locks l ON l.transactionid = x.transaction
                            WHERE l.virtualtransaction = w.virtualtransaction AND l.pid IS NULL)
                        ELSE format('pid %s (%s, %s)', w.pid, s.application_name, left(s.query, 100)) END, ', ')
                    INTO culprit
                    FROM tube_writers() w LEFT JOIN pg_stat_activity s ON s.pid = w.pid
                    WHERE w.virtualtransaction = ANY (awaited);
                PERFORM tube_refuse('55P03',
                    format('transactions that write pods did not end within %s: %s', timeout, culprit),
                    'end them, or call step 2 again');
            END IF;
            PERFORM pg_sleep(0.02);
        END LOOP;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tube_backfill_step2(interval) IS 'Second step of a backfill: wait for transactions in flight';

-- tube_attached(tube, tbl, order_col): the attachment of a backfill. Raises RT001, and RT005 if the table is not attached,
-- or has no such column, or if the column cannot be sorted. order_col NULL: the first column of the key. Locks the attachment's row, so that only one backfill of it
-- starts at a time. Before that it locks the tube's row and the table, in the same order as the functions that drop tubes
-- and triggers. Writes nothing.
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
    order_col := coalesce(order_col, a.key[1]);
    SELECT format_type(c.atttypid, c.atttypmod) INTO kind FROM pg_attribute c
        WHERE c.attrelid = a.tbl AND c.attname = order_col AND c.attnum > 0 AND NOT c.attisdropped;
    IF NOT FOUND THEN
        PERFORM tube_refuse('RT005', format('table %s has no column %L to order its backfill by', tbl, order_col),
            'name a column of the table, that of its key for example');
    END IF;
    BEGIN
        EXECUTE format('SELECT FROM (SELECT NULL::%s AS sort_key) AS one WHERE sort_key > NULL::%1$s ORDER BY sort_key',
            kind);
    EXCEPTION WHEN undefined_function OR datatype_mismatch OR ambiguous_function THEN
        PERFORM tube_refuse('RT005', format('a backfill of table %s cannot be ordered by column %I: its type %s has no '
            'order', tbl, order_col, kind), 'name another column of the table, that of its key for example');
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
-- It leaves control pods that a worker is acking: they go with the ack, and a session that waited for such a pod could hold
-- a lock for which the worker waits next. Writes nothing itself.
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

-- tube_backfill_begin(a, start_seq, order_col, shard, shards): records a new backfill and marks its beginning in shards.
-- Returns false, and writes nothing, if a backfill is running. Raises RT005. Writes tube_backfill and the tube. It locks
-- the tube for writing before it reads it: raising a read lock later could deadlock with the replacement of an index.
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

-- tube_backfill_progress(a, more, finished): adds to the number of ids in the tube, and marks the end if finished:
-- changes of the table that were missed before it began are missed no more. Writes tube_backfill, tube_missed and the tube.
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
        UPDATE tube_missed m SET healed_at = clock_timestamp()
            WHERE m.tube = b.tube AND m.tbl = b.tbl AND m.healed_at IS NULL AND NOT m.lasts AND m.seen_at < b.started_at;
    END IF;
END
$$;

-- tube_backfill_request(tube, order_col, shard_from, shard_to, queue): asks for a backfill of the attached tables with a shard
-- from shard_from to shard_to, each in the order of order_col or (NULL) of the first column of its key. Returns a row for each:
--   scheduled  a control pod backfill_schedule was inserted, and the backfill begins soon
--   queued     the same, and the backfill begins when an earlier one has finished and its control pods have left the tube
--   present    a backfill that has not begun was scheduled before; it will do
--   running    nothing was done: an earlier backfill runs or is in the tube, and queue is false
-- A backfill in another order, scheduled or begun, is replaced. An earlier one that runs may have read the table before the
-- present change, so it is no substitute. Raises RT001, RT005. Writes the tube, tube_backfill and tube_shard.
CREATE OR REPLACE FUNCTION tube_backfill_request(
    tube text, order_col text, shard_from integer, shard_to integer, queue boolean = true
) RETURNS TABLE (tbl text, shard integer, state text)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    t tube_registry := tube_lock(tube);
    a tube_attachment;
    wanted text;
    present boolean;
BEGIN
    FOR a IN SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl
        WHERE x.tube = t.tube AND x.tbl = x.root AND x.shard BETWEEN shard_from AND shard_to
        ORDER BY x.shard, x.tbl::oid
    LOOP
        wanted := coalesce(order_col, a.key[1]);
        PERFORM tube_attached(a.tube, a.tbl, wanted);
        IF EXISTS (SELECT FROM tube_backfill b WHERE b.tube = a.tube AND b.tbl = a.tbl AND NOT b.finished
                AND b.order_col <> wanted) THEN
            PERFORM tube_backfill_stop(a.tube, a.tbl);
        END IF;
        tbl := tube_qualified(a.tbl);
        shard := a.shard;
        state := CASE WHEN NOT tube_backfilling(a.tube, a.tbl, a.shard) THEN 'scheduled'
            WHEN queue THEN 'queued' ELSE 'running' END;
        EXECUTE format('SELECT EXISTS (SELECT FROM %I p WHERE cardinality(p.ids) = 0 AND p.shard = $1'
            ' AND p.payload ->> ''type'' = ''backfill_schedule'' AND p.payload ->> ''oid'' = $2'
            ' AND p.payload ->> ''order_col'' = $3)', t.tube) INTO present USING a.shard, a.tbl::oid::text, wanted;
        IF present THEN
            state := 'present';
        ELSIF state <> 'running' THEN
            PERFORM tube_backfill_unschedule(a.tube, a.tbl);
            EXECUTE format('INSERT INTO %I (op, shard, ids, payload) VALUES (''B'', $1, ''{}'', $2)', t.tube)
                USING a.shard, jsonb_build_object('type', 'backfill_schedule', 'tbl', tube_qualified(a.tbl),
                    'oid', a.tbl::oid::text, 'order_col', wanted);
        END IF;
        RETURN NEXT;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tube_backfill_request(text, text, integer, integer, boolean)
    IS 'Asks for backfills of a range of shards, also behind running ones';

-- tube_backfill_schedule(tube, order_col, shard_from, shard_to): the same without queue: returns how many were scheduled.
-- Tables that are being backfilled are left out.
CREATE OR REPLACE FUNCTION tube_backfill_schedule(tube text, order_col text, shard_from integer, shard_to integer)
RETURNS integer
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT count(*)::integer FROM tube_backfill_request($1, $2, $3, $4, false) r WHERE r.state = 'scheduled'
$$;
COMMENT ON FUNCTION tube_backfill_schedule(text, text, integer, integer) IS 'Asks for backfills of a range of shards';

-- tube_backfill_source(a, order_col, home): the query of the rows to backfill: shard, id, sort_key, and the columns of the
-- key as key_1, key_2 and so on; home is the shard if there is no routing. Writes nothing.
CREATE OR REPLACE FUNCTION tube_backfill_source(a tube_attachment, order_col text, home integer) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT format('SELECT %s AS shard, %s AS id, %I AS sort_key, %s FROM %s AS tube_row WHERE %s%s',
        coalesce(E'coalesce((\n' || a.routing || format(E'\n)::integer, %s) & 2147483647', home), home::text),
        tube_key_sql(a.key, t.keys), order_col,
        (SELECT string_agg(format('%I AS key_%s', k.name, k.n), ', ' ORDER BY k.n)
            FROM unnest(a.key) WITH ORDINALITY AS k (name, n)),
        tube_qualified(a.tbl), tube_key_present_sql(a.key), tube_where(t.predicate, a.predicate))
    FROM tube_find(a.tube) AS t
$$;

-- tube_backfill_shards(tbl, source, path): the shards that occur in source. Writes nothing.
CREATE OR REPLACE FUNCTION tube_backfill_shards(tbl regclass, source text, path text) RETURNS integer[]
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT ARRAY(SELECT tube_as_owner(tbl, format('SELECT DISTINCT shard::text FROM (%s) AS stored', source), path)::integer)
$$;

-- tube_backfill_chunk(step1, tube, tbl, order_col, shard, max_ids, insert_chunk_size): step 3 of a backfill in pieces:
-- puts the next max_ids ids into the tube and records where it stopped. ids is how many it put (NULL if the shard is
-- skipped, see step 3), finished whether that was the end. Each call is a short transaction; regular pods are read
-- between the calls, and a crash loses no progress. The next call, from any session, goes on with the start_seq, order
-- and shard of the first call. An index on order_col makes the calls cheap; without one each reads the whole table. A
-- row whose place in the order changes meanwhile may be missed or put twice; its change has touched it anyway. With a
-- routing max_ids is at most 20,000: each id may have a shard of its own, which takes two pods. Raises RT001, RT005. Writes the tube and tube_backfill.
CREATE OR REPLACE FUNCTION tube_backfill_chunk(
    step1 text, tube text, tbl regclass, order_col text, shard integer = NULL,
    max_ids integer = 100000, insert_chunk_size integer = 250, OUT ids bigint, OUT finished boolean
)
LANGUAGE plpgsql SET search_path FROM CURRENT SET row_security = off AS $$
DECLARE
    a tube_attachment := tube_attached(tube, tbl, order_col);
    b tube_backfill;
    home integer := coalesce(shard, a.shard);
    page record;
BEGIN
    PERFORM tube_check_touch(home, 'B', insert_chunk_size);
    order_col := coalesce(order_col, a.key[1]);
    max_ids := greatest(CASE WHEN a.routing IS NULL THEN max_ids ELSE least(max_ids, 20000) END, 1);
    SELECT * INTO b FROM tube_backfill x WHERE x.tube = a.tube AND x.tbl = a.tbl AND NOT x.finished;
    IF NOT FOUND THEN
        -- The first page is read before the tube is locked for writing: without an index on order_col it may take long, and
        -- the tube's position does not move while a transaction has that lock.
        b.order_col := order_col;
        b.shard := home;
        SELECT * INTO page FROM tube_backfill_page(a, b, max_ids);
        IF NOT tube_backfill_begin(a, step1, order_col, home,
                CASE WHEN a.routing IS NULL THEN ARRAY[home] ELSE tube_shards_past(a) END) THEN
            finished := true;
            RETURN;
        END IF;
        SELECT * INTO b FROM tube_backfill x WHERE x.tube = a.tube AND x.tbl = a.tbl;
    ELSE
        SELECT * INTO page FROM tube_backfill_page(a, b, max_ids);
    END IF;
    PERFORM tube_backfill_put(b, page.ids, page.shards, insert_chunk_size);
    ids := cardinality(page.ids);
    finished := ids < max_ids;
    IF ids > 0 THEN
        UPDATE tube_backfill x SET after_value = page.last_value, after_key = page.last_key
            WHERE x.tube = a.tube AND x.tbl = a.tbl;
    END IF;
    PERFORM tube_backfill_progress(a, ids, finished);
END
$$;
DO $$ BEGIN
    EXECUTE 'ALTER FUNCTION tube_backfill_chunk(text, text, regclass, text, integer, integer, integer)' || tube_fixed_sql();
END $$;

-- tube_backfill_page(a, b, max_ids): the next max_ids ids of a backfill with their shards, in order (NULLs last), and
-- the sort key and the columns of the key of the last of them as text. Writes nothing.
CREATE OR REPLACE FUNCTION tube_backfill_page(
    a tube_attachment, b tube_backfill, max_ids integer,
    OUT ids text[], OUT shards integer[], OUT last_value text, OUT last_key text[]
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    kind text := (SELECT format_type(c.atttypid, c.atttypmod) FROM pg_attribute c
        WHERE c.attrelid = a.tbl AND c.attname = b.order_col);
    path text := tube_path_text((tube_find(a.tube)).path || a.path);
    source text := tube_backfill_source(a, b.order_col, b.shard);
    columns text;  -- of the key
    texts text;
    behind text;  -- the last key, as values of their types
    given text;  -- whether a row has a sort key. Of a row value with one NULL field neither IS NULL nor IS NOT NULL is true
    with_key text;
    without_key text;
    read json;
BEGIN
    SELECT string_agg('key_' || k.n, ', ' ORDER BY k.n), string_agg(format('key_%s::text', k.n), ', ' ORDER BY k.n),
            string_agg(format('%L::%s', b.after_key[k.n], k.type), ', ' ORDER BY k.n)
        INTO columns, texts, behind
        FROM unnest(tube_key_types(a.tbl, a.key)) WITH ORDINALITY AS k (type, n);
    given := CASE WHEN EXISTS (SELECT FROM pg_type y WHERE y.oid = (tube_key_types(a.tbl, ARRAY[b.order_col]))[1]::regtype
        AND y.typtype = 'c') THEN 'sort_key IS DISTINCT FROM NULL' ELSE 'sort_key IS NOT NULL' END;
    with_key := format('SELECT * FROM (%s) AS stored WHERE %s%s ORDER BY sort_key, %s LIMIT %s', source, given,
        CASE WHEN b.after_value IS NOT NULL
            THEN format(' AND (sort_key, %s) > (%L::%s, %s)', columns, b.after_value, kind, behind) END, columns, max_ids);
    without_key := format('SELECT * FROM (%s) AS stored WHERE NOT (%s)%s ORDER BY %s LIMIT %s', source, given,
        CASE WHEN b.after_value IS NULL AND b.after_key IS NOT NULL
            THEN format(' AND (%s) > (%s)', columns, behind) END, columns, max_ids);
    read := tube_as_owner(a.tbl, format('WITH page AS MATERIALIZED ('
        'SELECT found.*, row_number() OVER (ORDER BY NOT (%s), sort_key, %s) AS n'
        ' FROM (%s) AS found'
        ' ORDER BY n LIMIT %s'
        ') SELECT json_build_object(''ids'', coalesce(array_agg(id ORDER BY n), ''{}''),'
        ' ''shards'', coalesce(array_agg(shard ORDER BY n), ''{}''),'
        ' ''last'', (SELECT sort_key::text FROM page ORDER BY n DESC LIMIT 1),'
        ' ''last_key'', (SELECT ARRAY[%s] FROM page ORDER BY n DESC LIMIT 1))::text FROM page',
        given, columns,
        CASE WHEN b.after_value IS NULL AND b.after_key IS NOT NULL THEN without_key
            ELSE format('(%s) UNION ALL (%s)', with_key, without_key) END, max_ids, texts), path);
    ids := ARRAY(SELECT json_array_elements_text(read -> 'ids'));
    shards := ARRAY(SELECT json_array_elements_text(read -> 'shards')::integer);
    last_value := read ->> 'last';
    last_key := ARRAY(SELECT json_array_elements_text(nullif((read -> 'last_key')::text, 'null')::json));
END
$$;

-- tube_backfill_put(b, ids, shards, chunk): puts the ids into the tube, after a backfill_start for each shard that is
-- new to the backfill. Writes the tube and tube_backfill.
CREATE OR REPLACE FUNCTION tube_backfill_put(b tube_backfill, ids text[], shards integer[], chunk integer)
RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    kind text := (tube_find(b.tube)).keys;
    fresh integer[] := ARRAY(SELECT unnest(shards) EXCEPT SELECT unnest(b.shards) ORDER BY 1);
BEGIN
    IF fresh <> '{}' THEN
        PERFORM tube_backfill_control(b.tube, 'backfill_start', b.start_seq, fresh);
        UPDATE tube_backfill x SET shards = x.shards || fresh WHERE x.tube = b.tube AND x.tbl = b.tbl;
    END IF;
    -- One statement for all shards: with a routing there may be as many shards as ids.
    EXECUTE format('INSERT INTO %I (op, shard, ids) SELECT ''B'', pod.shard, pod.ids FROM ('
        'SELECT placed.shard, placed.piece, array_agg(placed.id ORDER BY placed.n) AS ids FROM ('
        'SELECT given.*, (row_number() OVER (PARTITION BY given.shard ORDER BY given.n) - 1) / $3 AS piece'
        ' FROM unnest($1::%s[], $2) WITH ORDINALITY AS given(id, shard, n)) AS placed'
        ' GROUP BY 1, 2) AS pod ORDER BY pod.shard, pod.piece',
        b.tube, kind) USING ids, shards, least(chunk, tube_pod_size(kind));
END
$$;

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
    source text;
    shards integer[] := ARRAY[home];
    numbered text;
    inserted bigint;
BEGIN
    PERFORM tube_check_touch(home, 'B', insert_chunk_size);
    order_col := coalesce(order_col, a.key[1]);
    source := tube_backfill_source(a, order_col, home);
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
        numbered := format('SELECT r.tube_shard AS shard, r.id::%s AS id, r.n FROM %I.tube_owner_rows(%L::oid::regclass, %L,'
            ' %L) AS r', t.keys, current_schema(), a.tbl::oid,
            format('SELECT owned.shard AS tube_shard, owned.id, owned.n FROM (%s) AS owned', numbered), path);
    END IF;
    inserted := tube_insert_numbered(ARRAY[a.tube], numbered,
        path, CASE WHEN a.routing IS NULL THEN home END, 'B',
        (SELECT b.approx_ids FROM tube_backfill b WHERE b.tube = a.tube AND b.tbl = a.tbl),
        greatest(fetch_chunk_size, 1), least(insert_chunk_size, tube_pod_size(t.keys)));
    PERFORM tube_backfill_progress(a, inserted, true);
    RETURN inserted;
END
$$;
DO $$ BEGIN
    EXECUTE 'ALTER FUNCTION tube_backfill_step3(text, text, regclass, text, integer, integer, integer)' || tube_fixed_sql();
END $$;
COMMENT ON FUNCTION tube_backfill_step3(text, text, regclass, text, integer, integer, integer)
    IS 'Third step of a backfill: all ids of a table';

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

-- tube_backfills(of_tube): the backfills of one tube or (NULL) of all tubes, if they are scheduled, or have begun and not
-- finished: the table, the shard, the order, the state (scheduled or running), how many ids are in the tube and how many
-- there are about. Scheduled backfills of a tube whose table cannot be read are left out. Writes nothing.
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
