-- A tube: its table of pods with its indexes, how it is made and removed, and pods that are inserted or deleted by hand.

-- tube_index_ensure(tube, partitions): creates the index for reading a partition: ((shard % partitions), priority, seq)
-- with priority 0 for regular and 1 for backfill pods. Raises RT005 if its name is taken. Writes indexes of the tube.
--
-- One index serves all partitions and both priorities, so that the cost of an insert does not depend on the number of
-- partitions (a partial index for each pair costs every insert about 1 us). No statistics are gathered for it and for seq:
-- the statistics of a queue are wrong a minute later, and with them the planner sorts a whole partition to return its first
-- pods. Without statistics it expects few rows and uses the index. The index of another number of partitions is dropped.
-- While readers have the table locked, the DROP would make them and all writers wait. So it gives up after half a second
-- (before the deadlock check of other waiting transactions), and the index stays until the next call.
CREATE OR REPLACE FUNCTION tube_index_ensure(tube text, partitions integer) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    wanted text := tube || '_pods_' || partitions;
    patience text := current_setting('lock_timeout');
    stale regclass;
BEGIN
    IF to_regclass(quote_ident(wanted)) IS NULL THEN
        EXECUTE format('CREATE INDEX %I ON %I ((shard %% %s), ((op = ''B'')::integer), seq)', wanted, tube, partitions);
        EXECUTE format('ALTER INDEX %I ALTER COLUMN 1 SET STATISTICS 0, ALTER COLUMN 2 SET STATISTICS 0', wanted);
    ELSIF NOT EXISTS (SELECT FROM pg_index i
            WHERE i.indexrelid = to_regclass(quote_ident(wanted)) AND i.indrelid = to_regclass(quote_ident(tube))) THEN
        PERFORM tube_refuse('RT005', format('%I.%I exists and is no index of tube %L', current_schema(), wanted, tube),
            'choose another name for the tube, or rename what has it');
    END IF;
    FOR stale IN SELECT i.indexrelid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
        WHERE i.indrelid = to_regclass(quote_ident(tube)) AND c.relname <> wanted
            AND left(c.relname, length(tube)) = tube AND substr(c.relname, length(tube) + 1) ~ '^_pods_[0-9]+$'
    LOOP
        BEGIN
            PERFORM set_config('lock_timeout', '500ms', true);
            EXECUTE format('DROP INDEX %s', stale);
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            RAISE NOTICE 'index % is in use and stays until tube_ensure_exists is called again', stale;
        END;
        PERFORM set_config('lock_timeout', patience, true);
    END LOOP;
END
$$;

-- tube_table_ensure(tube): creates the table of a new tube, for its kind of keys. Raises RT005 if a name is taken. Writes table and indexes.
-- No CHECKs: each would cost every write of an attached table 2 us, and the functions that insert check their
-- arguments.
CREATE OR REPLACE FUNCTION tube_table_ensure(tube text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format($sql$
        CREATE TABLE %1$I (
            seq bigint NOT NULL DEFAULT nextval(%2$L) PRIMARY KEY,
            op character(1) NOT NULL,
            shard integer NOT NULL,
            ids bigint[] NOT NULL,
            payload jsonb,
            ts timestamptz NOT NULL DEFAULT clock_timestamp()
        ) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000)
    $sql$, tube, format('%I.tube_seq', current_schema()));
    EXECUTE format('ALTER TABLE %I ALTER ids SET STORAGE PLAIN, ALTER seq SET STATISTICS 0', tube);
    IF (tube_find(tube)).keys = 'text' THEN
        PERFORM tube_table_to_text(tube);
    END IF;
    EXECUTE format('CREATE INDEX %I ON %I (shard, seq) WHERE cardinality(ids) = 0', tube || '_control', tube);
    EXECUTE format('COMMENT ON TABLE %I IS %L', tube,
        'replicad: the pods of a tube; use tube_ensure_absent() to drop it');
    PERFORM tube_belong(format('TABLE %I', tube));
EXCEPTION WHEN duplicate_table THEN
    PERFORM tube_refuse('RT005', format('tube %L needs the name of something that exists: %s', tube, SQLERRM),
        'choose another name for the tube, or rename what has it');
