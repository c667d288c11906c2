-- What readers of tubes note: pods that failed too often, and counts.

-- tube_park(tube, partitions, partition, term, seq, ids, tries, error): moves ids of a pod that keep failing, as texts, to
-- tube_parked, with the number of tries and the error; without ids (NULL or empty) the whole pod, also a control pod. A
-- pod without remaining ids is deleted. Ids given for a control pod are garbage that a reader collects because of it:
-- they are parked as touches of its shard, and the control pod stays. Returns how many ids (1 for a control pod); 0 if
-- there is no such pod. Raises RT002, RT005. Locks the tube's row in tube_registry, to which tube_parked refers, and
-- the lease's row; writes the tube, tube_parked and tube_shard.
CREATE OR REPLACE FUNCTION tube_park(
    tube text, partitions integer, partition integer, term bigint, seq bigint, ids text[], tries integer, error text
) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    keys text := (tube_find(tube)).keys;
    pod record;
    bad text[];
    good text[] := '{}';
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_keep(tube);
    PERFORM tube_lease_hold(tube, partitions, partition, term);
    EXECUTE format('LOCK TABLE %I IN ROW EXCLUSIVE MODE', tube);  -- before it is read: see tube_backfill_begin
    EXECUTE format('SELECT seq, op, shard, ids::text[] AS ids, payload, ts FROM %I WHERE seq = $1 AND shard %% $2 = $3 FOR UPDATE', tube)
        INTO pod USING seq, partitions, partition;
    bad := pod.ids;
    IF pod.ids = '{}' AND cardinality(ids) > 0 THEN
        INSERT INTO tube_parked (tube, seq, op, shard, ids, keys, ts, tries, error)
            VALUES (tube, pod.seq, 'T', pod.shard, CASE keys WHEN 'bigint' THEN ids::bigint[] ELSE '{}' END,
                CASE keys WHEN 'text' THEN ids END, pod.ts, coalesce(tries, 1), coalesce(error, 'no error was given'));
        RETURN cardinality(ids);
    ELSIF coalesce(cardinality(ids), 0) > 0 THEN
        bad := ARRAY(SELECT u FROM unnest(pod.ids) u WHERE u = ANY (tube_park.ids));
        good := ARRAY(SELECT u FROM unnest(pod.ids) u WHERE u <> ALL (tube_park.ids));
    END IF;
    IF pod.seq IS NULL OR (bad = '{}' AND good <> '{}') THEN
        RETURN 0;
    END IF;
    PERFORM tube_shards_note(tube, ARRAY[pod.shard]);
    INSERT INTO tube_parked (tube, seq, op, shard, ids, keys, payload, ts, tries, error)
        VALUES (tube, pod.seq, pod.op, pod.shard, CASE keys WHEN 'bigint' THEN bad::bigint[] ELSE '{}' END,
            CASE keys WHEN 'text' THEN bad END, pod.payload, pod.ts, coalesce(tries, 1), coalesce(error, 'no error was given'));
    IF good = '{}' THEN
        EXECUTE format('DELETE FROM %I WHERE seq = $1', tube) USING seq;
    ELSE
        EXECUTE format('UPDATE %I SET ids = $2::%s[] WHERE seq = $1', tube, keys) USING seq, good;
    END IF;
    RETURN greatest(cardinality(bad), 1);
END
$$;

-- tube_parked_list(tube): the parked ids of one tube or (NULL) of all, the oldest first. Writes nothing.
CREATE OR REPLACE FUNCTION tube_parked_list(tube text = NULL) RETURNS SETOF tube_parked
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT p.* FROM tube_parked p WHERE $1 IS NULL OR p.tube = $1 ORDER BY p.parked
$$;
COMMENT ON FUNCTION tube_parked_list(text) IS 'Lists what failed too often';

-- tube_parked_replay(tube, parked_ids): puts entries of tube_parked, by their number or (NULL) all, back into the tube
-- as new pods, the oldest first; returns how many entries. Raises RT001. Writes tube_parked and the tube.
CREATE OR REPLACE FUNCTION tube_parked_replay(tube text, parked_ids bigint[] = NULL) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_keep(tube);
    replayed bigint;
BEGIN
    EXECUTE format($sql$
        WITH gone AS (
            DELETE FROM tube_parked p WHERE p.tube = $1 AND ($2 IS NULL OR p.parked = ANY ($2)) RETURNING p.*
        )
        INSERT INTO %I (op, shard, ids, payload) SELECT g.op, g.shard, %s, g.payload FROM gone g ORDER BY g.parked
    $sql$, t.tube, CASE t.keys WHEN 'text' THEN 'g.keys' ELSE 'g.ids' END) USING tube, parked_ids;
    GET DIAGNOSTICS replayed = ROW_COUNT;
    RETURN replayed;
END
$$;
COMMENT ON FUNCTION tube_parked_replay(text, bigint[]) IS 'Puts what failed too often back into its tube';

-- tube_parked_drop(tube, parked_ids): deletes entries of tube_parked, by their number or (NULL) all; returns how many.
-- Raises RT001. Writes tube_parked.
CREATE OR REPLACE FUNCTION tube_parked_drop(tube text, parked_ids bigint[] = NULL) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_keep(tube);
    dropped bigint;
BEGIN
    DELETE FROM tube_parked p WHERE p.tube = t.tube AND (parked_ids IS NULL OR p.parked = ANY (parked_ids));
    GET DIAGNOSTICS dropped = ROW_COUNT;
    RETURN dropped;
END
$$;
COMMENT ON FUNCTION tube_parked_drop(text, bigint[]) IS 'Forgets what failed too often';