END
$$;

-- tube_table_to_text(tube): gives the table of a tube without pods keys of kind text. They have no bound, and no write of an
-- application may fail because of a long key: ids that do not fit into a page are stored out of line. Writes the table.
CREATE OR REPLACE FUNCTION tube_table_to_text(tube text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format('ALTER TABLE %I ALTER ids TYPE text[] USING ''{}'', ALTER ids SET STORAGE EXTERNAL', tube);
    EXECUTE format('ALTER TABLE %I SET (toast_tuple_target = 8160)', tube);  -- what fits into a page stays in it
END
$$;

-- tube_keys_ensure(t, wanted): the tube with keys of the kind `wanted`. Another kind is possible while the tube has no table
-- and no pod. Raises RT005. The caller has locked the tube. Writes tube_registry, the tube's table and {tube}_touch.
CREATE OR REPLACE FUNCTION tube_keys_ensure(t tube_registry, wanted text) RETURNS tube_registry
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    used boolean;
BEGIN
    IF wanted IS NULL OR wanted = t.keys THEN
        RETURN t;
    END IF;
    EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', t.tube);
    EXECUTE format('SELECT EXISTS (SELECT FROM %I)', t.tube) INTO used;
    IF used OR EXISTS (SELECT FROM tube_attachment a WHERE a.tube = t.tube)
            OR EXISTS (SELECT FROM tube_parked p WHERE p.tube = t.tube) THEN
        PERFORM tube_refuse('RT005',
            format('tube %L has keys of kind %s, and tables, pods or parked ids with them', t.tube, t.keys),
            format('make another tube with keys of kind %s, or drop this one and create it again', wanted));
    ELSIF wanted = 'text' THEN
        PERFORM tube_table_to_text(t.tube);
    ELSE
        EXECUTE format('ALTER TABLE %I ALTER ids TYPE bigint[] USING ''{}'', ALTER ids SET STORAGE PLAIN', t.tube);
        EXECUTE format('ALTER TABLE %I RESET (toast_tuple_target)', t.tube);
    END IF;
    UPDATE tube_registry r SET keys = wanted WHERE r.tube = t.tube RETURNING * INTO t;
    PERFORM tube_touch_ensure(t.tube);
    PERFORM tube_trigger_ensure(t.tube, NULL, NULL, '{}');
    RETURN t;
END
$$;

-- tube_ensure_exists(tube, partitions, predicate, keys, path): creates the tube, or alters it; writes nothing if the tube is
-- already so. predicate (NULL or empty: none) is SQL on a row of any attached table: only rows for which it is true are touched and
-- backfilled. Its names are looked up in path, by default the caller's search_path. keys is bigint or text (keys.sql); NULL:
-- the present kind, or bigint, which becomes text when the first table needs it. Pods and attachments are kept; a
-- table that was dropped by hand is created again. Raises RT005. Writes tube_registry, the tube's table, indexes,
-- {tube}_touch and its trigger functions.
--
-- A new number of partitions needs a new index, and writers wait while it is built. For a tube with millions of pods
-- choose a time with few writes, and set lock_timeout if there are long transactions that write.
CREATE OR REPLACE FUNCTION tube_ensure_exists(
    tube text, partitions integer = 1, predicate text = NULL, keys text = NULL, path name[] = current_schemas(false)
) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    safe name[] := CASE WHEN nullif(predicate, '') IS NULL THEN '{}' ELSE tube_safe_path(path) END;
    a tube_attachment;
BEGIN
    predicate := nullif(predicate, '');
    PERFORM tube_check_name(tube);
    IF partitions IS NULL OR partitions NOT BETWEEN 1 AND 32768 THEN
        PERFORM tube_refuse('RT008',
            format('tube %L cannot have %s partitions', tube, coalesce(partitions::text, 'NULL')),
            'a tube has 1 to 32768 partitions');
    ELSIF keys NOT IN ('bigint', 'text') THEN
        PERFORM tube_refuse('RT005', format('there are no keys of kind %L', left(keys, 100)),
            'bigint is for tables whose key is one integer column, text for all tables');
    END IF;
    INSERT INTO tube_registry (tube, partitions, predicate, path, keys)
        VALUES (tube, partitions, predicate, safe, coalesce(keys, 'bigint')) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        PERFORM tube_table_ensure(tube);
    ELSE
        PERFORM tube_lock(tube);
        IF to_regclass(quote_ident(tube)) IS NULL THEN
            PERFORM tube_table_ensure(tube);  -- it was dropped by hand
        END IF;
        PERFORM tube_keys_ensure(tube_find(tube), keys);
        UPDATE tube_registry r
            SET partitions = tube_ensure_exists.partitions, predicate = tube_ensure_exists.predicate, path = safe
            WHERE r.tube = tube_ensure_exists.tube AND (r.partitions, r.predicate, r.path)
                IS DISTINCT FROM (tube_ensure_exists.partitions, tube_ensure_exists.predicate, safe);
    END IF;
    FOR a IN SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl
        WHERE x.tube = tube_ensure_exists.tube AND x.tbl = x.root
    LOOP
        PERFORM tube_check_expression(a.tbl, 'predicate', predicate, safe);
        PERFORM tube_trigger_ensure(tube, a.predicate, a.routing, a.path, a.root, a.key);
    END LOOP;
    BEGIN
        PERFORM tube_trigger_ensure(tube, NULL, NULL, '{}');
    EXCEPTION WHEN syntax_error THEN
        PERFORM tube_refuse('RT005',
            format('the predicate %L is not SQL: %s', predicate, split_part(SQLERRM, E'\n', 1)),
            'write SQL on the columns that the attached tables have in common');
    END;
    PERFORM tube_index_ensure(tube, partitions);
    PERFORM tube_touch_ensure(tube);
END
$$;
COMMENT ON FUNCTION tube_ensure_exists(text, integer, text, text, name[]) IS 'Creates a tube, or alters it to be as asked';

-- tube_ensure_absent(tube): detaches all its tables and drops the tube with its pods, leases and parked ids. Does
-- nothing if there is no such tube. It locks one table after another; where programs write to several of them, detach
-- the tables first, each in a transaction of its own with a short lock_timeout, as `replicad tubes drop` does. Writes
-- tube_registry and the tables that refer to it, triggers, functions, the table.
CREATE OR REPLACE FUNCTION tube_ensure_absent(tube text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    root regclass;
BEGIN
    PERFORM FROM tube_registry r WHERE r.tube = tube_ensure_absent.tube FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- A worker that acks has its lease first, then its pods. In this order here too, they do not wait in a circle.
    DELETE FROM tube_lease l WHERE l.tube = tube_ensure_absent.tube;
    FOR root IN SELECT a.tbl FROM tube_attachment a WHERE a.tube = tube_ensure_absent.tube AND a.tbl = a.root
        ORDER BY a.tbl::oid
    LOOP
        PERFORM tube_table_ensure_detached(tube, root);
    END LOOP;
    PERFORM tube_trigger_sweep(tube);  -- those of tables that were dropped
    DELETE FROM tube_registry r WHERE r.tube = tube_ensure_absent.tube;
    DELETE FROM tube_shard k WHERE k.tube = tube_ensure_absent.tube;
    DELETE FROM tube_low l WHERE l.tube = tube_ensure_absent.tube;
    DELETE FROM tube_worker w WHERE w.tube = tube_ensure_absent.tube;
    DELETE FROM tube_trigger_seen s WHERE s.tube = tube_ensure_absent.tube;
    EXECUTE format('DROP FUNCTION IF EXISTS %I()', tube_object_name(tube, '_trigger'));
    EXECUTE format('DROP FUNCTION IF EXISTS %I() CASCADE', tube_object_name(tube, '_mirror'));  -- and its trigger
    EXECUTE format('DROP FUNCTION IF EXISTS %1$I(integer, bigint[], character, jsonb, integer),'
        ' %1$I(integer, text[], character, jsonb, integer)', tube_object_name(tube, '_touch'));
    EXECUTE format('DROP TABLE IF EXISTS %I', tube);
END
$$;
COMMENT ON FUNCTION tube_ensure_absent(text) IS 'Detaches all tables of a tube and drops it';

-- tube_pause(tube, reason): daemons give pods of the tube to no reader until tube_resume, whatever is in it. Touches are
-- recorded, leases stay, and pods that a reader has can be acked. Daemons notice it within a second. A tube that is paused
-- keeps its first time, and gets the new reason. Raises RT001. Writes tube_registry.
CREATE OR REPLACE FUNCTION tube_pause(tube text, reason text = NULL) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM tube_keep(tube);
    UPDATE tube_registry r SET paused_at = coalesce(r.paused_at, clock_timestamp()), paused_why = left(nullif(reason, ''), 200)
        WHERE r.tube = tube_pause.tube;
END
$$;
COMMENT ON FUNCTION tube_pause(text, text) IS 'Gives no reader the pods of a tube until tube_resume()';

-- tube_resume(tube): ends tube_pause; returns whether the tube was paused. Raises RT001. Writes tube_registry.
CREATE OR REPLACE FUNCTION tube_resume(tube text) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM tube_keep(tube);
    UPDATE tube_registry r SET paused_at = NULL, paused_why = NULL WHERE r.tube = tube_resume.tube AND r.paused_at IS NOT NULL;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION tube_resume(text) IS 'Gives readers the pods of a paused tube again';

-- tube_age_sql(pod): the expression for the age of a pod in seconds; NULL for pods of backfills. Writes nothing.
CREATE OR REPLACE FUNCTION tube_age_sql(pod text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT format('CASE WHEN %1$s.op <> ''B'' THEN'
        ' greatest(extract(epoch FROM clock_timestamp() - %1$s.ts)::float8, 0) END AS age', pod)
$$;

-- tube_ages_sql(): two columns of a statement about pods in `gone`: how many were how old, and the sum of their ages. They are
-- counted in ranges that begin with 0, 5 ms, 10 ms and so on (`DELAYS` in daemon/figures.py). Writes nothing.
CREATE OR REPLACE FUNCTION tube_ages_sql() RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT $sql$(
        SELECT array_agg(counted.pods ORDER BY counted.bucket) FROM (
            SELECT b.bucket, count(g.age) AS pods
            FROM generate_series(0, 15) AS b (bucket)
            LEFT JOIN gone AS g ON b.bucket
                = width_bucket(g.age, '{0.005,0.01,0.025,0.05,0.1,0.25,0.5,1,2.5,5,10,30,60,300,3600}'::float8[])
            GROUP BY 1) AS counted), (SELECT coalesce(sum(g.age), 0) FROM gone AS g)$sql$
$$;

-- tube_removal_sql(tube, condition): the statement that deletes pods and returns how many there were, their shards, and
-- their ages as tube_ages_sql. Writes nothing itself.
CREATE OR REPLACE FUNCTION tube_removal_sql(tube text, condition text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT format('WITH gone AS (DELETE FROM %I AS pod WHERE %s RETURNING pod.shard, %s)'
        ' SELECT (SELECT count(*) FROM gone), (SELECT array_agg(DISTINCT gone.shard) FROM gone), %s',
        tube, condition, tube_age_sql('pod'), tube_ages_sql())
$$;

-- tube_remove(tube, partitions, partition, seqs): deletes the pods that belong to the partition, without any check; returns
-- how many, and their ages as tube_ages_sql counts them. Writes the tube and tube_shard.
CREATE OR REPLACE FUNCTION tube_remove(
    tube text, partitions integer, partition integer, seqs bigint[],
    OUT pods bigint, OUT ages bigint[], OUT seconds float8
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    shards integer[];
BEGIN
    EXECUTE tube_removal_sql(tube, format('seq = ANY ($1) AND (shard %% %s) = %s', partitions, partition)) INTO pods, shards, ages, seconds USING seqs;
    PERFORM tube_shards_note(tube, shards);
END
$$;

-- tube_pods_delete(tube, partitions, partition, seqs): deletes these pods of the partition, for readers without a
-- lease; returns how many there were. Raises RT001, RT003, RT005. Locks the tube's row in tube_registry, writes the
-- tube.
CREATE OR REPLACE FUNCTION tube_pods_delete(tube text, partitions integer, partition integer, seqs bigint[])
RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM FROM tube_registry r WHERE r.tube = tube_pods_delete.tube FOR SHARE;
    PERFORM tube_check_partitions(tube, partitions);
    RETURN (tube_remove(tube, partitions, partition, seqs)).pods;
END
$$;
COMMENT ON FUNCTION tube_pods_delete(text, integer, integer, bigint[]) IS 'Deletes pods of a partition';

-- tube_shards_note(tube, shards): remembers shards of which pods leave the tube (NULL: none). Waits for no other
-- transaction. Writes tube_shard.
CREATE OR REPLACE FUNCTION tube_shards_note(tube text, shards integer[]) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT AS $$
    INSERT INTO tube_shard (tube, shard)
        SELECT $1, s FROM unnest($2) AS s
        WHERE NOT EXISTS (SELECT FROM tube_shard k WHERE k.tube = $1 AND k.shard = s)
$$;

-- tube_shards_past(a): the shards of which a downstream may hold rows of this table, if it has a routing; else none. These
-- are the shards of the table's last backfill, and all shards of the tube but the constant shards of other tables. Writes
-- nothing.
CREATE OR REPLACE FUNCTION tube_shards_past(a tube_attachment) RETURNS integer[]
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT coalesce(array_agg(past.shard ORDER BY past.shard), '{}')
    FROM (
        SELECT unnest(b.shards) AS shard FROM tube_backfill b WHERE b.tube = a.tube AND b.tbl = a.tbl
        UNION
        SELECT k.shard FROM tube_shard k WHERE k.tube = a.tube AND NOT EXISTS (
            SELECT FROM tube_attachment x
            WHERE x.tube = a.tube AND x.root <> a.root AND x.routing IS NULL AND x.shard = k.shard)
    ) AS past
    WHERE a.routing IS NOT NULL
$$;

-- tube_progress(first, last, every, total): true; raises a NOTICE if there is a multiple of every between the numbers
-- of the first and the last id of a pod. total is approximate, or NULL. Writes nothing.
CREATE OR REPLACE FUNCTION tube_progress(first bigint, last bigint, every integer, total bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    IF last / every > first / every THEN
        RAISE NOTICE '% ids%', last / every * every,
            coalesce(' of about ' || total || ' (' || least(100, 100 * last / nullif(total, 0)) || ' %)', '');
    END IF;
    RETURN true;
END
$$;

-- tube_insert_numbered(tubes, query, path, shard, op, total, every, chunk): puts the ids of a query into pods of chunk
-- ids in each of the tubes, which have keys of one kind; returns how many ids. The query returns id and n, from 0 without gaps, which is the order
-- of the pods. If shard is NULL, it also returns shard, and n counts per shard. It runs under the search_path path.
-- Reports its progress with tube_progress. Memory is bounded by work_mem. Writes the tubes.
CREATE OR REPLACE FUNCTION tube_insert_numbered(
    tubes text[], query text, path text, shard integer, op character, total bigint, every integer, chunk integer
) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT SET jit = off AS $$
DECLARE
    statement text := format($sql$
        WITH pods AS MATERIALIZED (
            SELECT counted.shard, counted.pod, counted.ids
            FROM (
                SELECT placed.*, sum(cardinality(placed.ids)) OVER (ORDER BY placed.shard, placed.pod)::bigint AS upto
                FROM (
                    SELECT %1$s AS shard, numbered.n / %2$s AS pod, array_agg(numbered.id ORDER BY numbered.n) AS ids
                    FROM (%3$s) AS numbered GROUP BY 1, 2
                ) AS placed
            ) AS counted
            WHERE %4$I.tube_progress(counted.upto - cardinality(counted.ids), counted.upto, $2, $3)
            ORDER BY counted.shard, counted.pod
        )
        $sql$, coalesce(shard::text, 'numbered.shard'), chunk, query, current_schema());
    inserts text;
    inserted bigint;
BEGIN
    SELECT string_agg(format(', into%s AS (INSERT INTO %s (op, shard, ids) SELECT %s, pods.shard, pods.ids FROM pods'
            ' ORDER BY pods.shard, pods.pod RETURNING cardinality(ids) AS ids)',
            g.n, tube_relation(g.tube), tube_op_sql('$1')), '' ORDER BY g.n)
        INTO inserts FROM unnest(tubes) WITH ORDINALITY AS g(tube, n);
    PERFORM set_config('search_path', path, true);
    EXECUTE statement || inserts || ' SELECT coalesce(sum(ids), 0) FROM into1' INTO inserted USING op, every, total;
    RETURN inserted;
END
$$;

-- tube_split(tube_or_tubes): the tube of that name, or the tubes of a list with commas. Raises RT001.
-- Writes nothing.
CREATE OR REPLACE FUNCTION tube_split(tube_or_tubes text) RETURNS text[]
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT array_agg((tube_find(name)).tube ORDER BY n)
    FROM unnest(CASE WHEN EXISTS (SELECT FROM tube_registry r WHERE r.tube = tube_or_tubes) THEN ARRAY[tube_or_tubes]
        ELSE regexp_split_to_array(btrim(tube_or_tubes, ' {}'), ' *, *') END) WITH ORDINALITY AS g(name, n)
$$;

-- tube_pods_insert(tube_or_tubes, query, shard, op, approx_size, fetch_chunk_size, insert_chunk_size, path): touches
-- every id that the query returns, in pods of insert_chunk_size; returns how many ids there were (NULLs are left out).
--   tube_or_tubes      one tube, or several with commas; the query runs once
--   query              returns columns id and row_number; pods follow the order of row_number
--   approx_size        how many ids are expected, for the percentage in the NOTICEs; NULL: unknown
--   fetch_chunk_size   ids between two NOTICEs
--   path               the search_path of the query; by default the caller's
-- Raises RT001, RT005. Writes the tubes. It is one transaction: the positions of the tubes do not move until it ends.
CREATE OR REPLACE FUNCTION tube_pods_insert(
    tube_or_tubes text, query text, shard integer, op character = 'B', approx_size bigint = NULL,
    fetch_chunk_size integer = 20000, insert_chunk_size integer = 250, path name[] = current_schemas(true)
) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT SET row_security = off AS $$
DECLARE
    tubes text[] := tube_split(tube_or_tubes);
    kinds text[] := ARRAY(SELECT DISTINCT (tube_find(one)).keys FROM unnest(tubes) AS one);
    numbered text := format(
        E'SELECT ids.id, row_number() OVER (ORDER BY ids.row_number) - 1 AS n'
        ' FROM (SELECT given.id::%s AS id, given.row_number FROM (\n%s\n) AS given) AS ids'
        ' WHERE ids.id IS NOT NULL', kinds[1], query);
BEGIN
    PERFORM tube_check_touch(shard, op, insert_chunk_size);
    IF cardinality(kinds) > 1 THEN
        PERFORM tube_refuse('RT005', format('tubes %s have keys of different kinds', tube_or_tubes),
            'call this once for the tubes of each kind');
    END IF;
    insert_chunk_size := least(insert_chunk_size, tube_pod_size(kinds[1]));
    IF coalesce(fetch_chunk_size, 0) < 1 THEN
        PERFORM tube_refuse('RT005', 'fetch_chunk_size is at least 1', 'the default is 20000');
    END IF;
    RETURN tube_insert_numbered(
        tubes, numbered, tube_path_text(path), shard, op, approx_size, fetch_chunk_size, insert_chunk_size);
EXCEPTION WHEN undefined_column THEN
    PERFORM tube_refuse('RT005', format('the query cannot be run: %s', SQLERRM),
        'it has to return columns called id and row_number');
END
$$;
COMMENT ON FUNCTION tube_pods_insert(text, text, integer, character, bigint, integer, integer, name[])
    IS 'Touches every id that a query returns';