-- tube_attempt_put(tube, partitions, partition, term, note): stores what the reader of a partition is doing; returns the note
-- before, which may be of a lease before. NULL: only returns it. Raises RT002, RT005. Locks the lease's row, writes
-- tube_attempt.
CREATE OR REPLACE FUNCTION tube_attempt_put(tube text, partitions integer, partition integer, term bigint, note jsonb)
RETURNS jsonb
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    before jsonb;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_lease_hold(tube, partitions, partition, term);
    SELECT a.note INTO before FROM tube_attempt a WHERE a.tube = tube_attempt_put.tube
        AND (a.partitions, a.partition) = (tube_attempt_put.partitions, tube_attempt_put.partition);
    IF note IS NOT NULL THEN
        INSERT INTO tube_attempt AS a VALUES (tube, partitions, partition, note)
            ON CONFLICT ON CONSTRAINT tube_attempt_pkey DO UPDATE SET note = excluded.note;
    END IF;
    RETURN before;
END
$$;

-- tube_worker_beat(tube, worker, ttl, expired): a worker that divides the partitions of a tube with others is alive for ttl
-- (0: it ends). Returns how many partitions the tube has, how many of them this worker should hold at most, how many nobody
-- holds, and the number of such workers. Raises RT001, RT005. Writes tube_worker.
--   worker   the holder of its leases, as in tube_lease
--   expired  beats of leases that the caller has found expired: they count as free
--
-- What other holders hold (readers of the whole tube, workers with chosen partitions) is not divided. Of the rest each
-- worker has the same number, or one more: those who hold most now, so that few partitions move. This gives no right and
-- takes none. A wrong number, after the server's clock has jumped, say, moves leases without need, and they still exclude
-- each other.
CREATE OR REPLACE FUNCTION tube_worker_beat(
    tube text, worker text, ttl interval, expired bigint[],
    OUT partitions integer, OUT most integer, OUT free integer, OUT workers integer
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_find(tube);
    present timestamptz := clock_timestamp();
    most_workers CONSTANT integer := 10000;  -- a tube has at most 32,768 partitions
BEGIN
    INSERT INTO tube_worker AS w VALUES (t.tube, worker, present, ttl)
        ON CONFLICT ON CONSTRAINT tube_worker_pkey DO UPDATE SET seen_at = excluded.seen_at, ttl = excluded.ttl;
    DELETE FROM tube_worker w WHERE w.ctid = ANY (ARRAY(
        SELECT x.ctid FROM tube_worker x
        WHERE x.tube = t.tube
            AND (present NOT BETWEEN x.seen_at - x.ttl AND x.seen_at + x.ttl OR x.ttl <= '0'::interval)
        FOR UPDATE SKIP LOCKED));  -- two who report at once do not wait for each other
    WITH living AS (
        SELECT w.worker AS name FROM tube_worker w
        WHERE w.tube = t.tube AND present BETWEEN w.seen_at - w.ttl AND w.seen_at + w.ttl AND w.ttl > '0'::interval
    ), held AS (
        SELECT DISTINCT n, l.holder FROM tube_lease l CROSS JOIN LATERAL generate_series(
            l.partition % gcd(l.partitions, t.partitions), t.partitions - 1, gcd(l.partitions, t.partitions)) AS n
        WHERE l.tube = t.tube AND l.beat <> ALL (expired)
    ), counted AS (
        SELECT name, row_number() OVER (ORDER BY count(n) DESC, name) AS place
        FROM living LEFT JOIN held ON holder = name GROUP BY name
    ), divided AS (
        SELECT t.partitions - (SELECT count(DISTINCT n) FROM held WHERE holder NOT IN (SELECT name FROM living)) AS ours,
            t.partitions - (SELECT count(DISTINCT n) FROM held) AS free, (SELECT count(*) FROM living) AS among
    )
    SELECT t.partitions, coalesce(d.ours / nullif(d.among, 0) + (c.place <= d.ours % nullif(d.among, 0))::integer, 0),
        d.free, d.among
        INTO partitions, most, free, workers
        FROM divided d LEFT JOIN counted c ON c.name = worker;
    IF workers > most_workers AND ttl > '0'::interval THEN
        PERFORM tube_refuse('RT005', format('more than %s workers divide the partitions of tube %L', most_workers, tube),
            'end some of them, or wait until those that were killed are counted no more');
    END IF;
END
$$;

-- tube_report_put(tube, reporter, counts): stores the report of a reader of the tube, in place of its last one. Reports
-- that are older than a week are deleted, and all but the newest 100. Raises RT001, RT005. Writes tube_report.
CREATE OR REPLACE FUNCTION tube_report_put(tube text, reporter text, counts jsonb) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM tube_keep(tube);
    IF coalesce(reporter, '') = '' OR jsonb_typeof(counts) IS DISTINCT FROM 'object' THEN
        PERFORM tube_refuse('RT005', 'a report has a reporter and an object of counts', 'give both');
    END IF;
    INSERT INTO tube_report AS r (tube, reporter, counts) VALUES (tube, reporter, counts)
        ON CONFLICT ON CONSTRAINT tube_report_pkey
        DO UPDATE SET counts = excluded.counts, reported_at = excluded.reported_at;
    DELETE FROM tube_report r WHERE r.ctid = ANY (ARRAY(
        SELECT x.ctid FROM tube_report x
        WHERE x.tube = tube_report_put.tube AND (x.reported_at < clock_timestamp() - interval '7 days'
            OR x.reporter IN (SELECT y.reporter FROM tube_report y WHERE y.tube = tube_report_put.tube
                ORDER BY y.reported_at DESC OFFSET 100))
        FOR UPDATE SKIP LOCKED));  -- two who report at once do not wait for each other
END
$$;
