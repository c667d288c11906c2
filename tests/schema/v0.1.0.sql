-- What commit fdf9982 installs; made by `python -m tests.schema.release fdf9982 0.1.0`.
SET check_function_bodies = false;
SELECT pg_catalog.set_config('search_path', '', false);
CREATE SCHEMA replicad;


COMMENT ON SCHEMA replicad IS 'made by replicad';


CREATE SCHEMA tube;


COMMENT ON SCHEMA tube IS 'made by replicad';


CREATE FUNCTION replicad.cache_check_right() RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
BEGIN
    IF NOT has_function_privilege('cache_write(text, jsonb)', 'EXECUTE') THEN
        RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('role %I may not invalidate caches', current_user),
            HINT = format('run `replicad caches grant %1$s`, or: GRANT EXECUTE ON FUNCTION %2$I.cache_write(text, jsonb) TO '
                '%1$I', current_user, current_schema());
    END IF;
END
$_$;


CREATE FUNCTION replicad.cache_disable() RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    name text;
    found_one boolean := false;
BEGIN
    LOCK TABLE cache_invalidation IN ACCESS EXCLUSIVE MODE;
    FOR name IN SELECT s.name FROM stream s WHERE s.relation = 'cache_invalidation'::regclass LOOP
        PERFORM stream_remove(name);
        found_one := true;
    END LOOP;
    TRUNCATE cache_invalidation;
    RETURN found_one;
END
$$;


COMMENT ON FUNCTION replicad.cache_disable() IS 'Removes the stream caches and its rows';


CREATE FUNCTION replicad.cache_enable(writers text[] DEFAULT '{}'::text[]) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    place integer;
    wrong text;
    fresh boolean;
BEGIN
    SELECT w INTO wrong FROM unnest(writers) w
    WHERE coalesce(w, '') = '' OR octet_length(w) > 63 OR w <> stream_instance(w) OR w LIKE '%(caches)' LIMIT 1;
    IF FOUND THEN
        PERFORM stream_refuse(format('%L is no name of a writer', left(wrong, 240)),
            'take the application_name of its sessions: 1 to 63 bytes without blanks');
    ELSIF cardinality(writers) > 100 THEN
        PERFORM stream_refuse(format('%s writers are too many', cardinality(writers)),
            'name those whose transactions are long; all others are one writer, master');
    END IF;
    LOCK TABLE cache_invalidation IN SHARE ROW EXCLUSIVE MODE;
    fresh := NOT EXISTS (SELECT FROM stream s WHERE s.relation = 'cache_invalidation'::regclass);
    IF fresh THEN
        PERFORM stream_add('caches', 'cache_invalidation', 'id', 'instance',
            'jsonb_build_array(t.cache_func, t.keys, t.ts_ms)');
    END IF;
    SELECT s.number INTO place FROM stream s WHERE s.relation = 'cache_invalidation'::regclass ORDER BY 1 LIMIT 1;
    PERFORM stream_writers_ensure(place, ARRAY['master'] || writers);
    RETURN fresh;
END
$$;


COMMENT ON FUNCTION replicad.cache_enable(writers text[]) IS 'Makes the stream caches, and sessions writers of their own';


SET default_tablespace = '';

SET default_table_access_method = heap;

CREATE TABLE replicad.cache_invalidation (
    id bigint NOT NULL,
    instance text NOT NULL,
    cache_func text NOT NULL,
    keys jsonb,
    ts_ms bigint DEFAULT ((EXTRACT(epoch FROM clock_timestamp()) * (1000)::numeric))::bigint NOT NULL,
    CONSTRAINT cache_invalidation_keys_check CHECK ((jsonb_typeof(keys) = 'array'::text))
);


COMMENT ON TABLE replicad.cache_invalidation IS 'replicad: cache entries that are no longer good; use invalidate_cache()';


CREATE TABLE replicad.stream (
    number smallint NOT NULL,
    name text NOT NULL,
    relation regclass NOT NULL,
    id_column name NOT NULL,
    instance_column name,
    row_sql text,
    row_type text NOT NULL,
    method text NOT NULL,
    sequence regclass NOT NULL,
    positions regclass,
    setting text NOT NULL,
    trimmed_upto bigint,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    max_row integer DEFAULT 67108864 NOT NULL,
    fed boolean DEFAULT false NOT NULL,
    relation_named text[],
    sequence_named text[],
    positions_named text[],
    also_feeds regclass[] DEFAULT '{}'::regclass[] NOT NULL,
    keep_for interval,
    keep_rows bigint,
    parted oid[] DEFAULT '{}'::oid[] NOT NULL,
    CONSTRAINT stream_keep_for_check CHECK ((keep_for > '00:00:00'::interval)),
    CONSTRAINT stream_keep_rows_check CHECK ((keep_rows > 0)),
    CONSTRAINT stream_max_row_check CHECK (((max_row >= 1024) AND (max_row <= 67108864))),
    CONSTRAINT stream_method_check CHECK ((method = ANY (ARRAY['lock_watch'::text, 'reservation'::text, 'positions_table'::text]))),
    CONSTRAINT stream_number_check CHECK (((number >= 1) AND (number <= 8191)))
);


COMMENT ON TABLE replicad.stream IS 'replicad: the registered streams; use stream_add() and stream_remove()';


CREATE TABLE replicad.stream_writer (
    stream smallint NOT NULL,
    number integer NOT NULL,
    name text NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    retired_at timestamp with time zone,
    CONSTRAINT stream_writer_number_check CHECK (((number >= 1) AND (number <= 999999999)))
);


COMMENT ON TABLE replicad.stream_writer IS 'replicad: numbers of writers, stable for the life of the stream';


CREATE FUNCTION replicad.cache_instance(session_name text) RETURNS text
    LANGUAGE sql STABLE
    BEGIN ATOMIC
 SELECT COALESCE(( SELECT w.name
            FROM replicad.stream_writer w
           WHERE ((w.stream = s.number) AND (w.name = cache_instance.session_name))), 'master'::text) AS "coalesce"
    FROM replicad.stream s
   WHERE ((s.relation)::oid = ('replicad.cache_invalidation'::regclass)::oid)
   ORDER BY s.number
  LIMIT 1;
END;


CREATE FUNCTION replicad.cache_names() RETURNS TABLE(cache_func text, invalidations bigint, whole bigint, last timestamp with time zone)
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT n.cache_func, count(*), count(*) FILTER (WHERE n.keys IS NULL), to_timestamp(max(n.ts_ms) / 1000.0)
    FROM (SELECT i.cache_func, i.keys, i.ts_ms FROM cache_invalidation i ORDER BY i.id DESC LIMIT 100000) n
    GROUP BY n.cache_func
    ORDER BY count(*) DESC, n.cache_func
    LIMIT 1000
$$;


COMMENT ON FUNCTION replicad.cache_names() IS 'The caches that were invalidated lately';


CREATE FUNCTION replicad.cache_on_disk() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'local', true);
    END IF;
    RETURN NULL;
END
$$;


CREATE FUNCTION replicad.cache_write(func text, entries jsonb) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    writer text := cache_writer(func);
    written integer := 0;
BEGIN
    IF entries IS NOT NULL AND (jsonb_typeof(entries) <> 'array'
            OR EXISTS (SELECT FROM jsonb_array_elements(entries) k WHERE jsonb_typeof(k) <> 'array')) THEN
        PERFORM stream_refuse(format('the keys of cache %s are no array of arrays', func),
            'give an array of keys for every entry: jsonb_agg(jsonb_build_array(user_id))');
    END IF;
    IF writer IS NULL THEN
        RETURN 0;
    END IF;
    IF entries IS NULL OR jsonb_array_length(entries) > 10000
            OR EXISTS (SELECT FROM jsonb_array_elements(entries) k WHERE octet_length(k::text) > 65536) THEN
        INSERT INTO cache_invalidation (instance, cache_func, keys) VALUES (writer, func, NULL);
        RETURN 1;
    END IF;
    INSERT INTO cache_invalidation (instance, cache_func, keys)
    SELECT writer, func, k FROM jsonb_array_elements(entries) k;
    GET DIAGNOSTICS written = ROW_COUNT;
    RETURN written;
END
$$;


COMMENT ON FUNCTION replicad.cache_write(func text, entries jsonb) IS 'Writes invalidations; EXECUTE on it is the right to invalidate';


CREATE FUNCTION replicad.cache_writer(func text) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    session_name text := current_setting('application_name');
    writer text := cache_instance(stream_instance(session_name));
BEGIN
    IF coalesce(func, '') = '' OR length(func) > 200 THEN
        PERFORM stream_refuse(format('%L is no name of a cache', left(func, 240)), 'take 1 to 200 characters');
    END IF;
    IF writer = 'master' AND current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
            AND session_name NOT IN ('', 'master') AND session_name NOT LIKE '%(caches)' THEN
        PERFORM set_config('application_name', left(session_name, 40) || ' (caches)', true);
    END IF;
    RETURN writer;
END
$$;


CREATE FUNCTION replicad.federation_on_disk() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'local', true);
    END IF;
    RETURN NULL;
END
$$;


CREATE FUNCTION replicad.federation_source_begin(source text, stream text, token bigint) RETURNS void
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    UPDATE federation_sender s SET token = federation_source_begin.token
    WHERE s.source = federation_source_begin.source AND s.stream = federation_source_begin.stream
        AND s.token IS NULL
$$;


CREATE FUNCTION replicad.federation_source_collapse(source text, names text[]) RETURNS bigint
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
    WITH superseded AS (
        SELECT r.destination, r.stream_ordering, r.part
        FROM (
            SELECT h.destination, h.stream_ordering, h.part,
                lead(true) OVER (PARTITION BY h.destination, h.room ORDER BY h.stream_ordering, h.part) AS followed
            FROM federation_destination_room h
            WHERE h.source = federation_source_collapse.source AND h.destination = ANY (names)
                AND h.room IS NOT NULL
        ) r
        JOIN federation_destination d ON d.source = federation_source_collapse.source AND d.name = r.destination
        WHERE r.followed AND (d.txn_id IS NULL OR (r.stream_ordering, r.part) > (d.txn_stream_ordering, d.txn_part))
    ), gone AS (
        DELETE FROM federation_destination_room r USING superseded s
        WHERE r.source = federation_source_collapse.source AND r.destination = s.destination
            AND r.stream_ordering = s.stream_ordering AND r.part = s.part
        RETURNING 1
    )
    SELECT count(*) FROM gone
$$;


CREATE FUNCTION replicad.federation_source_edus(source text, destination text, most integer) RETURNS TABLE(id bigint, body text)
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
    SELECT u.id, u.body::text
    FROM federation_edu u
    WHERE u.source = federation_source_edus.source AND u.destination = federation_source_edus.destination
    ORDER BY u.id
    LIMIT federation_source_edus.most + 1
$$;


CREATE FUNCTION replicad.federation_source_end_others(source text, sender text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    other record;
BEGIN
    FOR other IN
        SELECT DISTINCT s.name, l.pid
        FROM federation_sender s
        JOIN pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
            AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
            AND l.classid = 1380992595
            AND l.objid::bigint = (federation_source_key(s.source, s.name)::bigint & 4294967295)
        WHERE s.source = federation_source_end_others.source AND l.pid <> pg_backend_pid()
    LOOP
        IF NOT pg_terminate_backend(other.pid, 30000) AND EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = other.pid)
        THEN
            RAISE EXCEPTION 'the session of sender % (pid %) does not end', other.name, other.pid
                USING ERRCODE = '57014';
        END IF;
    END LOOP;
END
$$;


CREATE FUNCTION replicad.federation_source_enlist(source text, sender text, senders text[], streams text[], OUT refusal text, OUT until text) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
#variable_conflict use_column
DECLARE
    other record;
BEGIN
    IF NOT pg_try_advisory_lock(1380992595, federation_source_key(federation_source_enlist.source, sender)) THEN
        refusal := format('a sender named %s is running on this database already', sender);
        until := 'gone';
        RETURN;
    END IF;
    LOCK TABLE federation_sender IN SHARE ROW EXCLUSIVE MODE;  -- two that start look one after the other
    SELECT r.* INTO other FROM federation_source_running(federation_source_enlist.source) r
    WHERE r.name <> federation_source_enlist.sender AND r.senders <> federation_source_enlist.senders
    LIMIT 1;
    IF FOUND THEN
        refusal := format('sender %s is running and shares the destinations among %s, not among %s', other.name,
            array_to_string(other.senders, ', '), array_to_string(federation_source_enlist.senders, ', '));
        until := 'list';
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM federation_sender s
        WHERE s.source = federation_source_enlist.source AND s.senders <> federation_source_enlist.senders)
    THEN
        INSERT INTO federation_sender AS mine (source, name, stream, token, senders, epoch)
        SELECT federation_source_enlist.source, n, s.stream, min(s.token), federation_source_enlist.senders,
            (array_agg(s.epoch ORDER BY s.epoch IS NULL, g.number NULLS FIRST))[1]
        FROM federation_sender s
        LEFT JOIN stream x ON x.name = s.stream
        LEFT JOIN stream_generation g ON g.stream = x.number AND g.id = s.epoch
        CROSS JOIN unnest(federation_source_enlist.senders) n
        WHERE s.source = federation_source_enlist.source
        GROUP BY n, s.stream
        ON CONFLICT (source, name, stream)
            DO UPDATE SET token = excluded.token, senders = excluded.senders, epoch = excluded.epoch;
        DELETE FROM federation_sender s
        WHERE s.source = federation_source_enlist.source AND s.name <> ALL (federation_source_enlist.senders);
    END IF;
    INSERT INTO federation_sender (source, name, stream, senders)
    SELECT federation_source_enlist.source, n, t, federation_source_enlist.senders
    FROM unnest(federation_source_enlist.senders) n CROSS JOIN unnest(streams) t
    ON CONFLICT (source, name, stream) DO NOTHING;
END
$$;


CREATE FUNCTION replicad.federation_source_enter(source text, sender text, epoch text) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    here text := source;
    present text := epoch;
    fork bigint;
    void boolean := false;
BEGIN
    PERFORM federation_source_known(here, present);
    LOCK TABLE federation_sender IN SHARE ROW EXCLUSIVE MODE;
    IF EXISTS (SELECT FROM federation_sender s WHERE s.source = here AND s.stream = here AND s.epoch <> present) THEN
        PERFORM federation_source_end_others(here, sender);
        SELECT min(g.began_at) INTO fork
        FROM federation_sender s
        JOIN stream x ON x.name = s.stream
        JOIN stream_generation h ON h.stream = x.number AND h.id = s.epoch
        JOIN stream_generation p ON p.stream = x.number AND p.id = present
        JOIN stream_generation g ON g.stream = x.number AND g.number > h.number AND g.number <= p.number
        WHERE s.source = here AND s.stream = here;
        void := EXISTS (SELECT FROM federation_sender s WHERE s.source = here AND s.stream = here AND s.token > fork)
            OR EXISTS (SELECT FROM federation_destination d WHERE d.source = here
                AND greatest(d.last_successful_stream_ordering, d.txn_stream_ordering) > fork)
            OR EXISTS (SELECT FROM federation_destination_room r WHERE r.source = here AND r.stream_ordering > fork);
        IF void THEN
            PERFORM federation_source_fork(here, sender, fork);
        END IF;
    END IF;
    UPDATE federation_sender s SET epoch = present WHERE s.source = here AND s.stream = here;
    RETURN void;
END
$$;


CREATE FUNCTION replicad.federation_source_facts(source text, destination text, most integer, most_bytes bigint, after_token bigint, after_part integer) RETURNS TABLE(token bigint, part integer, room text, body text, more boolean)
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
    SELECT w.stream_ordering, w.part, w.room, w.body, w.more
    FROM (
        SELECT r.stream_ordering, r.part, r.room, f.body::text AS body, r.more,
            sum(octet_length(f.body::text)) OVER (ORDER BY r.stream_ordering, r.part
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
        FROM (
            SELECT h.stream_ordering, h.part, h.room, row_number() OVER place AS number,
                lead(true, 1, false) OVER place AS more
            FROM (
                SELECT * FROM federation_destination_room a
                WHERE a.source = federation_source_facts.source AND a.destination = federation_source_facts.destination
                    AND (a.stream_ordering, a.part) > (after_token, after_part)
                ORDER BY a.stream_ordering, a.part
                LIMIT federation_source_facts.most + 1
            ) h
            WINDOW place AS (ORDER BY h.stream_ordering, h.part)
        ) r
        JOIN federation_fact f ON f.source = federation_source_facts.source
            AND f.stream_ordering = r.stream_ordering AND f.part = r.part
        WHERE r.number <= federation_source_facts.most
    ) w
    WHERE coalesce(w.before, 0) < federation_source_facts.most_bytes
    ORDER BY w.stream_ordering, w.part
$$;


CREATE FUNCTION replicad.federation_source_follow(source text, sender text, stream text, epoch text) RETURNS void
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT federation_source_known(federation_source_follow.stream, federation_source_follow.epoch);
    UPDATE federation_sender s SET epoch = federation_source_follow.epoch
    WHERE s.source = federation_source_follow.source AND s.stream = federation_source_follow.stream
        AND (s.name = federation_source_follow.sender OR s.epoch IS NULL)
$$;


CREATE FUNCTION replicad.federation_source_fork(source text, sender text, token bigint) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    here text := source;
    fork bigint := token;
    dropped bigint;
BEGIN
    LOCK TABLE federation_sender IN SHARE ROW EXCLUSIVE MODE;
    PERFORM federation_source_end_others(here, sender);
    UPDATE federation_parked p SET part = NULL WHERE p.source = here AND p.stream_ordering > fork;
    INSERT INTO federation_parked (source, destination, stream_ordering, room, body, reason, wanted)
    SELECT here, r.destination, r.stream_ordering, r.room, f.body, 'the history forked before it was sent again', true
    FROM federation_destination_room r
    JOIN federation_fact f ON f.source = r.source AND f.stream_ordering = r.stream_ordering AND f.part = r.part
    LEFT JOIN federation_destination d ON d.source = r.source AND d.name = r.destination AND d.txn_id IS NOT NULL
        AND d.txn_aside IS NULL AND (r.stream_ordering, r.part) <= (d.txn_stream_ordering, d.txn_part)
        AND federation_source_kept(d.source, d.name, fork)
    WHERE r.source = here AND r.stream_ordering > fork AND r.part < 0  -- federation_source_replay gives such places
        AND d.name IS NULL  -- else it is in a transaction that is repeated
    ORDER BY r.stream_ordering, r.part;
    dropped := federation_source_rewind(here, sender, here, fork,
        ARRAY(SELECT d.name FROM federation_destination d WHERE d.source = here));
    UPDATE federation_sender s SET token = fork WHERE s.source = here AND s.stream = here AND s.token > fork;
    RETURN dropped;
END
$$;


CREATE FUNCTION replicad.federation_source_kept(source text, destination text, token bigint) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT EXISTS (
        SELECT FROM federation_destination d
        WHERE d.source = federation_source_kept.source AND d.name = federation_source_kept.destination
            AND d.txn_id IS NOT NULL
            AND (cardinality(d.txn_edu_ids) > 0 OR d.txn_aside IS NULL AND EXISTS (
                SELECT FROM federation_destination_room r
                WHERE r.source = d.source AND r.destination = d.name
                    AND r.stream_ordering <= federation_source_kept.token
                    AND (r.stream_ordering, r.part) <= (d.txn_stream_ordering, d.txn_part)))
    )
$$;


CREATE FUNCTION replicad.federation_source_key(source text, sender text) RETURNS integer
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT hashtext('federation_sender'::regclass::oid::text || ' '
        || source || ', ' || sender)  -- no name has a comma in it
$$;


CREATE FUNCTION replicad.federation_source_known(stream text, epoch text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM stream_generation g JOIN stream x ON x.number = g.stream
        WHERE x.name = federation_source_known.stream AND g.id = federation_source_known.epoch)
    THEN
        RAISE EXCEPTION 'generation % of stream % is not in this database', epoch, federation_source_known.stream
            USING ERRCODE = '55000', HINT = 'the daemon leads to another database than the sender, or is about to notice that '
                'the database was restored to an earlier time';
    END IF;
END
$$;


CREATE FUNCTION replicad.federation_source_park(source text, names text[], tokens bigint[], parts integer[], rooms text[], bodies text[], reasons text[]) RETURNS void
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    INSERT INTO federation_parked (source, destination, stream_ordering, part, room, body, reason)
    SELECT federation_source_park.source, p.name, p.token, p.part, p.room, p.body::json, p.reason
    FROM unnest(names, tokens, parts, rooms, bodies, reasons) WITH ORDINALITY
        AS p (name, token, part, room, body, reason, number)
    ORDER BY p.number
    ON CONFLICT DO NOTHING
$$;


CREATE FUNCTION replicad.federation_source_record(source text, sender text, stream text, upto bigint, tokens bigint[], parts integer[], rooms text[], bodies text[], numbers integer[], names text[], newcomers text[]) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
#variable_conflict use_column
BEGIN
    IF EXISTS (
        SELECT FROM unnest(tokens, parts, bodies) AS f (token, part, body)
        JOIN federation_fact held ON held.source = federation_source_record.source
            AND held.stream_ordering = f.token AND held.part = f.part
        WHERE held.body::text <> f.body::json::text
    ) THEN  -- after a reset the same id is another fact, and with another routing it has another body
        UPDATE federation_destination d
        SET txn_pdus = (SELECT t.pdus FROM federation_source_transaction(d.source, d.name) t)
        WHERE d.source = federation_source_record.source AND d.txn_id IS NOT NULL AND d.txn_pdus IS NULL;
    END IF;
    INSERT INTO federation_fact AS held (source, stream_ordering, part, body)
    SELECT federation_source_record.source, f.token, f.part, f.body::json FROM unnest(tokens, parts, bodies) AS f (token, part, body)
    ON CONFLICT (source, stream_ordering, part) DO UPDATE SET body = excluded.body
    WHERE held.body::text <> excluded.body::text;
    INSERT INTO federation_destination (source, name)
    SELECT federation_source_record.source, n FROM unnest(newcomers) n
    ON CONFLICT DO NOTHING;
    INSERT INTO federation_destination_room (source, destination, stream_ordering, part, room)
    SELECT federation_source_record.source, t.name, f.token, f.part, f.room
    FROM unnest(tokens, parts, rooms) WITH ORDINALITY AS f (token, part, room, number)
    JOIN unnest(numbers, names) AS t (number, name) ON t.number = f.number
    LEFT JOIN federation_destination d ON d.source = federation_source_record.source AND d.name = t.name
    WHERE d.name IS NULL OR (
        (f.token, f.part) > (d.last_successful_stream_ordering, d.last_successful_part)
        AND (d.txn_id IS NULL OR (f.token, f.part) > (d.txn_stream_ordering, d.txn_part)))
    ORDER BY t.name, f.token, f.part  -- what a destination takes, and removes, together lies together
    ON CONFLICT DO NOTHING;
    UPDATE federation_sender s SET token = upto
    WHERE s.source = federation_source_record.source AND s.name = federation_source_record.sender
        AND s.stream = federation_source_record.stream;
    RETURN federation_source_recorded(sender, stream);
END
$$;


CREATE FUNCTION replicad.federation_source_record_edus(source text, sender text, stream text, upto bigint, names text[], keys text[], bodies text[]) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO federation_destination (source, name)
    SELECT DISTINCT federation_source_record_edus.source, n FROM unnest(names) n
    ON CONFLICT DO NOTHING;
    INSERT INTO federation_edu AS held (source, destination, key, body)
    SELECT federation_source_record_edus.source, u.name, u.key, u.body::json
    FROM (  -- only the last of a key: a statement cannot replace one row twice
        SELECT e.name, e.key, e.body, e.number,
            row_number() OVER (PARTITION BY e.name, e.key ORDER BY e.number DESC) AS age
        FROM unnest(names, keys, bodies) WITH ORDINALITY AS e (name, key, body, number)
    ) u
    WHERE u.key IS NULL OR u.age = 1
    ORDER BY u.number
    ON CONFLICT (source, destination, key) DO UPDATE SET id = DEFAULT, body = excluded.body;
    UPDATE federation_sender s SET token = upto
    WHERE s.source = federation_source_record_edus.source AND s.name = federation_source_record_edus.sender
        AND s.stream = federation_source_record_edus.stream;
    RETURN federation_source_recorded(sender, stream);
END
$$;


CREATE FUNCTION replicad.federation_source_recorded(sender text, stream text) RETURNS bigint
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT min(s.token) FROM federation_sender s
    WHERE s.name = federation_source_recorded.sender AND s.stream = federation_source_recorded.stream
$$;


CREATE FUNCTION replicad.federation_source_replay(source text, names text[]) RETURNS SETOF text
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
#variable_conflict use_column
DECLARE
    one record;
    place record;
    here text := source;
BEGIN
    FOR one IN
        DELETE FROM federation_parked p WHERE p.source = here AND p.wanted AND p.destination = ANY (names) RETURNING p.*
    LOOP
        INSERT INTO federation_destination (source, name) VALUES (here, one.destination) ON CONFLICT DO NOTHING;
        IF one.stream_ordering IS NULL THEN
            INSERT INTO federation_edu (source, destination, key, body)
            VALUES (here, one.destination, one.room, one.body)
            ON CONFLICT (source, destination, key) DO NOTHING;  -- a newer one waits
        ELSE
            SELECT t.token + (t.part >= 0)::integer AS token,
                (-2000000000 + nextval(pg_get_serial_sequence('federation_parked', 'id')))::integer AS part INTO place
            FROM (
                SELECT d.last_successful_stream_ordering, d.last_successful_part
                FROM federation_destination d WHERE d.source = here AND d.name = one.destination
                UNION ALL
                SELECT d.txn_stream_ordering, d.txn_part
                FROM federation_destination d
                WHERE d.source = here AND d.name = one.destination AND d.txn_id IS NOT NULL
                UNION ALL
                SELECT r.stream_ordering, r.part
                FROM federation_destination_room r WHERE r.source = here AND r.destination = one.destination
            ) t (token, part)
            ORDER BY t.token DESC, t.part DESC
            LIMIT 1;
            INSERT INTO federation_fact (source, stream_ordering, part, body)
            VALUES (here, place.token, place.part, one.body);
            INSERT INTO federation_destination_room (source, destination, stream_ordering, part, room)
            VALUES (here, one.destination, place.token, place.part, one.room);
        END IF;
        RETURN NEXT one.destination;
    END LOOP;
END
$$;


CREATE FUNCTION replicad.federation_source_rewind(source text, sender text, stream text, token bigint, names text[]) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    dropped bigint;
BEGIN
    UPDATE federation_destination d SET  -- repeated with its id and bodies; it says nothing about facts above `token`
        txn_pdus = (SELECT t.pdus FROM federation_source_transaction(d.source, d.name) t),
        txn_part = CASE WHEN d.txn_aside IS NULL OR d.last_successful_stream_ordering > federation_source_rewind.token
            THEN 2147483647 ELSE d.last_successful_part END,
        txn_stream_ordering = CASE WHEN d.txn_aside IS NULL THEN federation_source_rewind.token
            ELSE least(d.last_successful_stream_ordering, federation_source_rewind.token) END,
        txn_aside = NULL
    WHERE d.source = federation_source_rewind.source AND d.name = ANY (names)
        AND d.txn_stream_ordering > federation_source_rewind.token
        AND federation_source_kept(d.source, d.name, federation_source_rewind.token);
    UPDATE federation_destination d SET
        last_successful_stream_ordering = least(d.last_successful_stream_ordering, federation_source_rewind.token),
        last_successful_part = CASE WHEN d.last_successful_stream_ordering > federation_source_rewind.token THEN 2147483647
            ELSE d.last_successful_part END
    WHERE d.source = federation_source_rewind.source AND d.name = ANY (names)
        AND d.last_successful_stream_ordering > federation_source_rewind.token;
    UPDATE federation_destination d SET
        txn_id = NULL, txn_ts = NULL, txn_stream_ordering = NULL, txn_part = NULL, txn_edus = NULL, txn_edu_ids = NULL,
        txn_pdus = NULL, txn_aside = NULL
    WHERE d.source = federation_source_rewind.source AND d.name = ANY (names)
        AND d.txn_stream_ordering > federation_source_rewind.token;
    DELETE FROM federation_destination_room r
    WHERE r.source = federation_source_rewind.source AND r.destination = ANY (names)
        AND r.stream_ordering > federation_source_rewind.token;
    GET DIAGNOSTICS dropped = ROW_COUNT;
    DELETE FROM federation_fact f
    WHERE f.source = federation_source_rewind.source AND f.stream_ordering > federation_source_rewind.token
        AND NOT EXISTS (SELECT FROM federation_destination_room r
                        WHERE r.source = f.source AND r.stream_ordering = f.stream_ordering AND r.part = f.part);
    UPDATE federation_sender s SET token = federation_source_rewind.token
    WHERE s.source = federation_source_rewind.source AND s.name = federation_source_rewind.sender
        AND s.stream = federation_source_rewind.stream;
    RETURN dropped;
END
$$;


CREATE FUNCTION replicad.federation_source_running(source text) RETURNS TABLE(name text, senders text[])
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT DISTINCT s.name, s.senders
    FROM federation_sender s
    JOIN pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.classid = 1380992595
        AND l.objid::bigint = (federation_source_key(s.source, s.name)::bigint & 4294967295)
    WHERE s.source = federation_source_running.source
$$;


CREATE FUNCTION replicad.federation_source_standing(source text, after text, most integer) RETURNS TABLE(name text, token bigint, part integer, serial bigint, failures integer, retry_in double precision, catching_up boolean, outstanding boolean)
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
    SELECT d.name, d.last_successful_stream_ordering, d.last_successful_part, d.serial, d.failures,
        extract(epoch FROM d.retry_at - clock_timestamp())::double precision, d.catching_up,
        d.txn_id IS NOT NULL
            OR EXISTS (SELECT FROM federation_destination_room r WHERE r.source = d.source AND r.destination = d.name)
            OR EXISTS (SELECT FROM federation_edu u WHERE u.source = d.source AND u.destination = d.name)
    FROM federation_destination d
    WHERE d.source = federation_source_standing.source
        AND (federation_source_standing.after IS NULL OR d.name > federation_source_standing.after)
    ORDER BY d.name
    LIMIT federation_source_standing.most
$$;


CREATE FUNCTION replicad.federation_source_sweep(source text, stream text, after_token bigint, after_part integer, most integer, OUT removed bigint, OUT kept bigint, OUT token bigint, OUT part integer) RETURNS record
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
    WITH next AS MATERIALIZED (
        SELECT f.stream_ordering, f.part FROM federation_fact f
        WHERE f.source = federation_source_sweep.source
            AND (f.stream_ordering, f.part) > (after_token, after_part)
            AND f.stream_ordering <= (
                SELECT min(s.token) FROM federation_sender s
                WHERE s.source = federation_source_sweep.source AND s.stream = federation_source_sweep.stream)
        ORDER BY f.stream_ordering, f.part
        LIMIT federation_source_sweep.most
    ), gone AS (
        DELETE FROM federation_fact f USING next n
        WHERE f.source = federation_source_sweep.source AND f.stream_ordering = n.stream_ordering AND f.part = n.part
            AND NOT EXISTS (SELECT FROM federation_destination_room r
                            WHERE r.source = federation_source_sweep.source
                                AND r.stream_ordering + 0 = n.stream_ordering AND r.part = n.part)
        RETURNING 1
    ), done AS (
        SELECT count(*) AS removed FROM gone
    ), seen AS (
        SELECT count(*) AS number FROM next
    )
    SELECT done.removed, seen.number - done.removed, last.stream_ordering, last.part
    FROM done CROSS JOIN seen
    LEFT JOIN LATERAL (SELECT n.stream_ordering, n.part FROM next n ORDER BY n.stream_ordering DESC, n.part DESC LIMIT 1)
        last ON seen.number = federation_source_sweep.most
$$;


CREATE FUNCTION replicad.federation_source_transaction(source text, destination text) RETURNS TABLE(id text, serial bigint, ts bigint, token bigint, part integer, edus text[], edu_ids bigint[], pdus text[], substituted boolean, aside json)
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
    SELECT d.txn_id, d.serial, d.txn_ts, d.txn_stream_ordering, d.txn_part, coalesce(d.txn_edus, '{}'),
        coalesce(d.txn_edu_ids, '{}'),
        coalesce(d.txn_pdus, ARRAY(
            SELECT f.body::text
            FROM federation_destination_room r
            JOIN federation_fact f ON f.source = r.source AND f.stream_ordering = r.stream_ordering AND f.part = r.part
            WHERE r.source = d.source AND r.destination = d.name
                AND (r.stream_ordering, r.part) <= (d.txn_stream_ordering, d.txn_part)
            ORDER BY r.stream_ordering, r.part
        )),
        d.txn_pdus IS NOT NULL, d.txn_aside
    FROM federation_destination d
    WHERE d.source = federation_source_transaction.source AND d.name = federation_source_transaction.destination
        AND d.txn_id IS NOT NULL
$$;


CREATE FUNCTION replicad.federation_source_write(source text, entries json) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    refused record;
    taken record;
    updates bigint[];
BEGIN
    INSERT INTO federation_destination AS d (source, name, last_successful_stream_ordering, last_successful_part, serial,
        txn_id, txn_ts, txn_stream_ordering, txn_part, txn_edus, txn_edu_ids, txn_pdus, txn_aside,
        failures, failing_since, retry_at, last_error, catching_up)
    SELECT federation_source_write.source, e.name, e.token, e.part, e.serial,
        e.txn_id, e.txn_ts, e.txn_token, e.txn_part, e.txn_edus, e.txn_edu_ids, e.txn_pdus, e.txn_aside,
        e.failures, CASE WHEN e.failures > 0 THEN clock_timestamp() END,
        clock_timestamp() + make_interval(secs => e.retry_in), e.last_error, e.catching_up
    FROM json_to_recordset(entries) AS e (name text, token bigint, part integer, serial bigint,
        txn_id text, txn_ts bigint, txn_token bigint, txn_part integer, txn_edus text[], txn_edu_ids bigint[],
        txn_pdus text[], txn_aside json, failures integer, retry_in double precision, last_error text, catching_up boolean)
    ON CONFLICT (source, name) DO UPDATE SET
        last_successful_stream_ordering = excluded.last_successful_stream_ordering,
        last_successful_part = excluded.last_successful_part,
        serial = excluded.serial,
        txn_id = excluded.txn_id, txn_ts = excluded.txn_ts,
        txn_stream_ordering = excluded.txn_stream_ordering, txn_part = excluded.txn_part,
        txn_edus = excluded.txn_edus, txn_edu_ids = excluded.txn_edu_ids,
        txn_pdus = CASE WHEN d.txn_id = excluded.txn_id THEN coalesce(d.txn_pdus, excluded.txn_pdus)
            ELSE excluded.txn_pdus END,  -- federation_source_record may have kept them
        txn_aside = excluded.txn_aside,
        failures = excluded.failures,
        failing_since = CASE WHEN excluded.failures > 0 THEN coalesce(d.failing_since, excluded.failing_since) END,
        retry_at = excluded.retry_at, last_error = excluded.last_error, catching_up = excluded.catching_up;
    FOR refused IN
        SELECT e.value ->> 'name' AS name, (p.value ->> 'token')::bigint AS token, (p.value ->> 'part')::integer AS part,
            ARRAY(SELECT n::bigint FROM json_array_elements_text(p.value -> 'numbers') n) AS numbers,
            p.value ->> 'reason' AS reason
        FROM json_array_elements(entries) WITH ORDINALITY AS e (value, place)
        CROSS JOIN LATERAL json_array_elements(coalesce(e.value -> 'parked', '[]')) WITH ORDINALITY AS p (value, number)
        ORDER BY e.place, p.number
    LOOP
        WITH gone AS (
            DELETE FROM federation_destination_room r
            WHERE r.source = federation_source_write.source AND r.destination = refused.name
                AND (r.stream_ordering, r.part) <= (refused.token, refused.part)
            RETURNING r.*
        )
        INSERT INTO federation_parked (source, destination, stream_ordering, part, room, body, reason)
        SELECT g.source, g.destination, g.stream_ordering, g.part, g.room, f.body, refused.reason
        FROM gone g
        JOIN federation_fact f ON f.source = g.source AND f.stream_ordering = g.stream_ordering AND f.part = g.part
        ORDER BY g.stream_ordering, g.part
        ON CONFLICT DO NOTHING;
        WITH gone AS (
            DELETE FROM federation_edu u
            WHERE u.source = federation_source_write.source AND u.id = ANY (refused.numbers)
            RETURNING u.*
        )
        INSERT INTO federation_parked (source, destination, room, body, reason)
        SELECT g.source, g.destination, g.key, g.body, refused.reason FROM gone g ORDER BY g.id;
    END LOOP;
    FOR taken IN  -- one by one: no statistics then lead to a plan that reads what all destinations have yet to take
        SELECT e.name, e.token, e.part FROM json_to_recordset(entries) AS e (name text, token bigint, part integer)
    LOOP
        DELETE FROM federation_destination_room r
        WHERE r.source = federation_source_write.source AND r.destination = taken.name
            AND (r.stream_ordering, r.part) <= (taken.token, taken.part);
    END LOOP;
    updates := ARRAY(
        SELECT unnest(e.done_edus) FROM json_to_recordset(entries) AS e (done_edus bigint[])
    );
    IF updates <> '{}' THEN
        DELETE FROM federation_edu u WHERE u.source = federation_source_write.source AND u.id = ANY (updates);
    END IF;
END
$$;


CREATE FUNCTION replicad.invalidate_cache(func text, keys jsonb DEFAULT NULL::jsonb) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    entry jsonb := nullif(keys, 'null');
BEGIN
    PERFORM cache_check_right();
    IF jsonb_typeof(entry) <> 'array' THEN
        PERFORM stream_refuse(format('the keys of cache %s are %s, not an array', func, jsonb_typeof(entry)),
            'give all arguments of the entry in an array: jsonb_build_array(user_id)');
    END IF;
    RETURN cache_write(func, CASE WHEN entry IS NOT NULL THEN jsonb_build_array(entry) END);
END
$$;


COMMENT ON FUNCTION replicad.invalidate_cache(func text, keys jsonb) IS 'Makes every worker forget an entry, or (NULL) all entries, of a cache';


CREATE FUNCTION replicad.invalidate_cache_many(func text, many jsonb) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    PERFORM cache_check_right();
    RETURN cache_write(func, coalesce(many, 'null'));
END
$$;


COMMENT ON FUNCTION replicad.invalidate_cache_many(func text, many jsonb) IS 'Makes every worker forget many entries of a cache';


CREATE FUNCTION replicad.presence_apply(daemon uuid, users text[], online boolean[], syncs bigint[]) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    PERFORM FROM presence_daemon d WHERE d.id = presence_apply.daemon AND NOT d.buried FOR SHARE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO presence_user AS u (user_id, last_sync)  -- which locks the row, also where it is being deleted just now
    SELECT c.user_id, c.last_sync FROM unnest(users, syncs) AS c (user_id, last_sync) ORDER BY c.user_id COLLATE "C"
    ON CONFLICT (user_id) DO UPDATE SET last_sync = greatest(u.last_sync, excluded.last_sync);
    INSERT INTO presence_seen (user_id, daemon)
    SELECT c.user_id, presence_apply.daemon FROM unnest(users, online) AS c (user_id, online) WHERE c.online
    ON CONFLICT DO NOTHING;
    DELETE FROM presence_seen s USING unnest(users, online) AS c (user_id, online)
    WHERE s.user_id = c.user_id AND s.daemon = presence_apply.daemon AND NOT c.online;
    PERFORM presence_settle(users);
    RETURN true;
END
$$;


CREATE FUNCTION replicad.presence_beat(daemon uuid, beat bigint) RETURNS bigint
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    UPDATE presence_daemon d SET beat = d.beat + 1
    WHERE d.id = presence_beat.daemon AND NOT d.buried
        AND d.beat BETWEEN presence_beat.beat AND presence_beat.beat + 1
    RETURNING d.beat
$$;


CREATE FUNCTION replicad.presence_bury(daemon uuid, beat bigint, batch integer) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    users text[];
BEGIN
    UPDATE presence_daemon d SET buried = true
    WHERE d.id = presence_bury.daemon AND (d.buried OR d.beat = presence_bury.beat);
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    users := ARRAY(SELECT s.user_id FROM presence_seen s WHERE s.daemon = presence_bury.daemon
        ORDER BY s.user_id LIMIT batch);
    IF users = '{}' THEN
        DELETE FROM presence_daemon d WHERE d.id = presence_bury.daemon;
        RETURN 0;
    END IF;
    PERFORM FROM presence_user u WHERE u.user_id = ANY (users) ORDER BY u.user_id FOR UPDATE;
    DELETE FROM presence_seen s WHERE s.daemon = presence_bury.daemon AND s.user_id = ANY (users);
    PERFORM presence_settle(users);
    RETURN cardinality(users);
END
$$;


CREATE FUNCTION replicad.presence_enable(grace interval DEFAULT NULL::interval, lost_grace interval DEFAULT NULL::interval, ttl interval DEFAULT NULL::interval, ip_retention interval DEFAULT NULL::interval) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    present regclass;
BEGIN
    INSERT INTO presence_setting DEFAULT VALUES ON CONFLICT DO NOTHING;
    UPDATE presence_setting s SET
        grace = coalesce(presence_enable.grace, s.grace),
        lost_grace = coalesce(presence_enable.lost_grace, s.lost_grace),
        ttl = coalesce(presence_enable.ttl, s.ttl),
        ip_retention = coalesce(presence_enable.ip_retention, s.ip_retention);
    SELECT s.relation INTO present FROM stream s WHERE s.name = 'presence';
    IF present IS NULL THEN
        PERFORM stream_add('presence', 'presence_stream', 'id', row_sql => 'json_build_array(t.user_id, t.state, '
            't.last_active_ts, t.last_federation_update_ts, t.last_user_sync_ts, t.status_msg, t.currently_active)');
        RETURN true;
    END IF;
    PERFORM stream_refuse(format('there is a stream presence already, of table %s', present),
        format('remove it: SELECT %I.stream_remove(''presence'')', current_schema()))
        WHERE present <> 'presence_stream'::regclass;
    RETURN false;
END
$$;


COMMENT ON FUNCTION replicad.presence_enable(grace interval, lost_grace interval, ttl interval, ip_retention interval) IS 'Has daemons make the stream presence';


CREATE FUNCTION replicad.presence_enlist(name text) RETURNS uuid
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    INSERT INTO presence_daemon (name) VALUES (presence_enlist.name) RETURNING id
$$;


CREATE FUNCTION replicad.presence_fingerprint() RETURNS text
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT concat_ws(' ', stream_epoch(s), coalesce(s.trimmed_upto, 0),
        (SELECT coalesce(max(u.told), 0) FROM presence_user u) > (SELECT coalesce(max(p.id), 0) FROM presence_stream p))
    FROM stream s WHERE s.name = 'presence'
$$;


CREATE FUNCTION replicad.presence_look(OUT grace double precision, OUT lost_grace double precision, OUT ttl double precision, OUT ip_retention double precision, OUT fingerprint text) RETURNS SETOF record
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT extract(epoch FROM s.grace)::float8, extract(epoch FROM s.lost_grace)::float8,
        extract(epoch FROM s.ttl)::float8, extract(epoch FROM s.ip_retention)::float8, presence_fingerprint()
    FROM presence_setting s
    WHERE EXISTS (SELECT FROM stream x WHERE x.name = 'presence' AND x.relation = 'presence_stream'::regclass)
$$;


CREATE FUNCTION replicad.presence_on_disk() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'local', true);
    END IF;
    RETURN NULL;
END
$$;


CREATE FUNCTION replicad.presence_retell(beyond text, batch integer) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    now_ms bigint := extract(epoch FROM clock_timestamp()) * 1000;
    page text[];
BEGIN
    PERFORM FROM presence_setting FOR UPDATE;  -- one daemon at a time, each seeing what the one before it has told
    page := ARRAY(SELECT u.user_id FROM presence_user u WHERE u.user_id > beyond ORDER BY u.user_id LIMIT batch);
    PERFORM FROM presence_user u WHERE u.user_id = ANY (page) ORDER BY u.user_id FOR UPDATE;
    WITH again AS (
        INSERT INTO presence_stream (user_id, state, last_active_ts, last_federation_update_ts, last_user_sync_ts,
            currently_active)
        SELECT u.user_id, 'online', u.last_sync, now_ms, u.last_sync, true
        FROM presence_user u
        WHERE u.user_id = ANY (page) AND u.told IS NOT NULL
            AND NOT EXISTS (SELECT FROM presence_stream p WHERE p.id = u.told AND p.user_id = u.user_id)
        ORDER BY u.user_id
        RETURNING id, user_id
    )
    UPDATE presence_user u SET told = again.id FROM again WHERE u.user_id = again.user_id;
    RETURN page[cardinality(page)];
END
$$;


CREATE FUNCTION replicad.presence_settle(users text[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    now_ms bigint := extract(epoch FROM clock_timestamp()) * 1000;
BEGIN
    WITH come AS (
        INSERT INTO presence_stream (user_id, state, last_active_ts, last_federation_update_ts, last_user_sync_ts,
            currently_active)
        SELECT u.user_id, 'online', u.last_sync, now_ms, u.last_sync, true
        FROM presence_user u
        WHERE u.user_id = ANY (users) AND u.told IS NULL
            AND EXISTS (SELECT FROM presence_seen s WHERE s.user_id = u.user_id)
        ORDER BY u.user_id
        RETURNING id, user_id
    )
    UPDATE presence_user u SET told = come.id FROM come WHERE u.user_id = come.user_id;
    WITH gone AS (
        DELETE FROM presence_user u
        WHERE u.user_id = ANY (users) AND NOT EXISTS (SELECT FROM presence_seen s WHERE s.user_id = u.user_id)
        RETURNING u.user_id, u.told, u.last_sync
    )
    INSERT INTO presence_stream (user_id, state, last_active_ts, last_federation_update_ts, last_user_sync_ts,
        currently_active)
    SELECT g.user_id, 'offline', g.last_sync, now_ms, g.last_sync, false
    FROM gone g WHERE g.told IS NOT NULL ORDER BY g.user_id;
END
$$;


CREATE FUNCTION replicad.presence_user_ip_sweep(batch integer) RETURNS bigint
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    WITH old AS (
        SELECT i.key FROM presence_user_ip i
        WHERE i.stored_at < clock_timestamp() - (SELECT s.ip_retention FROM presence_setting s)
        ORDER BY i.stored_at LIMIT batch FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM presence_user_ip i USING old WHERE i.key = old.key RETURNING 1
    )
    SELECT count(*) FROM gone
$$;


CREATE FUNCTION replicad.presence_user_ip_write(keys bytea[], users text[], ips text[], devices text[], agents text[], tokens bytea[], seen bigint[]) RETURNS void
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    INSERT INTO presence_user_ip AS held (key, user_id, ip, device_id, user_agent, token_sha256, last_seen, stored_at)
    SELECT n.key, n.user_id, n.ip, n.device, n.agent, n.token, n.seen, clock_timestamp()
    FROM unnest(keys, users, ips, devices, agents, tokens, seen)
        AS n (key, user_id, ip, device, agent, token, seen)
    ORDER BY n.key  -- in one order, so that two daemons do not wait for each other in a circle
    ON CONFLICT (key) DO UPDATE SET token_sha256 = excluded.token_sha256, last_seen = excluded.last_seen,
        stored_at = excluded.stored_at
    WHERE held.last_seen <= excluded.last_seen
$$;


CREATE FUNCTION replicad.redis_claim(server text, holder text, seen bigint) RETURNS TABLE(term bigint, tokens jsonb)
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    INSERT INTO redis_publisher AS p (server, holder, term, beat)
    VALUES (redis_claim.server, redis_claim.holder, nextval('redis_beat_seq'), nextval('redis_beat_seq'))
    ON CONFLICT ON CONSTRAINT redis_publisher_pkey DO UPDATE
    SET holder = excluded.holder, term = excluded.term, beat = excluded.beat, renewed_at = clock_timestamp()
    WHERE p.holder IS NULL OR p.beat = redis_claim.seen
    RETURNING p.term, p.tokens
$$;


CREATE FUNCTION replicad.redis_on_disk() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'local', true);
    END IF;
    RETURN NULL;
END
$$;


CREATE FUNCTION replicad.redis_release(server text, term bigint, tokens jsonb) RETURNS void
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    UPDATE redis_publisher p
    SET holder = NULL, beat = nextval('redis_beat_seq'), tokens = redis_release.tokens, renewed_at = clock_timestamp()
    WHERE p.server = redis_release.server AND p.term = redis_release.term
$$;


CREATE FUNCTION replicad.redis_renew(server text, term bigint, tokens jsonb) RETURNS boolean
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    WITH renewed AS (
        UPDATE redis_publisher p
        SET beat = nextval('redis_beat_seq'), tokens = redis_renew.tokens, renewed_at = clock_timestamp()
        WHERE p.server = redis_renew.server AND p.term = redis_renew.term AND p.holder IS NOT NULL
        RETURNING 1
    )
    SELECT EXISTS (SELECT FROM renewed)
$$;


CREATE FUNCTION replicad.sharding_on_disk() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'local', true);
    END IF;
    RETURN NULL;
END
$$;


CREATE FUNCTION replicad.stream_ack_forget(name text, instance text) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    DELETE FROM stream_ack a WHERE a.stream = s.number AND a.instance = stream_ack_forget.instance;
    RETURN FOUND;
END
$$;


COMMENT ON FUNCTION replicad.stream_ack_forget(name text, instance text) IS 'Forgets a sender that will not come back';


CREATE FUNCTION replicad.stream_ack_note(names text[], generations text[], instances text[], tokens bigint[]) RETURNS void
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    INSERT INTO stream_ack AS a (stream, instance, token, generation, acked_at)
    SELECT s.number, n.instance, n.token, n.generation, clock_timestamp()
    FROM unnest(names, generations, instances, tokens) AS n (name, generation, instance, token)
    JOIN stream s ON s.name = n.name AND stream_epoch(s) = n.generation
    WHERE (SELECT count(*) FROM stream_ack o WHERE o.stream = s.number) < 1000
        OR EXISTS (SELECT FROM stream_ack o WHERE o.stream = s.number AND o.instance = n.instance)
    ORDER BY s.number, n.instance COLLATE "C"  -- in one order, so that two daemons do not wait for each other in a circle
    ON CONFLICT (stream, instance) DO UPDATE SET generation = excluded.generation, acked_at = excluded.acked_at,
        token = CASE WHEN a.generation = excluded.generation THEN greatest(a.token, excluded.token) ELSE excluded.token END
$$;


CREATE FUNCTION replicad.stream_acked(name text) RETURNS bigint
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT least(min(a.token), (SELECT p.position FROM stream_position p JOIN stream s ON s.number = p.stream
        WHERE s.name = stream_acked.name AND p.writer = 0))
    FROM stream_acks(stream_acked.name) a HAVING count(*) = count(a.token) AND count(*) > 0
$$;


COMMENT ON FUNCTION replicad.stream_acked(name text) IS 'Up to where all senders have acknowledged a stream';


CREATE FUNCTION replicad.stream_acks(name text, OUT instance text, OUT token bigint, OUT acked_at timestamp with time zone) RETURNS SETOF record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    s stream := stream_find(name);
    senders text[] := '{}';
BEGIN
    IF to_regclass('federation_sender') IS NOT NULL THEN
        EXECUTE 'SELECT coalesce(array_agg(f.name), ''{}'') FROM federation_sender f WHERE f.stream = $1'
            INTO senders USING s.name;
    END IF;
    RETURN QUERY
    SELECT n.instance, CASE WHEN a.generation = stream_epoch(s) THEN a.token END, a.acked_at
    FROM (SELECT o.instance FROM stream_ack o WHERE o.stream = s.number UNION SELECT unnest(senders)) n (instance)
    LEFT JOIN stream_ack a ON a.stream = s.number AND a.instance = n.instance
    ORDER BY 2 NULLS FIRST, 1;
END
$_$;


COMMENT ON FUNCTION replicad.stream_acks(name text, OUT instance text, OUT token bigint, OUT acked_at timestamp with time zone) IS 'The senders of a stream, and what they have acknowledged';


CREATE FUNCTION replicad.stream_add(name text, tbl regclass, id_column name, instance_column name DEFAULT NULL::name, row_sql text DEFAULT NULL::text, method text DEFAULT 'lock_watch'::text, positions regclass DEFAULT NULL::regclass, sequence regclass DEFAULT NULL::regclass, max_row bigint DEFAULT 67108864) RETURNS text[]
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream;
BEGIN
    LOCK TABLE stream IN SHARE ROW EXCLUSIVE MODE;  -- names and numbers are given one after another
    s.name := name;
    s.relation := tbl;
    s.id_column := id_column;
    s.instance_column := instance_column;
    s.row_sql := row_sql;
    s.method := method;
    s.sequence := coalesce(sequence, stream_sequence(tbl, id_column));
    s.positions := positions;
    s.setting := 'replicad.held_' || left(md5(gen_random_uuid()::text), 12);
    s.max_row := stream_check_max_row(max_row);
    s.fed := s.sequence IS NOT DISTINCT FROM stream_sequence(tbl, id_column);
    s.relation_named := stream_named(tbl);
    s.sequence_named := stream_named(s.sequence);
    s.positions_named := stream_named(positions);
    s.also_feeds := ARRAY(SELECT stream_fed_elsewhere(s.sequence, tbl));
    s.parted := '{}';
    s.created_at := clock_timestamp();
    s.row_type := stream_check(s);
    s.number := stream_number_next();
    INSERT INTO stream SELECT s.*;
    PERFORM stream_generation_add(s, stream_floor(s.sequence), '{}', '{}', 'added');
    PERFORM stream_writers_discover(s);
    IF method = 'reservation' THEN
        PERFORM stream_guard_attach(s);
    END IF;
    RETURN stream_notes(s);
END
$$;


COMMENT ON FUNCTION replicad.stream_add(name text, tbl regclass, id_column name, instance_column name, row_sql text, method text, positions regclass, sequence regclass, max_row bigint) IS 'Makes a table a stream; returns notes worth reading';


CREATE FUNCTION replicad.stream_add_changes(name text, source regclass, key name[] DEFAULT NULL::name[], columns name[] DEFAULT NULL::name[], predicate text DEFAULT NULL::text, old boolean DEFAULT false, omit boolean DEFAULT false, filters name[] DEFAULT NULL::name[], max_row bigint DEFAULT 67108864, path name[] DEFAULT current_schemas(false)) RETURNS text[]
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    c stream_changes;
    notes text[];
    target text;
    filter integer;
BEGIN
    LOCK TABLE stream IN SHARE ROW EXCLUSIVE MODE;  -- as stream_add, which numbers the stream
    PERFORM stream_check_name(name);
    c.stream := stream_number_next();
    c.source := source;
    c.key := stream_change_check(source, key);
    c.columns := stream_column_numbers(source, columns);
    IF c.columns IS NOT NULL THEN
        c.columns := (SELECT array_agg(k ORDER BY n) FROM unnest(c.key) WITH ORDINALITY AS u (k, n) WHERE k <> ALL (c.columns)) || c.columns;
    END IF;
    c.predicate := predicate;
    c.path := CASE WHEN predicate IS NULL THEN '{}' ELSE stream_safe_path(path) END;
    c.old := old;
    c.omit := omit;
    c.filters := coalesce(stream_column_numbers(source, filters), '{}');
    c.extended := '0';
    PERFORM stream_refuse('a stream has at most 8 filters', 'name the columns that readers ask for')
        WHERE cardinality(c.filters) > 8;
    PERFORM stream_reader_ensure(source);
    PERFORM stream_change_check_predicate(c);
    target := format('change_%s', c.stream);
    EXECUTE format('CREATE TABLE %I (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, op "char" NOT NULL, key json, '
        '"row" json, old json, schema integer NOT NULL, xid xid8 NOT NULL DEFAULT pg_current_xact_id(), '
        'at timestamptz NOT NULL DEFAULT statement_timestamp()%s) PARTITION BY RANGE (id)', target,
        (SELECT string_agg(format(', by_%s text', f), '' ORDER BY f) FROM generate_series(1, cardinality(c.filters)) AS f));
    EXECUTE format('COMMENT ON TABLE %I IS %L', target, format('replicad: changes of %s', stream_qualified(source)));
    FOR filter IN SELECT generate_series(1, cardinality(c.filters)) LOOP
        EXECUTE format('CREATE INDEX %I ON %I (by_%s, id)', format('%s_by_%s', target, filter), target, filter);
    END LOOP;
    PERFORM stream_belong('TABLE ' || quote_ident(target));
    EXECUTE format('CREATE TABLE %I PARTITION OF %I DEFAULT', target || '_rest', target);
    PERFORM stream_belong('TABLE ' || quote_ident(target || '_rest'));
    WHILE stream_change_parts_ensure(c.stream, 0) LOOP
    END LOOP;
    notes := stream_add(name, target::regclass, 'id', max_row => max_row);
    -- What stream_change_line_sql yields is JSON on one line: nothing has to check it again row by row.
    UPDATE stream x SET row_sql = stream_change_line_sql(), row_type = 'jsonb' WHERE x.number = c.stream;
    INSERT INTO stream_changes SELECT c.*;
    PERFORM stream_changes_ensure(c.stream);
    PERFORM stream_changes_note(c.stream);
    RETURN notes;
END
$$;


COMMENT ON FUNCTION replicad.stream_add_changes(name text, source regclass, key name[], columns name[], predicate text, old boolean, omit boolean, filters name[], max_row bigint, path name[]) IS 'Makes the changes of a table a stream; returns notes worth reading';


CREATE FUNCTION replicad.stream_adopt(number integer, setting text, id bigint, writer text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    xid text := 'p' || pg_current_xact_id()::text;
    me text := current_setting('application_name');
    bound bigint := id - 1;
    covered bigint;
    problem text := 'is not reserved (any more): readers may have passed it';
BEGIN
    IF id IS NULL THEN
        RETURN;
    END IF;
    IF NOT stream_holds_back(number, me, writer) THEN
        problem := format('is of writer %s, and this session is called %s', writer, me);
        bound := NULL;
    ELSIF split_part(current_setting(setting, true), ':', 1) = xid THEN
        -- Ids that come in falling order must not take a lock each: take the bound that covers more of them.
        bound := stream_certified(number, id - 1, writer);
    END IF;
    IF bound IS NOT NULL THEN
        PERFORM stream_prove_or_refuse(s) FROM stream s WHERE s.number = stream_adopt.number;
        PERFORM pg_advisory_xact_lock_shared(stream_lock_key(number, bound));
        covered := stream_certified(number, id - 1, writer);
        IF covered IS NOT NULL THEN
            -- What lies between our bound and theirs may be published already: the other session has moved on.
            PERFORM set_config(setting, xid || ':' || greatest(bound, covered), true);
            RETURN;
        END IF;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'RS003',
        MESSAGE = format('id %s of stream %s %s', id,
            (SELECT s.name FROM stream s WHERE s.number = stream_adopt.number), problem),
        HINT = 'take the id from stream_next() in the transaction that inserts it, or insert it as its writer, before that '
            'completes it';
END
$$;


CREATE FUNCTION replicad.stream_alter(name text, tbl regclass, same_rows boolean DEFAULT false, sequence regclass DEFAULT NULL::regclass, positions regclass DEFAULT NULL::regclass) RETURNS text[]
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find(name);
    old stream := s;
    noted bigint := (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
    ids text := 'SELECT format(''%%s %%s'', count(*), sum(hashint8(t.%I)::bigint)) FROM %s t WHERE t.%I <= %L';
    here text;
    there text;
BEGIN
    s.relation := tbl;
    PERFORM stream_refuse(format('stream %s has the changes of %s', name, c.source), 'to record those of another table, add another stream')
        FROM stream_changes c WHERE c.stream = s.number;
    PERFORM stream_check_table(tbl);
    s.sequence := coalesce(sequence, CASE WHEN old.fed THEN stream_sequence(tbl, s.id_column) END, old.sequence);
    s.fed := s.sequence IS NOT DISTINCT FROM stream_sequence(tbl, s.id_column);
    s.relation_named := stream_named(tbl);
    s.sequence_named := stream_named(s.sequence);
    s.positions := coalesce(positions, old.positions);
    s.positions_named := stream_named(s.positions);
    s.also_feeds := ARRAY(SELECT stream_fed_elsewhere(s.sequence, tbl));
    s.row_type := stream_check_parts(s);
    IF same_rows AND s.relation <> old.relation AND EXISTS (SELECT FROM pg_class c WHERE c.oid = old.relation) THEN
        EXECUTE format(ids, s.id_column, old.relation, s.id_column, noted) INTO there;
        EXECUTE format(ids, s.id_column, tbl, s.id_column, noted) INTO here;
        IF here <> there THEN
            PERFORM stream_refuse(format('%s and %s do not have the same ids up to %s, the noted position', tbl, old.relation,
                noted), 'leave --same-rows out: readers then get all rows of the new table');
        END IF;
    END IF;
    LOCK TABLE stream IN SHARE ROW EXCLUSIVE MODE;  -- as stream_add
    UPDATE stream x SET relation = s.relation, sequence = s.sequence, fed = s.fed, relation_named = s.relation_named,
        sequence_named = s.sequence_named, positions = s.positions, positions_named = s.positions_named, also_feeds = s.also_feeds, row_type = s.row_type
    WHERE x.number = s.number;
    IF s.relation <> old.relation OR s.sequence <> old.sequence THEN
        PERFORM stream_fork(s.number, stream_epoch(s), CASE WHEN same_rows THEN 'altered' ELSE 'table_changed' END);
        PERFORM stream_writers_discover(s);
    END IF;
    IF s.method = 'reservation' AND s.relation <> old.relation THEN
        PERFORM stream_guard_detach(s.number);
        PERFORM stream_guard_attach(s);
    END IF;
    RETURN stream_notes(s);
END
$$;


COMMENT ON FUNCTION replicad.stream_alter(name text, tbl regclass, same_rows boolean, sequence regclass, positions regclass) IS 'Goes on with another table; returns notes worth reading';


CREATE FUNCTION replicad.stream_as_owner(tbl regclass, query text, path text DEFAULT NULL::text) RETURNS SETOF text
    LANGUAGE plpgsql
    SET row_security TO 'off'
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    owner oid := stream_runs_as(tbl);
    reader text;
    line text;
    failure json;
BEGIN
    path := coalesce(path, (SELECT s.reset_val FROM pg_settings s WHERE s.name = 'search_path'));
    IF owner IS NULL THEN
        PERFORM set_config('search_path', path, true);
        RETURN QUERY EXECUTE query;
        RETURN;
    END IF;
    PERFORM stream_reader_ensure(tbl);
    reader := stream_reader(owner);
    FOR line IN EXECUTE format('SELECT * FROM %s($1, $2, $3, $4)', reader)
        USING tbl::oid, query, path, 9223372036854775807
    LOOP
        IF line LIKE '!%' THEN
            failure := substr(line, 2);
            RAISE EXCEPTION USING ERRCODE = failure ->> 'sqlstate', MESSAGE = failure ->> 'message',
                DETAIL = failure ->> 'detail', HINT = failure ->> 'hint';
        END IF;
        RETURN NEXT line;
    END LOOP;
END
$_$;


CREATE FUNCTION replicad.stream_bearer(named text[]) RETURNS regclass
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT c.oid::regclass
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = named[1] AND c.relname = named[2]
$$;


CREATE FUNCTION replicad.stream_belong(what text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = current_schema());
BEGIN
    IF keeper <> current_user AND keeper !~ '^pg_' AND pg_has_role(keeper, 'MEMBER') THEN
        EXECUTE format('ALTER %s OWNER TO %I', what, keeper);
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_certified(number integer, upto bigint, writer text) RETURNS bigint
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT max(h.bound) FROM stream_held(number) h
    WHERE h.certified AND h.bound <= upto AND stream_holds_back(number, h.session, writer)
$$;


CREATE FUNCTION replicad.stream_change_body(stream_number integer, shape integer) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    c stream_changes;
    event record;
    body text := '';
    seen bigint;
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = stream_number;
    seen := stream_shape_seen(c.source);
    FOR event IN SELECT * FROM (VALUES ('UPDATE', 'change_old'), ('INSERT', 'change_new'), ('DELETE', 'change_old')) AS e (name, touched)
    LOOP
        body := body || format($sql$
    IF TG_OP = %1$L THEN
        IF current_setting('transaction_isolation') = 'read committed' THEN
            SELECT %2$I.stream_shape_now(%3$s::oid) = %4$L::bigint INTO change_same FROM %5$s LIMIT 1;
        ELSE
            SELECT %2$I.stream_shape_seen(%3$s::oid) = %4$L::bigint INTO change_same FROM %5$s LIMIT 1;
        END IF;
        IF change_same IS NULL THEN
            RETURN NULL;
        ELSIF NOT change_same THEN
            EXECUTE %2$I.stream_change_sql(%6$s, TG_OP, change_mixed, %2$I.stream_shape_ensure(%6$s));
        ELSIF change_mixed THEN
            %7$s;
        ELSE%8$s
            %9$s;
        END IF;
    END IF;$sql$,
            event.name, current_schema(), c.source::oid, seen, event.touched, c.stream,
            stream_change_sql(c.stream, event.name, true, shape),
            CASE WHEN event.name = 'UPDATE' AND stream_change_usual(c) IS NOT NULL THEN format($sql$
            %s;
            IF FOUND THEN
                change_moment := set_config('replicad.change_%s', change_moment, true);
                RETURN NULL;
            END IF;$sql$, stream_change_sql(c.stream, event.name, false, shape, true), c.stream) END,
            stream_change_sql(c.stream, event.name, false, shape));
    END LOOP;
    RETURN format($sql$
#variable_conflict use_column
DECLARE
    change_moment text := statement_timestamp()::text;
    change_mixed boolean := current_setting('replicad.change_%s', true) IS NOT DISTINCT FROM change_moment;
    change_same boolean;
BEGIN%s
    change_moment := set_config('replicad.change_%1$s', change_moment, true);
    RETURN NULL;
END
$sql$, c.stream, body);
END
$_$;


CREATE FUNCTION replicad.stream_change_check(source regclass, key name[]) RETURNS smallint[]
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    numbers smallint[];
    named text;
BEGIN
    PERFORM stream_check_table(source);
    PERFORM stream_refuse(format('%s is a table of replicad', source), 'name a table of yours')
        FROM pg_class c WHERE c.oid = source AND c.relnamespace = quote_ident(current_schema())::regnamespace;
    PERFORM stream_refuse(format('%s is a partition of %s', source, i.inhparent::regclass), format('name the whole table: --table %s', i.inhparent::regclass))
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhrelid = source AND c.relispartition;
    PERFORM stream_refuse(format('%s has heirs (INHERITS), and no key is unique over all of them', source), 'use partitions instead')
        FROM pg_class c WHERE c.oid = source AND c.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid);
    PERFORM stream_refuse(format('%s is filled by a subscription, whose changes fire no triggers of statements', source),
        'record the changes where they are made, on the publisher') FROM pg_subscription_rel r WHERE r.srrelid = source;
    IF key IS NULL THEN
        SELECT i.indkey::smallint[] INTO numbers FROM pg_index i WHERE i.indrelid = source AND i.indisprimary;
        PERFORM stream_refuse(format('%s has no primary key, so a change cannot say which row it is about', source), format(
            'run: ALTER TABLE %s ADD PRIMARY KEY (...); or name the columns of a unique index: --key COLUMN[,COLUMN]', source))
            WHERE NOT FOUND;
        numbers := numbers[0:(SELECT i.indnkeyatts - 1 FROM pg_index i WHERE i.indrelid = source AND i.indisprimary)];
        numbers := ARRAY(SELECT n FROM unnest(numbers) WITH ORDINALITY AS u (n, place) ORDER BY place);
    ELSE
        numbers := stream_column_numbers(source, key);
    END IF;
    named := array_to_string(ARRAY(SELECT quote_ident(n) FROM unnest(stream_columns(source, numbers)) n), ', ');
    IF NOT EXISTS (
            SELECT FROM pg_index i WHERE i.indrelid = source AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL
                AND i.indexprs IS NULL AND i.indnkeyatts = cardinality(numbers)
                AND numbers @> (i.indkey::smallint[])[0:i.indnkeyatts - 1]) THEN
        PERFORM stream_refuse(format('(%s) is not the key of a unique index of %s that is checked at once', named, source),
            'a change names its row by the key, so no two rows may have the same, not even within a transaction: use a unique '
            'index or constraint that is neither partial nor DEFERRABLE');
    END IF;
    PERFORM stream_refuse(format('column %I of the key of %s may be NULL', a.attname, source),
        format('run: ALTER TABLE %s ALTER COLUMN %I SET NOT NULL', source, a.attname))
        FROM pg_attribute a WHERE a.attrelid = source AND a.attnum = ANY (numbers) AND NOT a.attnotnull LIMIT 1;
    PERFORM stream_refuse(format('role %I may not read %s, whose changes it would record', current_user, source),
        format('run: GRANT SELECT ON %s TO %I', source, current_user))
        WHERE stream_runs_as(source) IS NULL AND NOT has_table_privilege(source, 'SELECT');
    PERFORM stream_refuse(stream_hidden(source), 'or use a table without row security') WHERE stream_hidden(source) IS NOT NULL;
    RETURN numbers;
END
$$;


CREATE TABLE replicad.stream_changes (
    stream smallint NOT NULL,
    source regclass NOT NULL,
    key smallint[] NOT NULL,
    columns smallint[],
    predicate text,
    path name[] NOT NULL,
    old boolean NOT NULL,
    omit boolean NOT NULL,
    filters smallint[] NOT NULL,
    marks text,
    extended xid8,
    missed text,
    missed_at timestamp with time zone
);


COMMENT ON TABLE replicad.stream_changes IS 'replicad: the streams of changes, and the tables whose changes they have';


CREATE FUNCTION replicad.stream_change_check_predicate(c replicad.stream_changes) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    refusal text;
BEGIN
    IF c.predicate IS NULL THEN
        RETURN;
    END IF;
    BEGIN
        PERFORM stream_as_owner(c.source, format(E'SELECT ''''::text FROM (SELECT %s FROM %s) AS t WHERE (\n%s\n) IS TRUE LIMIT 0',
            (SELECT string_agg(quote_ident(n), ', ') FROM unnest(stream_columns(c.source, NULL)) AS n), stream_qualified(c.source),
            c.predicate), stream_path_text(c.path));
    EXCEPTION WHEN OTHERS THEN
        IF left(SQLSTATE, 2) IN ('08', '40', '53', '55', '57', '58', 'XX') THEN
            RAISE;  -- a lock, a deadlock, the disk: nothing is wrong with the expression
        END IF;
        refusal := SQLERRM;
    END;
    PERFORM stream_refuse(format('the condition %L does not fit table %s: %s', c.predicate, c.source, refusal), format(
        'write an SQL condition on the columns of the table, which is called t; names were looked up along %s', stream_path_text(c.path)))
        WHERE refusal IS NOT NULL;
END
$$;


CREATE FUNCTION replicad.stream_change_detach(stream_number integer, tbl oid) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    found name;
BEGIN
    FOR found IN SELECT g.name FROM stream_change_triggers(stream_number, tbl::regclass) g LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', found, stream_qualified(tbl::regclass));
    END LOOP;
END
$$;


CREATE FUNCTION replicad.stream_change_from(c replicad.stream_changes, source text, extra text DEFAULT ''::text) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    key name[] := stream_columns(c.source, c.key);
    columns name[] := stream_columns(c.source, c.columns);
    -- a value of type json, or of a type of users, may contain line ends
    one_line boolean := NOT EXISTS (
        SELECT FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
        LEFT JOIN pg_type e ON e.oid = coalesce(nullif(t.typelem, 0), t.oid)
        WHERE a.attrelid = c.source AND a.attname = ANY (columns || key) AND NOT a.attisdropped
            AND (e.typnamespace <> 'pg_catalog'::regnamespace OR e.oid = 'json'::regtype));
    wrapped text := CASE WHEN one_line THEN '%s' ELSE 'replace(replace((%s)::text, E''\n'', '' ''), E''\r'', '' '')::json' END;
BEGIN
    IF cardinality(key) < cardinality(c.key) THEN
        PERFORM stream_refuse(format('a column of the key of %s was dropped, so its changes cannot be recorded in stream %s of replicad',
            c.source, (SELECT s.name FROM stream s WHERE s.number = c.stream)),
            'remove the stream: replicad streams remove NAME; and add it again');
    END IF;
    RETURN format(E'SELECT %s AS key, %s AS data%s%s FROM %s AS t, LATERAL (SELECT %s) AS r WHERE true%s',
        format(wrapped, stream_change_key(key, 't')), format(wrapped, 'row_to_json(r)'),
        (SELECT string_agg(format(', %s::text AS by_%s', CASE WHEN f.name IS NULL THEN 'NULL' ELSE format('t.%I', f.name) END, f.n), '' ORDER BY f.n)
            FROM unnest(stream_filter_columns(c)) WITH ORDINALITY AS f (name, n)),
        extra, source,
        (SELECT string_agg(format('t.%I', n.name), ', ' ORDER BY n.place) FROM unnest(columns) WITH ORDINALITY AS n (name, place)),
        CASE WHEN c.predicate IS NOT NULL THEN format(E' AND (\n%s\n)', c.predicate) END);
END
$$;


CREATE FUNCTION replicad.stream_change_function_ensure(stream_number integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    c stream_changes;
    runner oid;
    present record;
    signature text := format('%I.change_%s()', current_schema(), stream_number);
    body text := stream_change_body(stream_number, stream_shape_ensure(stream_number));
    path text;
    settings text[];
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = stream_number;
    runner := stream_change_runner(c);
    path := 'search_path=' || stream_path_text(c.path);
    settings := ARRAY[path] || CASE
        WHEN c.predicate IS NOT NULL THEN stream_fixed()
        ELSE CASE stream_change_plain(c.source, stream_columns(c.source, c.columns) || stream_columns(c.source, c.key) || stream_columns(c.source, c.filters))
            WHEN 'nothing' THEN '{}'
            WHEN 'zone' THEN ARRAY['TimeZone=UTC']
            ELSE stream_fixed() END
        END;
    SELECT r.rolname, r.rolsuper, p.proowner, p.prosrc = body AND p.prosecdef AND p.proconfig = settings AS fits INTO present
        FROM pg_proc p JOIN pg_roles r ON r.oid = p.proowner WHERE p.oid = to_regprocedure(signature);
    IF present.fits AND (present.proowner = runner OR present.rolsuper AND stream_runs_as(c.source) IS NULL) THEN
        RETURN;
    ELSIF present.rolname IS NOT NULL AND NOT pg_has_role(present.proowner, 'USAGE') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format(
                'the trigger function %s belongs to role %I, and role %I may not make it anew for the present columns of %s. Changes are '
                'recorded, but each statement that writes there is prepared again', signature, present.rolname, current_user, c.source),
            HINT = stream_owner_remedy(present.proowner, format('SELECT %I.stream_changes_look()', current_schema()));
    END IF;
    IF pg_get_userbyid(runner) = current_user AND NOT has_table_privilege(c.source, 'SELECT') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('role %I may not read %s, whose changes it would record', current_user, c.source),
            HINT = format('run: GRANT SELECT ON %s TO %I', stream_qualified(c.source), current_user);
    END IF;
    EXECUTE format('CREATE OR REPLACE FUNCTION %s RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = %s%s AS %L',
        signature, stream_path_text(c.path), (SELECT string_agg(format(' SET %s = %L', split_part(s.setting, '=', 1),
            split_part(s.setting, '=', 2)), '' ORDER BY s.n) FROM unnest(settings) WITH ORDINALITY AS s (setting, n) WHERE s.n > 1), body);
    EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', signature);
    EXECUTE format('COMMENT ON FUNCTION %s IS %L', signature, 'replicad: records the changes of ' || stream_qualified(c.source));
    IF pg_get_userbyid(runner) <> current_user OR present.rolname <> current_user THEN
        PERFORM stream_give(signature, runner);
    END IF;
    IF stream_runs_as(c.source) IS NOT NULL THEN
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', current_schema(), pg_get_userbyid(runner));
        EXECUTE format('GRANT INSERT ON change_%s TO %I', stream_number, pg_get_userbyid(runner));
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_change_kept(stream_number integer, taken bigint) RETURNS bigint
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    p record;
    last bigint;
    kept bigint := 0;
BEGIN
    FOR p IN SELECT * FROM stream_change_parts(stream_number) x WHERE x.first <= taken LOOP
        EXECUTE format('SELECT max(t.id) FROM %s t', p.part) INTO last;
        kept := kept + coalesce(last - p.first + 1, 0);
    END LOOP;
    RETURN kept;
END
$$;


CREATE FUNCTION replicad.stream_change_key(key name[], alias text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT format(CASE cardinality(key) WHEN 1 THEN 'to_json(%s)' ELSE 'json_build_array(%s)' END,
        (SELECT string_agg(format('%s.%I', alias, k.name), ', ' ORDER BY k.n) FROM unnest(key) WITH ORDINALITY AS k (name, n)))
$$;


CREATE FUNCTION replicad.stream_change_large(c replicad.stream_changes) RETURNS name[]
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT ARRAY(
        SELECT n.name FROM unnest(stream_columns(c.source, c.columns)) WITH ORDINALITY AS n (name, place)
            JOIN pg_attribute a ON a.attrelid = c.source AND a.attname = n.name
        WHERE c.omit AND a.attlen = -1 AND a.attstorage IN ('x', 'e') AND a.attnum <> ALL (c.key)
        ORDER BY n.place)
$$;


CREATE FUNCTION replicad.stream_change_line_sql() RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
    SELECT $sql$'{"op":"' || t.op::text || '"' || coalesce(',"key":' || t.key, '') || coalesce(',"row":' || t."row", '') || coalesce(',"old":' || t.old, '') || ',"schema":' || t.schema || ',"xid":' || t.xid || ',"at":' || to_json(t.at) || '}'$sql$
$_$;


CREATE FUNCTION replicad.stream_change_lines(c replicad.stream_changes, query text, place text, shape integer, ids bigint[], OUT count bigint, OUT last json) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    filters text := coalesce((SELECT string_agg(format(', by_%s', f), '' ORDER BY f)
        FROM generate_series(1, cardinality(c.filters)) AS f), '');
BEGIN
    EXECUTE format('WITH line AS MATERIALIZED (SELECT l.text::json AS one, l.n FROM stream_as_owner($1, $2, $3) WITH ORDINALITY AS l (text, n)), '
        'stored AS (INSERT INTO change_%s (%s op, key, %I%s, schema) '
        'SELECT %s (one ->> ''op'')::"char", one -> ''key'', CASE WHEN json_typeof(one -> ''data'') <> ''null'' THEN one -> ''data'' END%s, $4 FROM line ORDER BY n) '
        'SELECT count(*), (SELECT one FROM line ORDER BY n DESC LIMIT 1) FROM line',
        c.stream, CASE WHEN ids IS NOT NULL THEN 'id,' END, place, filters,
        CASE WHEN ids IS NOT NULL THEN '$5[n],' END,
        regexp_replace(filters, ', (by_\d+)', ', one ->> ''\1''', 'g'))
        INTO count, last
        USING c.source, format('SELECT row_to_json(x)::text FROM (%s) AS x', query), stream_path_text(c.path), shape, ids;
END
$_$;


CREATE FUNCTION replicad.stream_change_marks(stream_number integer) RETURNS TABLE(member oid, marks text, fires boolean)
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT t::oid, coalesce(g.marks, ''), coalesce(g.firing, 0) = 4
    FROM stream_changes c CROSS JOIN stream_tables(c.source) t LEFT JOIN LATERAL (
        SELECT string_agg(g.oid || ':' || g.xmin, ' ' ORDER BY g.oid) AS marks,
            count(*) FILTER (WHERE g.tgenabled = 'A' AND g.tgqual IS NULL AND g.tgtype & 1 = 0) AS firing
        FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
        WHERE g.tgrelid = t AND p.pronamespace = quote_ident(current_schema())::regnamespace
            AND (p.proname = 'change_' || stream_number OR p.proname = 'stream_change_truncated'
                AND g.tgargs = convert_to(stream_number::text, getdatabaseencoding()) || decode('00', 'hex'))
    ) AS g ON true
    WHERE c.stream = stream_number AND EXISTS (SELECT FROM pg_class x WHERE x.oid = c.source)
$$;


CREATE FUNCTION replicad.stream_change_mixed(c replicad.stream_changes, event text) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    key name[] := stream_columns(c.source, c.key);
    keys text := (SELECT string_agg(format(', t.%I AS key_%s', k.name, k.n), '' ORDER BY k.n)
        FROM unnest(key) WITH ORDINALITY AS k (name, n));
    filters text := coalesce((SELECT string_agg(format(', CASE WHEN v.n = 1 THEN k.by_%s ELSE p.by_%1$s END', f), '' ORDER BY f)
        FROM generate_series(1, cardinality(c.filters)) AS f), '');
    news text := CASE WHEN event <> 'DELETE' THEN stream_change_from(c, 'change_new', ', false AS present' || keys) END;
    olds text := CASE WHEN event <> 'INSERT' THEN stream_change_from(c, 'change_old', ', true AS present' || keys) END;
    here text := stream_change_from(c, stream_qualified(c.source)) || (
        SELECT string_agg(format(' AND t.%I = k.key_%s', x.name, x.n), '' ORDER BY x.n) FROM unnest(key) WITH ORDINALITY AS x (name, n));
BEGIN
    RETURN format('SELECT CASE WHEN v.n = 1 THEN ''d'' WHEN k.present AND %1$s THEN ''u'' ELSE ''i'' END, k.key, '
        'CASE WHEN v.n = 2 THEN p.data END, %2$s%3$s '
        'FROM (SELECT DISTINCT ON (e.key::text) e.* FROM (%4$s) AS e ORDER BY e.key::text, e.present DESC) AS k '
        'LEFT JOIN LATERAL (%5$s) AS p ON p.key::text = k.key::text CROSS JOIN (VALUES (1), (2)) AS v (n) '
        'WHERE CASE v.n WHEN 1 THEN p.key IS NULL OR k.present AND NOT (%1$s) ELSE p.key IS NOT NULL END ORDER BY v.n',
        stream_change_same(c, 'k', 'p'), CASE WHEN c.old THEN format('CASE WHEN k.present AND (v.n = 1 OR %s) THEN k.data END',
            stream_change_same(c, 'k', 'p')) ELSE 'NULL::json' END, filters,  -- who gets an insert does not get another's row
        concat_ws(' UNION ALL ', news, olds), here);
END
$_$;


CREATE FUNCTION replicad.stream_change_older(tbl regclass, newest xid8) RETURNS boolean
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT EXISTS (
        SELECT FROM pg_locks l JOIN pg_locks x ON x.virtualtransaction = l.virtualtransaction AND x.locktype = 'transactionid' AND x.mode = 'ExclusiveLock'
        WHERE l.locktype = 'relation' AND l.relation = tbl AND l.mode = 'RowExclusiveLock' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
            AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()) AND l.virtualtransaction NOT LIKE '-1/%'
            AND (newest::text::numeric - x.transactionid::text::numeric) % 4294967296 BETWEEN 1 AND 2147483648)  -- of 32 bits, which begin again
$$;


CREATE FUNCTION replicad.stream_change_parts(stream_number integer) RETURNS TABLE(part regclass, first bigint, last bigint)
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
    SELECT p.oid::regclass, b.bounds[1]::bigint, b.bounds[2]::bigint - 1
    FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhrelid
    CROSS JOIN LATERAL (SELECT regexp_match(pg_get_expr(p.relpartbound, p.oid), $x$FROM \('?(\d+)'?\) TO \('?(\d+)'?\)$x$)) AS b (bounds)
    WHERE i.inhparent = to_regclass(format('%I.change_%s', current_schema(), stream_number)) AND b.bounds IS NOT NULL
$_$;


CREATE FUNCTION replicad.stream_change_parts_ensure(stream_number integer, taken bigint) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    target text := format('change_%s', stream_number);
    upto bigint := coalesce((SELECT max(p.last) FROM stream_change_parts(stream_number) p), 0);
    made text;
BEGIN
    IF 3 <= (SELECT count(*) FROM stream_change_parts(stream_number) p WHERE p.first > taken + 1) THEN
        RETURN false;
    ELSIF taken > upto AND upto > 0 THEN
        IF pg_relation_size(format('%I', target || '_rest')::regclass) > 64 << 20 THEN
            RETURN false;  -- an ATTACH reads it while writers wait; its rows go by retention first
        END IF;
        upto := taken + 10000;  -- other sessions take ids meanwhile
    END IF;
    made := format('%s_%s', target, upto + 1);
    EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING INDEXES)', made, target);
    PERFORM stream_belong('TABLE ' || quote_ident(made));
    EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)', target, made, upto + 1, upto + 1 + (1 << 28));
    RETURN true;
EXCEPTION WHEN lock_not_available OR check_violation THEN
    RETURN false;  -- the next call tries again
END
$$;


CREATE FUNCTION replicad.stream_change_plain(tbl regclass, columns name[]) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT CASE max(CASE
            WHEN coalesce(nullif(t.typelem, 0), t.oid) IN ('bool'::regtype, 'int2'::regtype, 'int4'::regtype, 'int8'::regtype,
                'text'::regtype, 'varchar'::regtype, 'bpchar'::regtype, 'numeric'::regtype, 'uuid'::regtype, 'jsonb'::regtype,
                'date'::regtype, 'timestamp'::regtype, 'oid'::regtype) THEN 0
            WHEN coalesce(nullif(t.typelem, 0), t.oid) = 'timestamptz'::regtype THEN 1
            ELSE 2 END)
        WHEN 0 THEN 'nothing' WHEN 1 THEN 'zone' ELSE 'settings' END
    FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = tbl AND a.attname = ANY (columns) AND NOT a.attisdropped
$$;


CREATE FUNCTION replicad.stream_change_rest_trim(s replicad.stream, upto bigint) RETURNS void
    LANGUAGE plpgsql
    SET lock_timeout TO '100ms'
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    rest text := format('change_%s_rest', s.number);
    last bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM stream_changes c WHERE c.stream = s.number) THEN
        RETURN;
    END IF;
    EXECUTE format('SELECT max(r.id) FROM %I r', rest) INTO last;
    IF last <= upto THEN
        EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', rest);
        EXECUTE format('SELECT max(r.id) FROM %I r', rest) INTO last;  -- a writer may have had the lock
        IF last <= upto THEN
            PERFORM stream_trim_note(s.number, last, false);
            EXECUTE format('TRUNCATE %I', rest);
        END IF;
    END IF;
EXCEPTION WHEN lock_not_available THEN
    NULL;  -- the next call tries again
END
$$;


CREATE FUNCTION replicad.stream_change_runner(c replicad.stream_changes) RETURNS oid
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT coalesce(stream_runs_as(c.source), CASE
        WHEN c.predicate IS NULL AND has_table_privilege(n.nspowner, c.source, 'SELECT') AND pg_has_role(n.nspowner, 'MEMBER')
            AND pg_get_userbyid(n.nspowner) !~ '^pg_' THEN n.nspowner
        ELSE (SELECT r.oid FROM pg_roles r WHERE r.rolname = current_user) END)
    FROM pg_namespace n WHERE n.nspname = current_schema()
$$;


CREATE FUNCTION replicad.stream_change_same(c replicad.stream_changes, one text, other text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
    SELECT CASE WHEN cardinality(c.filters) = 0 THEN format('%s.key::text = %s.key::text', one, other)
        ELSE (SELECT format('json_build_array(%1$s.key, %2$s)::text = json_build_array(%3$s.key, %4$s)::text', one,
                string_agg(format('%s.by_%s', one, f), ', ' ORDER BY f), other, string_agg(format('%s.by_%s', other, f), ', ' ORDER BY f))
            FROM generate_series(1, cardinality(c.filters)) AS f) END
$_$;


CREATE FUNCTION replicad.stream_change_sql(stream_number integer, event text, mixed boolean, shape integer, usual boolean DEFAULT false) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    c stream_changes;
    filters int[];
    query text;
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = stream_number;
    filters := ARRAY(SELECT generate_series(1, cardinality(c.filters)));
    query := CASE
        WHEN usual THEN stream_change_usual(c)
        WHEN mixed THEN stream_change_mixed(c, event)
        WHEN event = 'UPDATE' THEN stream_change_update(c)
        WHEN event = 'INSERT' THEN format('SELECT ''i'', n.key, n.data, NULL::json%s FROM (%s) AS n',
            (SELECT string_agg(format(', n.by_%s', f), '' ORDER BY f) FROM unnest(filters) AS f), stream_change_from(c, 'change_new'))
        ELSE format('SELECT ''d'', o.key, NULL::json, %s%s FROM (%s) AS o', CASE WHEN c.old THEN 'o.data' ELSE 'NULL::json' END,
            (SELECT string_agg(format(', o.by_%s', f), '' ORDER BY f) FROM unnest(filters) AS f), stream_change_from(c, 'change_old'))
    END;
    IF query IS NULL THEN
        RETURN NULL;
    END IF;
    RETURN format(E'INSERT INTO %I.change_%s (op, key, "row", old%s, schema)\n'
        '/* This records this write in stream %s of replicad. If it fails, stop recording: replicad streams remove STREAM */\n'
        'SELECT q.*, %s FROM (%s) AS q', current_schema(), c.stream,
        (SELECT string_agg(format(', by_%s', f), '' ORDER BY f) FROM unnest(filters) AS f),
        (SELECT replace(replace(s.name, '*/', '* /'), '/*', '/ *') FROM stream s WHERE s.number = c.stream), shape, query);
END
$$;


CREATE FUNCTION replicad.stream_change_triggers(stream_number integer, tbl regclass) RETURNS TABLE(name name, event integer, function regprocedure, fires boolean)
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
    SELECT g.tgname, g.tgtype & 60, p.oid::regprocedure, g.tgenabled = 'A' AND g.tgqual IS NULL AND g.tgtype & 1 = 0
    FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
    WHERE g.tgrelid = $2 AND p.pronamespace = quote_ident(current_schema())::regnamespace
        AND (p.proname = 'change_' || $1 OR p.proname = 'stream_change_truncated'
            AND g.tgargs = convert_to($1::text, getdatabaseencoding()) || decode('00', 'hex'))
$_$;


CREATE FUNCTION replicad.stream_change_truncated() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET row_security TO 'off'
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    c stream_changes;
    target text;
    last_op "char";
    shape integer;
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = TG_ARGV[0]::integer;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    target := format('change_%s', c.stream);
    EXECUTE format('SELECT x.op FROM %I x WHERE x.xid = pg_current_xact_id() AND x.id > $1 ORDER BY x.id DESC LIMIT 1', target) INTO last_op
        USING coalesce((SELECT p.position FROM stream_position p WHERE p.stream = c.stream AND p.writer = 0), 0);
    shape := stream_shape_ensure(c.stream);
    IF c.source = TG_RELID THEN
        EXECUTE format('INSERT INTO %I (op, schema) VALUES (''t'', %s)', target, shape);
    ELSIF last_op IS DISTINCT FROM 't' THEN
        PERFORM stream_refuse(format('partition %s of %s is recorded in a stream of replicad, so TRUNCATE of it alone needs the '
            'isolation level READ COMMITTED: rows that were committed after this transaction began would not be recorded',
            TG_RELID::regclass, c.source), 'run TRUNCATE in a transaction of its own at READ COMMITTED, or use DELETE')
            WHERE current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted');
        PERFORM stream_change_lines(c, format('SELECT ''d'' AS op, q.key, %s AS data%s FROM (%s) AS q', CASE WHEN c.old THEN 'q.data' ELSE 'NULL::json' END,
            (SELECT string_agg(format(', q.by_%s', f), '' ORDER BY f) FROM generate_series(1, cardinality(c.filters)) AS f),
            stream_change_from(c, stream_qualified(TG_RELID))), 'old', shape, NULL);
    END IF;
    RETURN NULL;
END
$_$;


CREATE FUNCTION replicad.stream_change_update(c replicad.stream_changes) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    large name[] := stream_change_large(c);
    small stream_changes := c;
    news text;
    olds text;
    data text := 'n.data';
    filters text := coalesce((SELECT string_agg(format(', coalesce(n.by_%s, o.by_%1$s)', f), '' ORDER BY f)
        FROM generate_series(1, cardinality(c.filters)) AS f), '');
BEGIN
    IF large = '{}' THEN
        news := stream_change_from(c, 'change_new');
        olds := stream_change_from(c, 'change_old');
    ELSE
        small.columns := stream_column_numbers(c.source, ARRAY(
            SELECT n.name FROM unnest(stream_columns(c.source, c.columns)) WITH ORDINALITY AS n (name, place)
            WHERE n.name <> ALL (large) ORDER BY n.place));
        news := stream_change_from(small, 'change_new', (SELECT string_agg(format(', t.%I AS large_%s', l.name, l.n), '' ORDER BY l.n)
            FROM unnest(large) WITH ORDINALITY AS l (name, n)));
        olds := stream_change_from(c, 'change_old', (SELECT string_agg(format(', t.%I AS large_%s', l.name, l.n), '' ORDER BY l.n)
            FROM unnest(large) WITH ORDINALITY AS l (name, n)));
        SELECT format('CASE WHEN n.key IS NOT NULL THEN (left(n.data::text, -1)%s || ''}'')::json END', string_agg(format(
            ' || CASE WHEN o.key IS NOT NULL AND pg_column_size(n.large_%s) >= 256 AND record_image_eq(ROW(n.large_%1$s), '
            'ROW(o.large_%1$s)) THEN '''' ELSE concat(%L, coalesce(to_json(n.large_%1$s)::text, ''null'')) END',
            l.n, format(',%s:', to_json(l.name::text))), '' ORDER BY l.n))
            INTO data FROM unnest(large) WITH ORDINALITY AS l (name, n);
        IF position('E''\n''' IN olds) > 0 THEN
            data := format('replace(replace((%s)::text, E''\n'', '' ''), E''\r'', '' '')::json', data);
        END IF;
    END IF;
    RETURN format('SELECT CASE WHEN n.key IS NULL THEN ''d'' WHEN o.key IS NULL THEN ''i'' ELSE ''u'' END, coalesce(n.key, o.key), %s, '
        '%s%s FROM (%s) AS n FULL JOIN (%s) AS o ON %s%s', data, CASE WHEN c.old THEN 'o.data' ELSE 'NULL::json' END,
        filters, news, olds, stream_change_same(c, 'n', 'o'),
        CASE WHEN cardinality(c.filters) > 0 THEN ' ORDER BY n.key IS NOT NULL' END);  -- before a row is inserted, it is deleted

END
$_$;


CREATE FUNCTION replicad.stream_change_usual(c replicad.stream_changes) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
    SELECT format('SELECT ''u'', n.key, n.data, NULL::json%s FROM (%s) AS n WHERE ARRAY(SELECT %3$s FROM change_new AS t LIMIT 10000) = '
            'ARRAY(SELECT %3$s FROM change_old AS t LIMIT 10000) AND NOT EXISTS (SELECT FROM change_new OFFSET 10000)',
        (SELECT string_agg(format(', n.by_%s', f), '' ORDER BY f) FROM generate_series(1, cardinality(c.filters)) AS f),
        stream_change_from(c, 'change_new'), CASE WHEN count(*) = 1 THEN min(k.value) ELSE format('ROW(%s)', string_agg(k.value, ', ')) END)
    FROM (
        SELECT format('t.%I', a.attname) || CASE WHEN a.attcollation <> 0 THEN ' COLLATE "C"' ELSE '' END AS value,
            a.atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'uuid'::regtype, 'text'::regtype, 'varchar'::regtype,
                'date'::regtype, 'timestamp'::regtype, 'timestamptz'::regtype, 'bool'::regtype) AS plain
        FROM pg_attribute a WHERE a.attrelid = c.source AND a.attnum = ANY (c.key)
        UNION ALL
        SELECT format('t.%I::text COLLATE "C"', a.attname), true
        FROM pg_attribute a WHERE a.attrelid = c.source AND a.attnum = ANY (c.filters) AND NOT a.attisdropped
    ) AS k
    WHERE NOT c.old AND c.predicate IS NULL AND stream_change_large(c) = '{}'
    HAVING bool_and(k.plain)
$_$;


CREATE FUNCTION replicad.stream_changes_ensure(stream_number integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    c stream_changes;
    member regclass;
    wanted record;
BEGIN
    PERFORM stream_change_function_ensure(stream_number);
    SELECT * INTO c FROM stream_changes x WHERE x.stream = stream_number;
    FOR member IN SELECT t FROM stream_tables(c.source) t LOOP
        FOR wanted IN
            SELECT * FROM (VALUES
                (4, 'insert', 'AFTER INSERT', 'REFERENCING NEW TABLE AS change_new', format('change_%s()', c.stream)),
                (16, 'update', 'AFTER UPDATE', 'REFERENCING NEW TABLE AS change_new OLD TABLE AS change_old', format('change_%s()', c.stream)),
                (8, 'delete', 'AFTER DELETE', 'REFERENCING OLD TABLE AS change_old', format('change_%s()', c.stream)),
                (32, 'truncate', 'BEFORE TRUNCATE', '', format('stream_change_truncated(%s)', c.stream))
            ) AS w (bit, moment, event, transitions, call)
        LOOP
            IF NOT EXISTS (SELECT FROM stream_change_triggers(c.stream, member) g WHERE g.event = wanted.bit AND g.fires) THEN
                EXECUTE format('CREATE OR REPLACE TRIGGER replicad_change_%s_%s %s ON %s %s FOR EACH STATEMENT EXECUTE FUNCTION %I.%s',
                    c.stream, wanted.moment, wanted.event, stream_qualified(member), wanted.transitions, current_schema(), wanted.call);
                -- also in sessions with session_replication_role = replica
                EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER replicad_change_%s_%s', stream_qualified(member), c.stream,
                    wanted.moment);
            END IF;
        END LOOP;
    END LOOP;
EXCEPTION WHEN insufficient_privilege THEN
    IF member IS NULL THEN
        RAISE;  -- by stream_change_function_ensure
    END IF;
    PERFORM stream_refuse(format('role %I cannot make the triggers that record %s: %s', current_user, member, SQLERRM),
        stream_owner_remedy(k.relowner, format('SELECT %I.stream_changes_look()', current_schema()))) FROM pg_class k WHERE k.oid = member;
END
$$;


CREATE FUNCTION replicad.stream_changes_extend() RETURNS boolean
    LANGUAGE plpgsql
    SET lock_timeout TO '100ms'
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    c stream_changes;
    s stream;
    taken bigint;
    present record;
    ahead integer;
    old boolean;
BEGIN
    FOR s IN SELECT x.* FROM stream x WHERE EXISTS (SELECT FROM stream_changes y WHERE y.stream = x.number) ORDER BY x.number LOOP
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(hashtext('replicad changes'), s.number);  -- another daemon is at it
        SELECT x.* INTO c FROM stream_changes x WHERE x.stream = s.number;
        taken := pg_sequence_last_value(s.sequence);
        CONTINUE WHEN c.stream IS NULL OR taken IS NULL;
        IF c.extended IS NULL THEN
            c.extended := pg_snapshot_xmax(pg_current_snapshot());
            UPDATE stream_changes x SET extended = c.extended WHERE x.stream = c.stream;
        END IF;
        SELECT p.* INTO present FROM stream_change_parts(c.stream) p WHERE taken BETWEEN p.first AND p.last;
        SELECT count(*) INTO ahead FROM stream_change_parts(c.stream) p WHERE p.first > taken;
        CONTINUE WHEN ahead >= 3 AND (present.last = taken OR taken - present.first < 99999);
        old := stream_change_older(s.relation, c.extended);
        IF ahead < 3 AND NOT old AND stream_change_parts_ensure(c.stream, taken) THEN
            UPDATE stream_changes x SET extended = NULL WHERE x.stream = c.stream;
            RETURN true;
        ELSIF present.last > taken AND taken - present.first >= 99999 AND (ahead > 1 OR ahead = 1 AND NOT old)
                AND taken - present.first >= stream_change_kept(c.stream, taken) / 4 THEN
            PERFORM setval(s.sequence, present.last);
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
END
$$;


CREATE FUNCTION replicad.stream_changes_fault(s replicad.stream) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    c stream_changes;
    again text := format('replicad streams snapshot %s --anew', stream_shell(s.name));
    member regclass;
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = s.number;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF NOT EXISTS (SELECT FROM pg_class x WHERE x.oid = c.source) THEN
        RETURN format('the table whose changes it has was dropped; run: replicad streams remove %s', stream_shell(s.name));
    END IF;
    SELECT t INTO member FROM stream_tables(c.source) t
        WHERE 4 > (SELECT count(*) FROM stream_change_triggers(c.stream, t) g WHERE g.fires) LIMIT 1;
    IF FOUND THEN
        RETURN format('triggers of replicad on %s are missing or disabled, so changes of it are not recorded; run: %s', member, again);
    END IF;
    IF stream_hidden(c.source) IS NOT NULL THEN
        RETURN stream_hidden(c.source) || '; then run: ' || again;
    END IF;
    IF c.missed_at IS NOT NULL THEN
        RETURN format('changes of %s may not have been recorded: %s (%s); to send all rows anew, run: %s', c.source, c.missed,
            to_char(c.missed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'), again);
    END IF;
    RETURN NULL;
END
$$;


CREATE FUNCTION replicad.stream_changes_look() RETURNS TABLE(name text, code text, problem text)
    LANGUAGE plpgsql
    SET lock_timeout TO '100ms'
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    c stream_changes;
    m record;
    made text;
    why text;
    remedy text;
    filled boolean;
BEGIN
    FOR c IN SELECT x.* FROM stream_changes x JOIN pg_class k ON k.oid = x.source ORDER BY x.stream FOR UPDATE OF x SKIP LOCKED LOOP
        SELECT s.name INTO name FROM stream s WHERE s.number = c.stream;
        BEGIN
            why := NULL;
            FOR m IN
                SELECT coalesce(n.member, seen.member) AS member, n.marks, n.fires, seen.marks AS before
                FROM stream_change_marks(c.stream) n
                    FULL JOIN (SELECT x.* FROM stream_change_member x WHERE x.stream = c.stream) seen ON seen.member = n.member
            LOOP
                IF m.before IS NULL THEN  -- a new partition
                    PERFORM stream_changes_ensure(c.stream);
                    EXECUTE format('SELECT EXISTS (SELECT FROM %s)', stream_qualified(m.member::regclass)) INTO filled;
                    IF filled THEN
                        PERFORM stream_snapshot_request(name, member => m.member::regclass);
                    END IF;
                    INSERT INTO stream_change_member SELECT c.stream, x.member, x.marks FROM stream_change_marks(c.stream) x WHERE x.member = m.member;
                ELSIF m.marks IS NULL THEN
                    why := coalesce(why, 'a partition was detached or dropped, and its rows were not recorded as deleted');
                    PERFORM stream_change_detach(c.stream, m.member);
                    DELETE FROM stream_change_member x WHERE x.stream = c.stream AND x.member = m.member;
                ELSIF m.marks <> m.before OR NOT m.fires THEN
                    why := coalesce(why, format('the triggers on %s were off or changed', m.member::regclass));
                    UPDATE stream_change_member x SET marks = m.marks WHERE x.stream = c.stream AND x.member = m.member AND x.marks <> m.marks;
                END IF;
            END LOOP;
            IF why IS NOT NULL THEN
                UPDATE stream_changes x SET missed = why, missed_at = coalesce(x.missed_at, clock_timestamp())
                    WHERE x.stream = c.stream AND x.missed IS DISTINCT FROM why;
            END IF;
            SELECT concat_ws(' ', stream_shape_seen(c.source), k.relowner, stream_runs_as(c.source)) INTO made FROM pg_class k WHERE k.oid = c.source;
            IF made IS DISTINCT FROM c.marks THEN
                PERFORM stream_change_function_ensure(c.stream);
                UPDATE stream_changes x SET marks = made WHERE x.stream = c.stream;
            END IF;
            code := NULL;
            problem := NULL;
        EXCEPTION WHEN lock_not_available OR insufficient_privilege OR SQLSTATE 'RS002' THEN
            GET STACKED DIAGNOSTICS remedy = PG_EXCEPTION_HINT;
            code := CASE SQLSTATE WHEN '55P03' THEN 'locked' ELSE 'denied' END;
            problem := CASE
                WHEN code = 'locked' THEN format('new columns and partitions of %s cannot be followed while another session locks it: %s', c.source, SQLERRM)
                ELSE concat_ws('; ', SQLERRM, nullif(remedy, '')) END;
        END;
        SELECT stream_changes_fault(s) INTO why FROM stream s WHERE s.number = c.stream;
        IF why IS NOT NULL THEN
            problem := concat_ws('. Also: ', why, problem);
            code := CASE WHEN code = 'locked' AND c.missed_at IS NULL THEN code ELSE 'changes_missed' END;
        END IF;
        IF problem IS NOT NULL THEN
            RETURN NEXT;
        END IF;
    END LOOP;
END
$$;


CREATE FUNCTION replicad.stream_changes_note(stream_number integer) RETURNS void
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    INSERT INTO stream_change_member AS n (stream, member, marks) SELECT stream_number, m.member, m.marks FROM stream_change_marks(stream_number) m
    ON CONFLICT (stream, member) DO UPDATE SET marks = excluded.marks WHERE n.marks <> excluded.marks
$$;


CREATE FUNCTION replicad.stream_changes_remove(stream_number integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    present record;
BEGIN
    IF NOT EXISTS (SELECT FROM stream_changes c WHERE c.stream = stream_number) THEN
        RETURN;
    END IF;
    FOR present IN
        SELECT g.tgname, stream_qualified(g.tgrelid) AS tbl FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
        WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
            AND (p.proname = 'change_' || stream_number OR p.proname = 'stream_change_truncated'
                AND g.tgargs = convert_to(stream_number::text, getdatabaseencoding()) || decode('00', 'hex'))
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', present.tgname, present.tbl);
    END LOOP;
    EXECUTE format('DROP FUNCTION IF EXISTS change_%s()', stream_number);
    EXECUTE format('DROP TABLE IF EXISTS change_%s', stream_number);
EXCEPTION WHEN insufficient_privilege THEN
    PERFORM stream_refuse(format('role %I cannot remove what records the changes of %s: %s', current_user, c.source, SQLERRM),
        stream_owner_remedy(k.relowner, format('SELECT %I.stream_remove(%L)', current_schema(), s.name)))
        FROM stream s, stream_changes c JOIN pg_class k ON k.oid = c.source WHERE s.number = stream_number AND c.stream = s.number;
    RAISE;
END
$$;


CREATE FUNCTION replicad.stream_check(s replicad.stream) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    PERFORM stream_check_name(s.name);
    RETURN stream_check_parts(s);
END
$$;


CREATE FUNCTION replicad.stream_check_count(n integer) RETURNS void
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    IF n IS NULL OR n NOT BETWEEN 1 AND 10000 THEN
        PERFORM stream_refuse(format('cannot reserve %s ids at once', n), 'ask for 1 to 10000');
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_check_id(tbl regclass, id_column name) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    kind regtype := stream_column_type(tbl, id_column);
    bare regclass;
BEGIN
    IF kind NOT IN ('bigint'::regtype, 'integer'::regtype) THEN
        PERFORM stream_refuse(format('column %I of %s is of type %s', id_column, tbl, kind),
            'the id of a stream is a bigint (or an integer) that a sequence feeds');
    END IF;
    SELECT t INTO bare FROM stream_tables(tbl) t JOIN pg_class c ON c.oid = t
    WHERE c.relkind = 'r' AND NOT EXISTS (
        SELECT FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid JOIN pg_am m ON m.oid = x.relam
        JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
        WHERE i.indrelid = t AND i.indisvalid AND i.indpred IS NULL AND m.amname = 'btree' AND a.attname = id_column)
    LIMIT 1;
    IF FOUND THEN
        -- CONCURRENTLY does not exist for a partitioned table
        PERFORM stream_refuse(
            format('%s has no index on %I, so every look at the stream would read all of it', bare, id_column),
            format('run: CREATE INDEX %sON %s (%I)',
                CASE (SELECT c.relkind FROM pg_class c WHERE c.oid = tbl) WHEN 'p' THEN '' ELSE 'CONCURRENTLY ' END,
                CASE (SELECT c.relispartition FROM pg_class c WHERE c.oid = bare) WHEN true THEN tbl ELSE bare END,
                id_column));
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_check_max_row(bytes bigint) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    IF bytes IS NULL OR bytes NOT BETWEEN 1024 AND 67108864 THEN
        PERFORM stream_refuse_argument(format('a row of at most %s bytes is not possible', bytes),
            'the bound lies between 1024 and 67108864 (64 MiB), which is what clients take');
    END IF;
    RETURN bytes;
END
$$;


CREATE FUNCTION replicad.stream_check_name(name text) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    -- by code point, since what [:space:] and [:cntrl:] mean beyond ASCII depends on the database's locale
    unprintable text := E'[[:space:][:cntrl:]\\u0080-\\u00a0\\u2000-\\u200f\\u2028-\\u202f\\u205f\\u3000\\ufeff]';
BEGIN
    IF coalesce(name, '') = '' OR length(name) > 200 OR name ~ unprintable OR name LIKE 'tube:%' THEN
        PERFORM stream_refuse_argument(format('%L is no name for a stream', left(name, 240)),
            '1 to 200 characters, none of them white space or unprintable, and not beginning with tube:');
    END IF;
    IF EXISTS (SELECT FROM stream s WHERE s.name = stream_check_name.name) THEN
        PERFORM stream_refuse(format('there is a stream %s already', name),
            format('take another name, or run: SELECT %I.stream_remove(%L)', current_schema(), name));
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_check_parts(s replicad.stream) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    fault record;
BEGIN
    IF s.method IS NULL OR s.method NOT IN ('lock_watch', 'reservation', 'positions_table') THEN
        PERFORM stream_refuse_argument(format('there is no method %L', s.method),
            'methods: lock_watch, reservation, positions_table');
    END IF;
    PERFORM stream_check_table(s.relation);
    PERFORM stream_check_id(s.relation, s.id_column);
    IF s.instance_column IS NOT NULL THEN
        PERFORM stream_column_type(s.relation, s.instance_column);
    END IF;
    IF s.sequence IS NULL THEN
        PERFORM stream_refuse(format('no sequence feeds column %I of %s', s.id_column, s.relation), format(
            'run: ALTER TABLE %s ALTER COLUMN %I ADD GENERATED BY DEFAULT AS IDENTITY, or name the sequence that the '
            'application takes its ids from', s.relation, s.id_column));
    END IF;
    SELECT * INTO fault FROM stream_sequence_fault(s.sequence, s.method);
    PERFORM stream_refuse(fault.problem, fault.remedy);
    SELECT * INTO fault FROM stream_ids_fault(s);
    PERFORM stream_refuse(fault.problem, fault.remedy);
    IF s.method = 'positions_table' THEN
        PERFORM stream_check_positions(s.positions);
    ELSIF s.positions IS NOT NULL THEN
        PERFORM stream_refuse_argument('a table of positions goes with the method positions_table only', 'leave it out');
    END IF;
    PERFORM stream_reader_ensure(r) FROM unnest(ARRAY[s.relation, s.sequence, s.positions]) r WHERE r IS NOT NULL;
    RETURN stream_check_row(s.relation, s.id_column, s.row_sql);
END
$$;


CREATE FUNCTION replicad.stream_check_positions(positions regclass) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    IF positions IS NULL THEN
        PERFORM stream_refuse_argument('the method positions_table needs the table in which the writers publish',
            'name it; it has the columns stream_name, instance_name and stream_id');
    END IF;
    IF stream_column_type(positions, 'stream_name') IS NULL OR stream_column_type(positions, 'instance_name') IS NULL
        OR stream_column_type(positions, 'stream_id') NOT IN ('bigint'::regtype, 'integer'::regtype) THEN
        PERFORM stream_refuse(format('column stream_id of %s is not a bigint', positions),
            'it holds the id up to which the writer has finished');
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_check_row(tbl regclass, id_column name, row_sql text) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    kind text;
    probe text;
    failure text;
    target text := stream_qualified(tbl);
BEGIN
    IF row_sql IS NULL THEN
        RETURN 'json';
    END IF;
    PERFORM stream_reader_ensure(tbl);
    BEGIN
        kind := stream_as_owner(tbl, format(E'SELECT pg_typeof((SELECT (%s\n) FROM %s AS t LIMIT 0))::text', row_sql, target));
        -- The id beside it and the coalesce refuse aggregates and functions that return sets, as reading would.
        FOR probe IN SELECT stream_as_owner(tbl, format(E'SELECT line FROM (SELECT t.%I, coalesce((%s\n)::text, ''null'')'
            ' FROM %s AS t ORDER BY 1 DESC LIMIT 100) q(id, line)', id_column, row_sql, target))
        LOOP
            PERFORM CASE WHEN kind NOT IN ('json', 'jsonb') THEN probe::json END;
        END LOOP;
    EXCEPTION WHEN OTHERS THEN
        failure := SQLERRM;
    END;
    IF kind IS NOT NULL AND kind NOT IN ('json', 'jsonb', 'text', 'character varying') THEN
        PERFORM stream_refuse(format('the row expression yields %s, not JSON', kind),
            format('wrap it: to_jsonb(%s)', row_sql));
    ELSIF failure IS NOT NULL THEN
        PERFORM stream_refuse(format('the row expression fails: %s', failure), 'it is one SQL expression that yields '
            'JSON from the columns of the table, which is called t: jsonb_build_array(t.a, t.b)');
    END IF;
    RETURN CASE WHEN kind IN ('json', 'jsonb') THEN kind ELSE 'text' END;
END
$$;


CREATE FUNCTION replicad.stream_check_table(tbl regclass) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    part record;
BEGIN
    IF tbl IS NULL OR NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = tbl) THEN
        PERFORM stream_refuse('there is no such table', 'name it with its schema, such as public.events');
    END IF;
    FOR part IN SELECT t AS name, c.relkind, c.relpersistence FROM stream_tables(tbl) t JOIN pg_class c ON c.oid = t
    LOOP
        IF part.relkind IN ('v', 'm') THEN
            PERFORM stream_refuse(format('%s is a view', part.name), 'register the table that is written to');
        ELSIF part.relkind = 'f' THEN
            PERFORM stream_refuse(format('%s is a foreign table', part.name),
                'writes on another server cannot be watched from here: register the table where it lives');
        ELSIF part.relkind = 'S' THEN
            PERFORM stream_refuse(format('%s is a sequence', part.name), 'register the table whose ids it gives');
        ELSIF part.relkind NOT IN ('r', 'p') THEN
            PERFORM stream_refuse(format('%s is not a table', part.name), 'register the table that is written to');
        ELSIF part.relpersistence = 't' THEN
            PERFORM stream_refuse(format('%s is temporary: no other session can read it', part.name),
                'use a permanent table');
        ELSIF part.relpersistence <> 'p' THEN
            PERFORM stream_refuse(format('%s is unlogged: a crash empties it', part.name),
                format('run: ALTER TABLE %s SET LOGGED', part.name));
        END IF;
    END LOOP;
END
$$;


CREATE FUNCTION replicad.stream_column_numbers(tbl regclass, columns name[]) RETURNS smallint[]
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    wanted name;
    found smallint[] := '{}';
    number smallint;
BEGIN
    IF columns IS NULL THEN
        RETURN NULL;
    END IF;
    FOREACH wanted IN ARRAY columns LOOP
        PERFORM stream_column_type(tbl, wanted);
        SELECT a.attnum INTO number FROM pg_attribute a WHERE a.attrelid = tbl AND a.attname = wanted AND a.attgenerated <> 'v';
        PERFORM stream_refuse(format('column %I of %s is a virtual generated column, which triggers do not see', wanted, tbl),
            'leave it out, or make it STORED') WHERE number IS NULL;
        PERFORM stream_refuse(format('column %I is named twice', wanted), 'name it once') WHERE number = ANY (found);
        found := found || number;
    END LOOP;
    RETURN found;
END
$$;


CREATE FUNCTION replicad.stream_column_type(tbl regclass, column_name name) RETURNS regtype
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    kind regtype;
BEGIN
    SELECT a.atttypid INTO kind FROM pg_attribute a
    WHERE a.attrelid = tbl AND a.attname = column_name AND a.attnum > 0 AND NOT a.attisdropped;
    IF NOT FOUND THEN
        PERFORM stream_refuse(format('table %s has no column %I', tbl, column_name), format('its columns: %s',
            (SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum)
             FROM pg_attribute a WHERE a.attrelid = tbl AND a.attnum > 0 AND NOT a.attisdropped)));
    END IF;
    RETURN kind;
END
$$;


CREATE FUNCTION replicad.stream_columns(tbl regclass, numbers smallint[]) RETURNS name[]
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT coalesce(array_agg(a.attname ORDER BY coalesce(n.place, a.attnum)), '{}')
    FROM pg_attribute a LEFT JOIN unnest(numbers) WITH ORDINALITY AS n (number, place) ON n.number = a.attnum
    WHERE a.attrelid = tbl AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> 'v'
        AND (numbers IS NULL OR n.number IS NOT NULL)
$$;


CREATE FUNCTION replicad.stream_complete(number integer, held bigint, next bigint DEFAULT NULL::bigint) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    IF next IS NOT NULL THEN
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, next));
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, next, true));
    END IF;
    -- The certificate goes first: it must never outlive the lock that it speaks of.
    PERFORM pg_advisory_unlock_shared(stream_lock_key(number, held, true));
    IF NOT pg_advisory_unlock_shared(stream_lock_key(number, held)) THEN
        RETURN false;
    END IF;
    IF next IS NULL THEN
        PERFORM stream_unprove(number);
    END IF;
    RETURN true;
END
$$;


COMMENT ON FUNCTION replicad.stream_complete(number integer, held bigint, next bigint) IS 'Ends the oldest reservation of this session';


CREATE FUNCTION replicad.stream_continue() RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream;
    g stream_generation;
    forked integer := 0;
    old text[];
    present text[] := string_to_array(stream_incarnation(), '/');
BEGIN
    FOR s IN SELECT * FROM stream x ORDER BY x.number LOOP
        g := stream_generation_now(s);
        CONTINUE WHEN stream_continues(s, g) OR (stream_question_of(s)).problem IS NOT NULL
            -- without the right it is not served (stream_denied), nor where the sequence was dropped (NULL; stream_fault)
            OR has_sequence_privilege(s.sequence, 'SELECT') IS NOT TRUE;
        old := string_to_array(g.incarnation, '/');
        PERFORM stream_fork(s.number, g.id, CASE
            WHEN old[1] <> present[1] THEN 'other_server'
            WHEN old[2] <> present[2] THEN 'promoted'
            WHEN old[3] <> present[3] OR g.relation <> s.relation::oid OR g.sequence <> s.sequence::oid THEN 'restored'
            WHEN (old[4], old[5]) IS DISTINCT FROM (present[4], present[5]) THEN 'restarted'
            ELSE 'sequence_changed' END);
        forked := forked + 1;
    END LOOP;
    RETURN forked;
END
$$;


CREATE TABLE replicad.stream_generation (
    stream smallint NOT NULL,
    number integer NOT NULL,
    id text NOT NULL,
    began_at bigint NOT NULL,
    writers integer[] NOT NULL,
    positions bigint[] NOT NULL,
    reason text NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    incarnation text NOT NULL,
    relation oid NOT NULL,
    sequence oid NOT NULL,
    file oid,
    table_files text
);


COMMENT ON TABLE replicad.stream_generation IS 'replicad: stretches of a stream''s history that did not fork';


CREATE FUNCTION replicad.stream_continues(s replicad.stream, g replicad.stream_generation) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT g.incarnation = stream_incarnation() AND g.relation = s.relation::oid AND g.sequence = s.sequence::oid
        AND g.file IS NOT DISTINCT FROM coalesce(pg_relation_filenode(s.sequence), g.file)
$$;


CREATE FUNCTION replicad.stream_daemon_beat(id uuid, name text, pid integer, addresses text[], version text, age double precision, at timestamp with time zone DEFAULT clock_timestamp()) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO stream_daemon AS d (id, name, pid, host, addresses, version, started_at, seen_at)
    VALUES (stream_daemon_beat.id, stream_daemon_beat.name, stream_daemon_beat.pid, inet_client_addr(),
        stream_daemon_beat.addresses, stream_daemon_beat.version,
        stream_daemon_beat.at - make_interval(secs => stream_daemon_beat.age), stream_daemon_beat.at)
    ON CONFLICT ON CONSTRAINT stream_daemon_pkey DO UPDATE SET seen_at = excluded.seen_at;
    DELETE FROM stream_daemon d
    WHERE d.seen_at < stream_daemon_beat.at - interval '1 hour'
        OR (d.seen_at < stream_daemon_beat.at - interval '15 seconds' AND d.id <> stream_daemon_beat.id
            AND d.name = stream_daemon_beat.name AND d.addresses = stream_daemon_beat.addresses
            AND d.host IS NOT DISTINCT FROM inet_client_addr());
END
$$;


CREATE FUNCTION replicad.stream_daemon_leave(id uuid) RETURNS void
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    DELETE FROM stream_daemon d WHERE d.id = stream_daemon_leave.id
$$;


CREATE FUNCTION replicad.stream_daemons(at timestamp with time zone DEFAULT clock_timestamp()) RETURNS TABLE(name text, pid integer, host inet, addresses text[], version text, started_at timestamp with time zone, seen_at timestamp with time zone, silent_s double precision)
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT d.name, d.pid, d.host, d.addresses, d.version, d.started_at, d.seen_at,
        greatest(0, extract(epoch FROM stream_daemons.at - d.seen_at))::float8
    FROM stream_daemon d
    WHERE d.seen_at > stream_daemons.at - interval '1 hour'
    ORDER BY d.name, d.started_at, d.id
$$;


COMMENT ON FUNCTION replicad.stream_daemons(at timestamp with time zone) IS 'The daemons of this database, and for how long each was silent';


CREATE FUNCTION replicad.stream_denial(what text, needed text) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
    SELECT format('role %s may not read %s; run: GRANT %s TO %1$s', quote_ident(current_user), what, needed)
$_$;


CREATE FUNCTION replicad.stream_denied(s replicad.stream) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
    SELECT string_agg(n.sentence, '. ' ORDER BY n.place)
    FROM (
        SELECT DISTINCT ON (c.relnamespace) 1 AS place, stream_denial(format('schema %I', ns.nspname),
            format('USAGE ON SCHEMA %I', ns.nspname)) AS sentence
        FROM pg_class c JOIN pg_namespace ns ON ns.oid = c.relnamespace
        WHERE c.oid IN (s.relation, s.sequence, s.positions) AND NOT has_schema_privilege(ns.oid, 'USAGE')
            AND stream_runs_as(c.oid) IS NULL
        UNION ALL
        SELECT 2, stream_denial(format('table %s', t), format('SELECT ON %s', t))
        FROM unnest(ARRAY[s.relation, s.positions]) t
        WHERE t IS NOT NULL AND NOT has_any_column_privilege(t, 'SELECT') AND stream_runs_as(t) IS NULL
        UNION ALL
        SELECT 3, CASE WHEN stream_runs_as(s.sequence) IS NULL
            THEN stream_denial(format('sequence %s', s.sequence), format('SELECT ON SEQUENCE %s', s.sequence))
            ELSE format('role %1$I is no member of role %2$I, which owns sequence %3$s; run: GRANT %2$I TO %1$I (or GRANT SELECT ON '
                'SEQUENCE %3$s TO %1$I)', current_user, pg_get_userbyid(stream_runs_as(s.sequence)), s.sequence) END
        WHERE NOT has_sequence_privilege(s.sequence, 'SELECT')
        UNION ALL
        SELECT 4, stream_hidden(t) FROM unnest(ARRAY[s.relation, s.positions]) t WHERE stream_hidden(t) IS NOT NULL
    ) n
$_$;


CREATE FUNCTION replicad.stream_epoch(s replicad.stream) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT (stream_generation_now(s)).id
$$;


CREATE FUNCTION replicad.stream_fault(s replicad.stream) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    fault record;
    missing name;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = s.relation) THEN
        RETURN format('its table was dropped; run: replicad streams remove %s --yes', stream_shell(s.name));
    END IF;
    SELECT needed INTO missing FROM unnest(ARRAY[s.id_column, s.instance_column]) needed
    WHERE needed IS NOT NULL AND NOT EXISTS (
        SELECT FROM pg_attribute a WHERE a.attrelid = s.relation AND a.attname = needed AND NOT a.attisdropped);
    IF FOUND THEN
        RETURN format('table %s has no column %I any more; rename it back, or run: replicad streams remove %s --yes, and add the '
            'stream anew with its present column', s.relation, missing, stream_shell(s.name));
    END IF;
    IF s.positions IS NOT NULL AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = s.positions) THEN
        RETURN format('its table of positions was dropped; run: replicad streams remove %s --yes, and add the stream anew',
            stream_shell(s.name));
    END IF;
    SELECT * INTO fault FROM stream_sequence_fault(s.sequence, s.method);
    IF fault.problem IS NULL THEN
        SELECT * INTO fault FROM stream_stray_fault(s);
    END IF;
    IF fault.problem IS NULL THEN
        SELECT * INTO fault FROM stream_question_of(s);
    END IF;
    RETURN fault.problem || '; ' || fault.remedy;
END
$$;


CREATE FUNCTION replicad.stream_fed_elsewhere(sequence regclass, tbl regclass) RETURNS SETOF regclass
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT DISTINCT f.adrelid::regclass
    FROM pg_depend d JOIN pg_attrdef f ON f.oid = d.objid
    WHERE d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = sequence
        AND f.adrelid <> tbl AND f.adrelid NOT IN (SELECT t FROM stream_tables(tbl) t)
$$;


CREATE FUNCTION replicad.stream_feed_fault(s replicad.stream, OUT problem text, OUT remedy text) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    feeding regclass := CASE WHEN s.fed THEN stream_sequence(s.relation, s.id_column) END;
    part regclass;
    identity boolean;
BEGIN
    IF feeding <> s.sequence THEN
        problem := format('column %I of %s takes its ids from sequence %s now, and the stream follows %s', s.id_column,
            s.relation, feeding, s.sequence);
        remedy := format('run: replicad streams alter %s --table %s (with --same-rows if the new sequence goes on above all '
            'rows that were sent); or give the column its sequence back', stream_shell(s.name),
            stream_shell(s.relation::text));
        RETURN;
    END IF;
    IF NOT s.fed OR NOT (SELECT c.relhassubclass FROM pg_class c WHERE c.oid = s.relation) THEN
        RETURN;
    END IF;
    SELECT t, q.oid::regclass, a.attidentity <> '' INTO part, feeding, identity
    FROM stream_tables(s.relation) t
    JOIN pg_attribute a ON a.attrelid = t AND a.attname = s.id_column
    LEFT JOIN pg_attrdef f ON f.adrelid = t AND f.adnum = a.attnum
    JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid AND d.refclassid = 'pg_class'::regclass
        OR d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.deptype = 'i'
            AND d.refobjid = t AND d.refobjsubid = a.attnum AND a.attidentity <> ''
    JOIN pg_class q ON q.relkind = 'S' AND q.oid = CASE WHEN d.classid = 'pg_attrdef'::regclass THEN d.refobjid ELSE d.objid END
    WHERE t <> s.relation AND q.oid <> s.sequence
    LIMIT 1;
    IF FOUND THEN
        problem := format('column %I of %s, a part of %s, takes its ids from sequence %s, and the stream follows %s: rows that are '
            'inserted into %s directly would be passed over', s.id_column, part, s.relation, feeding, s.sequence, part);
        remedy := CASE WHEN identity THEN format('run: ALTER TABLE %s ALTER COLUMN %I DROP IDENTITY; ', part, s.id_column) ELSE 'run: ' END
            || format('ALTER TABLE %s ALTER COLUMN %I SET DEFAULT nextval(%L)', part, s.id_column, stream_qualified(s.sequence));
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_files(tbl regclass) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT string_agg(format('%s:%s', t::oid, pg_relation_filenode(t)), ',' ORDER BY t::oid)
    FROM stream_tables(tbl) t WHERE pg_relation_filenode(t) IS NOT NULL
$$;


CREATE FUNCTION replicad.stream_filter_columns(c replicad.stream_changes) RETURNS name[]
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT coalesce(array_agg(a.attname ORDER BY f.n), '{}')
    FROM unnest(c.filters) WITH ORDINALITY AS f (number, n)
        LEFT JOIN pg_attribute a ON a.attrelid = c.source AND a.attnum = f.number AND NOT a.attisdropped
$$;


CREATE FUNCTION replicad.stream_find(name text) RETURNS replicad.stream
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    found_stream stream;
BEGIN
    SELECT * INTO found_stream FROM stream s WHERE s.name = stream_find.name;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'RS001',
            MESSAGE = format('there is no stream %L', left(name, 200)),
            HINT = format('streams: %s', coalesce((SELECT string_agg(s.name, ', ' ORDER BY s.name)
                FROM (SELECT s.name FROM stream s ORDER BY s.name LIMIT 50) s), 'none yet'));
    END IF;
    RETURN found_stream;
END
$$;


CREATE FUNCTION replicad.stream_find_reserved(name text) RETURNS replicad.stream
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    IF s.method <> 'reservation' THEN
        PERFORM stream_refuse(format('the ids of stream %s are not reserved (its method is %s)', s.name, s.method),
            'insert with the default of the id column, or add the stream anew with the method reservation');
    END IF;
    RETURN s;
END
$$;


CREATE FUNCTION replicad.stream_fixed() RETURNS text[]
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT ARRAY['TimeZone=UTC', 'DateStyle=ISO, MDY', 'IntervalStyle=postgres', 'extra_float_digits=1', 'bytea_output=hex',
        'xmlbinary=base64', 'lc_monetary=C', 'lc_numeric=C', 'lc_time=C', 'xmloption=content', 'array_nulls=on',
        'transform_null_equals=off', 'standard_conforming_strings=on', 'backslash_quote=safe_encoding'
]
$$;


CREATE FUNCTION replicad.stream_floor(sequence regclass) RETURNS bigint
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
    SELECT coalesce(greatest((SELECT q.seqmin FROM pg_sequence q WHERE q.seqrelid = $1), -9223372036854775807), 1) - 1
$_$;


CREATE FUNCTION replicad.stream_fork(stream_number integer, seen text, reason text) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream;
    g stream_generation;
    shared bigint;  -- NULL: nothing
    changed boolean;
    ahead integer[] := '{}';
    upto bigint[] := '{}';
    new_id text;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = stream_number FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'RS001', MESSAGE = 'the stream was removed', HINT = 'load the streams again';
    END IF;
    g := stream_generation_now(s);
    IF g.id IS DISTINCT FROM seen THEN
        RETURN g.id;
    END IF;
    changed := g.sequence = s.sequence::oid AND g.relation = s.relation::oid
        AND g.file IS DISTINCT FROM pg_relation_filenode(s.sequence);
    IF reason IN ('sequence_changed', 'sequence_kept') AND NOT changed THEN
        RETURN g.id;  -- the change was rolled back
    ELSIF reason NOT IN ('sequence_kept', 'sequence_restarted', 'ids_went_back', 'table_changed')
            AND (stream_question_of(s)).problem IS NOT NULL THEN
        RETURN g.id;  -- a user has to say first what has happened (stream_fault)
    ELSIF reason = 'sequence_kept' THEN
        shared := (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
        reason := 'sequence_changed';
    ELSIF reason <> 'table_changed' AND (changed OR reason = 'ids_went_back') THEN
        shared := stream_kept_upto(s, g, reason = 'ids_went_back');
        reason := CASE WHEN reason = 'ids_went_back' THEN reason WHEN shared IS NULL THEN 'sequence_restarted'
            ELSE 'sequence_changed' END;
    ELSIF g.sequence IS DISTINCT FROM s.sequence::oid AND s.sequence::oid <> pg_relation_filenode(s.sequence) THEN
        reason := 'sequence_restarted';
    ELSIF reason NOT IN ('sequence_restarted', 'table_changed') THEN
        shared := (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
        SELECT coalesce(array_agg(p.writer ORDER BY p.writer), '{}'), coalesce(array_agg(p.position ORDER BY p.writer), '{}')
        INTO ahead, upto
        FROM stream_position p WHERE p.stream = s.number AND p.writer <> 0
            AND p.position > coalesce(shared, stream_floor(s.sequence));
    END IF;
    shared := coalesce(shared, stream_floor(s.sequence));
    new_id := stream_generation_add(s, shared, ahead, upto, reason);
    UPDATE stream x SET trimmed_upto = shared WHERE x.number = s.number AND x.trimmed_upto > shared;
    DELETE FROM stream_mark m WHERE m.stream = s.number AND m.position > shared;
    DELETE FROM stream_skip k WHERE k.stream = s.number AND k.id > shared;  -- these ids are other rows now
    UPDATE stream_position p SET published_at = clock_timestamp(),
        position = coalesce((SELECT u FROM unnest(ahead, upto) a (w, u) WHERE a.w = p.writer), least(p.position, shared))
    WHERE p.stream = s.number;
    UPDATE stream_ack a SET generation = new_id, token = least(a.token, shared)
    WHERE a.stream = s.number AND a.generation = g.id;
    RETURN new_id;
END
$$;


CREATE FUNCTION replicad.stream_generation_add(s replicad.stream, began_at bigint, writers integer[], positions bigint[], reason text) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    latest integer := coalesce((stream_generation_now(s)).number, 0);
    new_id text := left(md5(gen_random_uuid()::text), 16);
BEGIN
    IF NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = 'stream_generation'::regclass AND i.indisprimary) THEN
        PERFORM stream_refuse('a dump is being restored into this database: its table stream_generation has no primary key',
            'wait until that is done; restore in one transaction, or while no daemon runs');
    END IF;
    DELETE FROM stream_generation g WHERE g.stream = s.number AND g.number <= latest - 999;
    INSERT INTO stream_generation VALUES (s.number, latest + 1, new_id, began_at, writers, positions, reason,
        clock_timestamp(), stream_incarnation(), s.relation::oid, s.sequence::oid, pg_relation_filenode(s.sequence),
        stream_files(s.relation));
    RETURN new_id;
END
$$;


CREATE FUNCTION replicad.stream_generation_now(s replicad.stream) RETURNS replicad.stream_generation
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT g FROM stream_generation g WHERE g.stream = s.number ORDER BY g.number DESC LIMIT 1
$$;


CREATE FUNCTION replicad.stream_generations(name text, OUT number integer, OUT id text, OUT began_at bigint, OUT reason text, OUT created_at timestamp with time zone) RETURNS SETOF record
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT g.number, g.id, g.began_at, g.reason, g.created_at
    FROM stream_find(name) s JOIN stream_generation g ON g.stream = s.number ORDER BY g.number DESC
$$;


COMMENT ON FUNCTION replicad.stream_generations(name text, OUT number integer, OUT id text, OUT began_at bigint, OUT reason text, OUT created_at timestamp with time zone) IS 'The generations of a stream, the present one first';


CREATE FUNCTION replicad.stream_give(signature text, owner oid) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    role name := pg_get_userbyid(owner);
    granted boolean := has_schema_privilege(owner, current_schema(), 'CREATE');
BEGIN
    IF NOT granted THEN
        EXECUTE format('GRANT CREATE ON SCHEMA %I TO %I', current_schema(), role);
    END IF;
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', signature, role);
    IF NOT granted THEN
        EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM %I', current_schema(), role);
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_guard_attach(s replicad.stream) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    member regclass;
BEGIN
    PERFORM stream_guard_build(s);
    FOR member IN SELECT t FROM stream_tables(s.relation) t JOIN pg_class c ON c.oid = t
        WHERE NOT c.relispartition OR t = s.relation
    LOOP
        EXECUTE format('CREATE OR REPLACE TRIGGER replicad_guard_%s AFTER INSERT OR UPDATE OF %I ON %s FOR EACH ROW'
            ' EXECUTE FUNCTION stream_guard_%s()', s.number, s.id_column, member, s.number);
    END LOOP;
END
$$;


CREATE FUNCTION replicad.stream_guard_build(s replicad.stream) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = current_schema());
BEGIN
    EXECUTE format($template$
        CREATE OR REPLACE FUNCTION %1$I.stream_guard_%2$s() RETURNS trigger LANGUAGE plpgsql AS $guard$
        DECLARE
            held text := current_setting(%3$L, true);
        BEGIN
            IF split_part(held, ':', 1) = 'p' || pg_current_xact_id()::text AND NEW.%4$I > split_part(held, ':', 2)::bigint THEN
                RETURN NULL;
            END IF;
            IF TG_OP = 'INSERT' OR NEW.%4$I IS DISTINCT FROM OLD.%4$I THEN
                PERFORM %1$I.stream_adopt(%2$s, %3$L, NEW.%4$I, %5$s);
            END IF;
            RETURN NULL;
        END
        $guard$
        $template$, current_schema(), s.number, s.setting, s.id_column,
        CASE WHEN s.instance_column IS NULL THEN '''master'''
            ELSE format('%I.stream_instance(NEW.%I::text)', current_schema(), s.instance_column) END);
    IF keeper !~ '^pg_' AND pg_has_role(keeper, 'MEMBER') THEN
        EXECUTE format('ALTER FUNCTION stream_guard_%s() OWNER TO %I', s.number, keeper);
    END IF;
END
$_$;


CREATE FUNCTION replicad.stream_guard_detach(number integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    member regclass;
BEGIN
    FOR member IN SELECT t.tgrelid FROM pg_trigger t
        WHERE t.tgname = 'replicad_guard_' || number AND t.tgparentid = 0
            AND t.tgfoid = to_regprocedure(format('stream_guard_%s()', number))
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', 'replicad_guard_' || number, member);
    END LOOP;
END
$$;


CREATE FUNCTION replicad.stream_held(number integer) RETURNS TABLE(pid integer, session text, bound bigint, certified boolean)
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    WITH held AS MATERIALIZED (  -- one look at the lock table, which is a consistent one
        SELECT l.pid, l.virtualtransaction AS within, l.transactionid,
            (l.classid::bigint << 32) | l.objid::bigint AS key
        FROM pg_locks l
        WHERE l.granted AND (
            l.locktype = 'advisory' AND l.objsubid = 1 AND l.mode = 'ShareLock'
                AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
            OR l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock')
    ), reserved AS MATERIALIZED (
        SELECT h.* FROM held h
        WHERE h.key BETWEEN stream_lock_key(number, 0) AND stream_lock_key(number, 281474976710655)
    ), proven AS MATERIALIZED (
        SELECT p.within, p.pid FROM (
            SELECT h.within, NULL::integer AS pid, stream_proof_key(number, 'x' || h.transactionid) AS key
            FROM held h WHERE h.transactionid IS NOT NULL AND h.within IN (SELECT r.within FROM reserved r)
            UNION ALL
            SELECT NULL, r.pid, stream_proof_key(number, format('s%s %s', a.pid, a.usesysid))
            FROM (SELECT DISTINCT x.pid FROM reserved x) r, pg_stat_get_activity(r.pid) a
            WHERE r.pid IS NOT NULL
        ) p
        WHERE EXISTS (SELECT FROM held h WHERE h.key = p.key AND (h.within = p.within OR h.pid = p.pid))
    )
    SELECT r.pid, (SELECT a.application_name FROM pg_stat_get_activity(r.pid) a WHERE r.pid IS NOT NULL),
        r.key & 281474976710655,
        r.pid IS NOT NULL AND EXISTS (SELECT FROM held c WHERE c.pid = r.pid
            AND c.key = stream_lock_key(number, r.key & 281474976710655, true))
    FROM reserved r
    WHERE r.within IN (SELECT p.within FROM proven p WHERE p.within IS NOT NULL)
        OR r.pid IN (SELECT p.pid FROM proven p WHERE p.pid IS NOT NULL)
$$;


CREATE FUNCTION replicad.stream_hidden(tbl regclass) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
    SELECT format('row security can hide rows of %s from role %I, with whose rights it is read; run: ', stream_qualified(tbl),
            r.rolname)
        || CASE WHEN pg_has_role(r.oid, c.relowner, 'USAGE')
            THEN format('ALTER TABLE %s NO FORCE ROW LEVEL SECURITY; or, as a superuser: ALTER ROLE %I BYPASSRLS. If applications'
                ' connect as %2$I and its policies must hold for them, give the table to another role instead: ALTER TABLE'
                ' %1$s OWNER TO ...', stream_qualified(tbl), r.rolname)
            ELSE format('ALTER ROLE %I BYPASSRLS, as a superuser', r.rolname) END
    FROM pg_class c JOIN pg_roles r ON r.oid = coalesce(stream_runs_as(c.oid), current_user::regrole)
    WHERE c.oid = tbl AND c.relrowsecurity AND NOT (r.rolsuper OR r.rolbypassrls)
        AND (c.relforcerowsecurity OR NOT pg_has_role(r.oid, c.relowner, 'USAGE'))
$_$;


CREATE FUNCTION replicad.stream_holds_back(number integer, session text, writer text) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT session = writer OR NOT EXISTS (
        SELECT FROM stream_writer w WHERE w.stream = stream_holds_back.number AND w.name = session)
$$;


CREATE FUNCTION replicad.stream_ids_fault(s replicad.stream, OUT problem text, OUT remedy text) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    -- what is drawn, as Postgres keeps it; pg_get_expr would lock the table
    drawn text := (
        SELECT f.adbin::text FROM pg_attrdef f
        JOIN pg_attribute a ON a.attrelid = f.adrelid AND a.attnum = f.adnum
        WHERE f.adrelid = s.relation AND a.attname = s.id_column);
    step bigint := (SELECT q.seqincrement FROM pg_sequence q WHERE q.seqrelid = s.sequence);
BEGIN
    IF s.method <> 'lock_watch' THEN
        RETURN;
    ELSIF drawn !~ format('^\{FUNCEXPR :funcid (%s [^{]*\{FUNCEXPR :funcid )?%s ', 'int4(bigint)'::regprocedure::oid,
            'nextval(regclass)'::regprocedure::oid) THEN
        problem := format('the default of %I in %s is not the next value of a sequence', s.id_column, s.relation);
    ELSIF drawn IS NULL AND step > 1 AND NOT EXISTS (
            SELECT FROM pg_attribute a WHERE a.attrelid = s.relation AND a.attname = s.id_column AND a.attidentity <> '') THEN
        problem := format('sequence %s has INCREMENT BY %s and no default draws from it: programs keep the ids between two '
            'steps for rows that they insert later', s.sequence, step);
    ELSE
        RETURN;
    END IF;
    remedy := format('give the rows an order of their own, which no program has to know: run ALTER TABLE %s ADD COLUMN '
        'replicad_seq bigint GENERATED BY DEFAULT AS IDENTITY; CREATE INDEX ON %s (replicad_seq); and add the stream with '
        '--id replicad_seq (docs/positions.md, "Ids that programs make")', s.relation, s.relation);
END
$$;


CREATE FUNCTION replicad.stream_incarnation() RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT CASE WHEN pg_is_in_recovery() THEN 'standby' ELSE concat_ws('/',
        (SELECT c.system_identifier FROM pg_control_system() c),
        left(pg_walfile_name(pg_current_wal_lsn()), 8),
        (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()),
        extract(epoch FROM pg_postmaster_start_time()),
        extract(epoch FROM least((SELECT a.stats_reset FROM pg_stat_get_archiver() a),
            pg_stat_get_bgwriter_stat_reset_time(), (SELECT w.stats_reset FROM pg_stat_get_wal() w)))) END
$$;


CREATE FUNCTION replicad.stream_instance(instance text) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
    SELECT coalesce(nullif(left(translate(instance,
        E'\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10'
        '\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f\x20\x7f',
        '_________________________________'), 200), ''), 'master')
$$;


CREATE FUNCTION replicad.stream_is_same(stream_number integer, actual oid, expected oid) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    name text := coalesce((SELECT s.name FROM stream s WHERE s.number = stream_number), stream_number::text);
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'RS005',
        MESSAGE = CASE WHEN actual = expected
            THEN format('the ids of stream %s begin anew: its sequence was restarted', name)
            ELSE format('another table has the name of the table of stream %s now', name) END,
        HINT = 'nothing of it was sent; the stream goes on when the registry was looked at again';
END
$$;


CREATE FUNCTION replicad.stream_json(value text) RETURNS text
    LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
    AS $$
BEGIN
    RETURN value::json::text;
EXCEPTION WHEN data_exception OR statement_too_complex THEN
    RETURN to_json(value)::text;
END
$$;


CREATE FUNCTION replicad.stream_keep(stream_number integer, in_generation text, lowest bigint, published bigint, trimmed bigint, OUT gone bigint, OUT back bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream;
    g stream_generation;
    k stream_kept;
    shared bigint;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = stream_number FOR NO KEY UPDATE;
    g := stream_generation_now(s);
    IF s.number IS NULL OR g.id IS DISTINCT FROM in_generation OR NOT stream_continues(s, g) THEN
        RETURN;
    END IF;
    SELECT * INTO k FROM stream_kept x WHERE x.stream = stream_number;
    SELECT min(x.began_at) INTO shared FROM stream_generation x WHERE x.stream = stream_number AND x.number > k.generation;
    IF k.lowest <= coalesce(shared, k.lowest) AND (lowest > k.lowest OR lowest IS NULL) THEN
        gone := least(lowest - 1, greatest(least(k.published, shared), published));
        UPDATE stream x SET trimmed_upto = gone WHERE x.number = stream_number AND coalesce(x.trimmed_upto < gone, true);
        IF NOT FOUND THEN
            gone := NULL;
        END IF;
    END IF;
    IF lowest <= s.trimmed_upto AND s.trimmed_upto = trimmed THEN
        back := greatest(lowest, -9223372036854775807) - 1;
        UPDATE stream x SET trimmed_upto = back WHERE x.number = stream_number;
    END IF;
    INSERT INTO stream_kept AS x VALUES (stream_number, g.number, lowest, greatest(least(k.published, shared), published))
    ON CONFLICT (stream) DO UPDATE SET generation = excluded.generation, lowest = excluded.lowest, published = excluded.published;
END
$$;


CREATE FUNCTION replicad.stream_keep_rules(name text, keep_for interval, keep_rows bigint) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    IF keep_for <= '0' OR keep_rows <= 0 THEN
        PERFORM stream_refuse_argument('rows cannot be kept for no time, or none of them', 'give a time or a number above 0');
    END IF;
    IF keep_for IS NOT NULL OR keep_rows IS NOT NULL THEN
        PERFORM stream_trimmer_ensure(s.relation);
        PERFORM stream_refuse(stream_trim_fault(s.relation), format('let the owner of the table remove rows: replicad streams trim %s',
            stream_shell(s.name))) WHERE stream_trim_fault(s.relation) IS NOT NULL;
    END IF;
    UPDATE stream x SET keep_for = stream_keep_rules.keep_for, keep_rows = stream_keep_rules.keep_rows WHERE x.number = s.number;
END
$$;


COMMENT ON FUNCTION replicad.stream_keep_rules(name text, keep_for interval, keep_rows bigint) IS 'Sets how long, or how many of, the rows of a stream are kept';


CREATE FUNCTION replicad.stream_keep_upto(s replicad.stream) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    published bigint := (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
    upto bigint := published;
    beyond text;
BEGIN
    IF s.keep_for IS NOT NULL THEN
        upto := CASE WHEN upto IS NOT NULL THEN least(upto, stream_position_at(s.name, clock_timestamp() - s.keep_for)) END;
        IF stream_position_at(s.name, clock_timestamp() - s.keep_for) IS NULL THEN
            RETURN NULL;
        END IF;
    END IF;
    IF EXISTS (SELECT FROM stream_acks(s.name)) THEN
        IF (SELECT count(*) > count(a.token) FROM stream_acks(s.name) a) THEN
            RETURN NULL;
        END IF;
        upto := least(upto, (SELECT min(a.token) FROM stream_acks(s.name) a));
    END IF;
    IF s.keep_rows IS NOT NULL AND upto IS NOT NULL THEN
        SELECT r INTO beyond FROM stream_as_owner(s.relation, format('SELECT t.%1$I::text FROM %2$s AS t WHERE t.%1$I <= %3$s'
            ' ORDER BY t.%1$I DESC OFFSET %4$s LIMIT 1', s.id_column, stream_qualified(s.relation), published, s.keep_rows)) r;
        upto := CASE WHEN beyond IS NOT NULL THEN least(upto, beyond::bigint) END;
    END IF;
    RETURN upto;
END
$_$;


CREATE FUNCTION replicad.stream_kept_upto(s replicad.stream, g replicad.stream_generation, went_back boolean) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    last bigint;
    noted bigint;
    since xid;
    lowest bigint;
BEGIN
    IF NOT has_sequence_privilege(s.sequence, 'SELECT') THEN
        PERFORM stream_refuse(format('sequence %s may not be read, so nothing is known of the ids that it gives out', s.sequence),
            format('run: GRANT SELECT ON SEQUENCE %s TO %I', s.sequence, current_user));
    END IF;
    IF has_sequence_privilege(s.sequence, 'SELECT') IS NULL OR NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = s.relation) THEN
        RETURN NULL;  -- dropped
    END IF;
    last := pg_sequence_last_value(s.sequence);
    SELECT p.position, p.xmin INTO noted, since FROM stream_position p WHERE p.stream = s.number AND p.writer = 0;
    IF s.method = 'positions_table' OR g.sequence IS DISTINCT FROM s.sequence::oid OR g.relation IS DISTINCT FROM s.relation::oid
            OR last IS NULL OR noted IS NULL OR stream_rewritten(s, g)
            OR (went_back AND (stream_writer_holder(s, NULL)).holder IS NOT NULL) THEN
        RETURN NULL;
    END IF;
    SELECT x INTO lowest FROM stream_as_owner(s.relation, format(
        'SELECT min(t.%I)::text FROM %s AS t WHERE t.%I <= %s AND age(t.xmin) < age(%L::xid)',
        s.id_column, stream_qualified(s.relation), s.id_column, noted, since)) x;
    RETURN least(noted, last, lowest - 1);
EXCEPTION WHEN query_canceled THEN
    RETURN NULL;
END
$$;


CREATE FUNCTION replicad.stream_key_types(tbl regclass, key name[]) RETURNS text[]
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    types text[];
    one name;
    type oid;
    base oid;
BEGIN
    FOREACH one IN ARRAY coalesce(key, '{}') LOOP
        SELECT a.atttypid INTO type FROM pg_attribute a
            WHERE a.attrelid = tbl AND a.attname = one AND a.attnum > 0 AND NOT a.attisdropped;
        LOOP
            SELECT d.typbasetype INTO base FROM pg_type d WHERE d.oid = type AND d.typtype = 'd';
            EXIT WHEN NOT FOUND;
            type := base;
        END LOOP;
        types := types || format_type(type, -1);
    END LOOP;
    RETURN types;
END
$$;


CREATE FUNCTION replicad.stream_last_value(sequence regclass) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    last bigint := pg_sequence_last_value(sequence);
BEGIN
    -- NULL also means that we may not look, which must not pass for "none yet"
    IF last IS NULL AND has_sequence_privilege(sequence, 'USAGE, SELECT') THEN
        SELECT s.seqstart - 1 INTO last FROM pg_sequence s WHERE s.seqrelid = sequence;
    END IF;
    IF last IS NULL OR last < 0 OR last >> 48 <> 0 THEN
        PERFORM stream_refuse(format('sequence %s stands at %s', sequence, coalesce(last::text, 'what you may not see')),
            format('reservation needs a value from 0 to 281474976710655, and the right to use it: GRANT USAGE ON SEQUENCE '
                '%s TO %I', sequence, current_user));
    END IF;
    RETURN last;
END
$$;


CREATE FUNCTION replicad.stream_lock_key(number integer, bound bigint, certified boolean DEFAULT false) RETURNS bigint
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT ((CASE WHEN certified THEN 12800 ELSE 20992 END + number)::bigint << 48) | bound
$$;


CREATE FUNCTION replicad.stream_mark_position(stream_number integer, new_position bigint, at timestamp with time zone) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    latest stream_mark;
BEGIN
    SELECT * INTO latest FROM stream_mark m WHERE m.stream = stream_number ORDER BY m.at DESC LIMIT 1;
    IF latest.at > stream_mark_position.at - interval '1 minute' OR latest.position >= new_position THEN
        RETURN;
    END IF;
    INSERT INTO stream_mark (stream, at, position, hourly)
    VALUES (stream_number, stream_mark_position.at, new_position,
        coalesce(date_trunc('hour', latest.at) < date_trunc('hour', stream_mark_position.at), true))
    ON CONFLICT DO NOTHING;
    DELETE FROM stream_mark m
    WHERE m.stream = stream_number AND NOT m.hourly AND m.at < stream_mark_position.at - interval '1 day';
END
$$;


CREATE FUNCTION replicad.stream_max_row(name text, bytes bigint) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    UPDATE stream x SET max_row = stream_check_max_row(bytes) WHERE x.number = s.number;
END
$$;


COMMENT ON FUNCTION replicad.stream_max_row(name text, bytes bigint) IS 'Sets the bound on the length of the lines of a stream';


CREATE FUNCTION replicad.stream_moved(relations oid[], schemas text[], names text[], sequences oid[], feeds bigint[]) RETURNS oid[]
    LANGUAGE plpgsql
    AS $$  -- what is stable would be tried out while the statement is planned
DECLARE
    moved oid[] := '{}';
    bearer oid;
    found bigint;
BEGIN
    FOR i IN 1 .. cardinality(relations) LOOP  -- one by one: a query over all would be planned anew each time
        SELECT c.oid INTO bearer FROM pg_catalog.pg_class c WHERE c.relname = names[i]::name
            AND c.relnamespace = (SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname = schemas[i]::name);
        IF bearer <> relations[i] THEN
            moved := moved || relations[i];
        END IF;
    END LOOP;
    FOR i IN 1 .. cardinality(sequences) LOOP
        SELECT coalesce(sum(d.objid::bigint), 0) INTO found FROM pg_catalog.pg_depend d
            WHERE d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = sequences[i]
                AND d.classid = 'pg_catalog.pg_attrdef'::regclass;
        IF found <> feeds[i] THEN
            moved := moved || sequences[i];
        END IF;
    END LOOP;
    RETURN moved;
END
$$;


CREATE FUNCTION replicad.stream_name_fault(s replicad.stream, OUT problem text, OUT remedy text) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    bearer regclass := nullif(stream_bearer(s.relation_named), s.relation);
    alter_to text := format('replicad streams alter %s --table ', stream_shell(s.name));
    is_table boolean;
BEGIN
    IF bearer IS NOT NULL THEN
        SELECT c.relkind IN ('r', 'p') INTO is_table FROM pg_class c WHERE c.oid = bearer;
        problem := format('%s is another %s now; the table of the stream is %s', bearer,
            CASE WHEN is_table THEN 'table' ELSE 'relation' END, s.relation);
        remedy := CASE WHEN is_table
            THEN format('to follow the new table, run: %s%s (with --same-rows if it has the rows of the old one); to go on with '
                'the old one, run: %s%s; or rename them back', alter_to, stream_shell(bearer::text), alter_to,
                stream_shell(s.relation::text))
            ELSE format('if writers still write to %s, run: %s%s', s.relation, alter_to, stream_shell(s.relation::text)) END;
        RETURN;
    END IF;
    bearer := CASE WHEN NOT s.fed THEN nullif(stream_bearer(s.sequence_named), s.sequence) END;
    IF bearer IS NOT NULL THEN
        problem := format('%s is another sequence now; the stream follows %s', bearer, s.sequence);
        remedy := format('if writers take ids from the new one, run: %s%s --sequence %s; or rename them back',
            alter_to, stream_shell(s.relation::text), stream_shell(bearer::text));
        RETURN;
    END IF;
    bearer := nullif(stream_bearer(s.positions_named), s.positions);
    IF bearer IS NOT NULL THEN
        problem := format('%s is another relation now; the positions of the stream are in %s', bearer, s.positions);
        remedy := format('if the writers publish in the new one, run: %s%s --positions-table %s; if they publish in the old one, '
            'run: %s%s --positions-table %s; or rename them back', alter_to, stream_shell(s.relation::text),
            stream_shell(bearer::text), alter_to, stream_shell(s.relation::text), stream_shell(s.positions::text));
        RETURN;
    END IF;
    SELECT f INTO bearer FROM stream_fed_elsewhere(s.sequence, s.relation) f WHERE f <> ALL (s.also_feeds) AND f::oid <> ALL (s.parted)
        AND f::oid::text NOT IN (
            SELECT split_part(noted.file, ':', 1) FROM stream_generation g, unnest(string_to_array(g.table_files, ',')) AS noted (file)
            WHERE g.stream = s.number AND g.number = (SELECT max(x.number) FROM stream_generation x WHERE x.stream = s.number))
    ORDER BY f LIMIT 1;
    IF FOUND AND s.relation_named IS NOT NULL THEN
        problem := format('sequence %s feeds %s too since the stream was added, so that ids of the stream may be rows there',
            s.sequence, bearer);
        remedy := format('if it takes the place of %s, run: %s%s (with --same-rows if it has the same rows); if the stream stays '
            'with its table, run: %s%s; or drop the default of the column in %s', s.relation, alter_to,
            stream_shell(bearer::text), alter_to, stream_shell(s.relation::text), bearer);
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_named(relation regclass) RETURNS text[]
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT ARRAY[n.nspname::text, c.relname::text]
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation
$$;


CREATE FUNCTION replicad.stream_next(stream text) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream;
    xid text := 'p' || pg_current_xact_id()::text;
    held text;
    bound bigint;
    id bigint;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.name = stream_next.stream;
    IF s.method IS DISTINCT FROM 'reservation' THEN
        PERFORM stream_find_reserved(stream);  -- raises
    END IF;
    held := current_setting(s.setting, true);
    IF split_part(held, ':', 1) = xid THEN
        bound := split_part(held, ':', 2);
    ELSE
        IF NOT stream_prove(s.number) THEN
            PERFORM stream_prove_or_refuse(s);
        END IF;
        bound := pg_sequence_last_value(s.sequence);
        IF bound IS NULL OR bound >> 48 <> 0 THEN
            bound := stream_last_value(s.sequence);
        END IF;
        PERFORM pg_advisory_xact_lock_shared(stream_lock_key(s.number, bound));
        held := NULL;
    END IF;
    id := nextval(s.sequence);
    IF id <= bound THEN
        PERFORM stream_refuse_step(s.sequence, id, bound);
    END IF;
    IF held IS NULL THEN
        PERFORM set_config(s.setting, xid || ':' || id - 1, true);
    END IF;
    RETURN id;
END
$$;


COMMENT ON FUNCTION replicad.stream_next(stream text) IS 'Reserves the next id of a stream for this transaction';


CREATE FUNCTION replicad.stream_next_mult(stream text, n integer) RETURNS bigint[]
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find_reserved(stream);
BEGIN
    PERFORM stream_check_count(n);
    RETURN stream_next(stream) || ARRAY(SELECT nextval(s.sequence) FROM generate_series(2, n));
END
$$;


COMMENT ON FUNCTION replicad.stream_next_mult(stream text, n integer) IS 'Reserves the next n ids of a stream for this transaction';


CREATE FUNCTION replicad.stream_note(stream_number integer, in_generation text, linear_position bigint, writers integer[], positions bigint[], at timestamp with time zone DEFAULT clock_timestamp()) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream;
    g stream_generation;
    files text;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = stream_number FOR KEY SHARE;  -- waits for a fork that is under way
    files := stream_files(s.relation);  -- before the sequence is seen to have its file still
    g := stream_generation_now(s);
    IF s.number IS NULL OR g.id IS DISTINCT FROM in_generation OR NOT stream_continues(s, g) THEN
        RETURN false;
    END IF;
    IF g.table_files IS DISTINCT FROM files THEN
        UPDATE stream x SET parted = x.parted || left_over.tables
        FROM (
            SELECT array_agg(f::oid) AS tables FROM stream_fed_elsewhere(s.sequence, s.relation) f
            WHERE f::oid <> ALL (s.parted)
                AND f::oid::text IN (SELECT split_part(noted.file, ':', 1) FROM unnest(string_to_array(g.table_files, ',')) AS noted (file))
        ) AS left_over
        WHERE x.number = s.number AND left_over.tables IS NOT NULL;
        UPDATE stream_generation x SET table_files = files WHERE x.stream = g.stream AND x.number = g.number;
    END IF;
    INSERT INTO stream_position AS p (stream, writer, position, published_at)
    SELECT stream_number, w, max(n), at
    FROM (SELECT 0, linear_position UNION ALL SELECT * FROM unnest(writers, positions)) new(w, n)
    GROUP BY w ORDER BY w  -- in one order, so that two daemons do not wait for each other in a circle
    ON CONFLICT (stream, writer) DO UPDATE SET position = excluded.position, published_at = excluded.published_at
    WHERE p.position < excluded.position;
    PERFORM stream_mark_position(stream_number, linear_position, at);
    RETURN true;
END
$$;


CREATE FUNCTION replicad.stream_notes(s replicad.stream) RETURNS text[]
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT coalesce(array_agg(note ORDER BY place), '{}') FROM (
        SELECT 1 AS place, format('sequence %s also feeds %s: this stream''s ids have gaps, and its position moves with '
            'writes to the other', s.sequence, string_agg(DISTINCT format('%s.%I', f.adrelid::regclass, a.attname), ', ')
        ) AS note
        FROM pg_depend d JOIN pg_attrdef f ON f.oid = d.objid
        JOIN pg_attribute a ON a.attrelid = f.adrelid AND a.attnum = f.adnum
        WHERE d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = s.sequence
            AND NOT (f.adrelid IN (SELECT stream_tables(s.relation)) AND a.attname = s.id_column)
        HAVING count(*) > 0
        UNION ALL
        SELECT 2, format('column %I may be NULL: such rows are never sent', s.id_column)
        FROM pg_attribute a WHERE a.attrelid = s.relation AND a.attname = s.id_column AND NOT a.attnotnull
        UNION ALL
        SELECT 3, format('rows without %I are sent as those of master', s.instance_column)
        FROM pg_attribute a WHERE a.attrelid = s.relation AND a.attname = s.instance_column AND NOT a.attnotnull
        UNION ALL
        SELECT 4, stream_hidden(s.relation) || '; until then no row is sent' WHERE stream_hidden(s.relation) IS NOT NULL
        UNION ALL
        SELECT 5, 'the row expression yields text, which is checked row by row; jsonb or json is faster'
        WHERE s.row_type = 'text'
        UNION ALL
        SELECT 6, format('the default of %I does not draw from %s: with lock_watch the transaction that inserts '
            'must call nextval; for ids taken in another one use the method reservation', s.id_column, s.sequence)
        WHERE s.method = 'lock_watch' AND stream_sequence(s.relation, s.id_column) IS DISTINCT FROM s.sequence
        UNION ALL
        SELECT 9, format('sequence %s has INCREMENT BY %s: where programs take ids from it themselves and keep those between '
            'two steps for later, use a column of its own (docs/positions.md, "Ids that programs make")', s.sequence,
            q.seqincrement)
        FROM pg_sequence q WHERE s.method = 'lock_watch' AND q.seqrelid = s.sequence AND q.seqincrement > 1
        UNION ALL
        SELECT 10, format('there is no %s any more: its table is called %s now, and the stream goes on with it; to note the '
            'new name, run: replicad streams alter %s --table %s', format('%I.%I', s.relation_named[1], s.relation_named[2]),
            s.relation, stream_shell(s.name), stream_shell(s.relation::text))
        WHERE s.relation_named IS NOT NULL AND stream_bearer(s.relation_named) IS NULL
        UNION ALL
        SELECT 7, format('writers take their ids from %I.stream_next(%L); an id that is not reserved is refused',
            current_schema(), s.name)
        WHERE s.method = 'reservation'
        UNION ALL
        SELECT 8, 'an UPDATE that moves a row to another partition inserts it there, so it needs a new id from stream_next'
        FROM pg_class c WHERE s.method = 'reservation' AND c.oid = s.relation AND c.relkind = 'p'
    ) notes
$$;


CREATE FUNCTION replicad.stream_number_next() RETURNS smallint
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    free smallint := (
        SELECT n FROM generate_series(1, 8191) n WHERE NOT EXISTS (SELECT FROM stream x WHERE x.number = n)
        ORDER BY n <= (SELECT coalesce(max(x.number), 0) FROM stream x), n LIMIT 1);
BEGIN
    PERFORM stream_refuse('there are 8191 streams, which is all that there can be', 'remove those that nobody reads')
        WHERE free IS NULL;
    RETURN free;
END
$$;


CREATE FUNCTION replicad.stream_on_disk() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'local', true);
    END IF;
    RETURN NULL;
END
$$;


CREATE FUNCTION replicad.stream_owner_remedy(owner oid, call text) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT CASE WHEN r.rolsuper THEN '' ELSE format('run: GRANT %I TO %I; or ', r.rolname, current_user) END || 'run as a superuser: ' || call
    FROM pg_roles r WHERE r.oid = owner
$$;


CREATE FUNCTION replicad.stream_path_text(path name[]) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT string_agg(part, ', ' ORDER BY place)
    FROM (
        SELECT quote_ident(given.name) AS part, min(given.place) AS place
        FROM unnest(path) WITH ORDINALITY AS given(name, place) GROUP BY given.name
        UNION ALL SELECT 'pg_temp', 1 + coalesce(cardinality(path), 0)
    ) AS parts
$$;


CREATE FUNCTION replicad.stream_position_at(name text, at timestamp with time zone) RETURNS bigint
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT (SELECT m.position FROM stream_mark m WHERE m.stream = s.number AND m.at <= stream_position_at.at
            ORDER BY m.at DESC LIMIT 1)
    FROM stream_find(name) s
$$;


COMMENT ON FUNCTION replicad.stream_position_at(name text, at timestamp with time zone) IS 'Where a stream stood at a time in the past';


CREATE FUNCTION replicad.stream_positions(stream text) RETURNS TABLE(writer text, "position" bigint)
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find_reserved(stream);
    last bigint := stream_last_value(s.sequence);
BEGIN
    RETURN QUERY
    WITH held AS MATERIALIZED (
        SELECT x.session AS holder, x.bound FROM stream_held(s.number) x
    ), known AS (
        SELECT w.name FROM stream_writer w WHERE w.stream = s.number
    )
    SELECT k.name, least(last, (SELECT min(h.bound) FROM held h
        WHERE h.holder IS NULL OR stream_holds_back(s.number, h.holder, k.name)))
    FROM known k
    UNION ALL
    SELECT NULL, least(last, (SELECT min(h.bound) FROM held h));
END
$$;


COMMENT ON FUNCTION replicad.stream_positions(stream text) IS 'How far each writer of a reserved stream has finished, now';


CREATE FUNCTION replicad.stream_proof_key(number integer, holder text) RETURNS bigint
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$  -- and not sql: that would be planned anew for every transaction of a writer
DECLARE
    secret bytea;
BEGIN
    SELECT k.key INTO secret FROM stream_reservation_key k;
    RETURN ((4608 + number)::bigint << 48) | ('x' || encode(
        substr(sha256(secret || convert_to(number || ' ' || holder, 'UTF8')), 1, 6), 'hex'))::bit(48)::bigint;
END
$$;


CREATE FUNCTION replicad.stream_prove(number integer, lasting boolean DEFAULT false) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    me name := current_setting('role');
    relation regclass;
    sequence regclass;
    secret bytea;
    holder text;
    place bigint;
BEGIN
    IF me = 'none' THEN
        me := session_user;
    END IF;
    SELECT s.relation, s.sequence, k.key INTO relation, sequence, secret
        FROM stream s LEFT JOIN stream_reservation_key k ON true WHERE s.number = stream_prove.number;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF secret IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'table stream_reservation_key is empty, so no id can be reserved',
            HINT = 'restore its row from a backup, or, when no writer is at work: INSERT INTO stream_reservation_key '
                'DEFAULT VALUES';
    END IF;
    IF has_sequence_privilege(me, sequence, 'USAGE, UPDATE') IS NOT TRUE
            AND has_any_column_privilege(me, relation, 'INSERT, UPDATE') IS NOT TRUE THEN
        BEGIN
            PERFORM currval(sequence);
        EXCEPTION WHEN object_not_in_prerequisite_state OR insufficient_privilege THEN
            RETURN false;
        END;
    END IF;
    IF lasting THEN
        holder := (SELECT 's' || a.pid::text || ' ' || a.usesysid::text FROM pg_stat_get_activity(pg_backend_pid()) a);
    ELSE
        holder := 'x' || pg_current_xact_id()::xid::text;
    END IF;
    place := ((4608 + number)::bigint << 48) | ('x' || encode(
        substr(sha256(secret || convert_to(number::text || ' ' || holder, 'UTF8')), 1, 6), 'hex'))::bit(48)::bigint;
    IF lasting THEN
        PERFORM pg_advisory_lock_shared(place);
    ELSE
        PERFORM pg_advisory_xact_lock_shared(place);
    END IF;
    RETURN true;
END
$$;


CREATE FUNCTION replicad.stream_prove_or_refuse(s replicad.stream, lasting boolean DEFAULT false) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    IF stream_prove(s.number, lasting) THEN
        RETURN;
    ELSIF has_sequence_privilege(s.sequence, 'USAGE, UPDATE') THEN
        PERFORM nextval(s.sequence);
        IF stream_prove(s.number, lasting) THEN
            RETURN;
        END IF;
    END IF;
    RAISE EXCEPTION USING ERRCODE = '42501',
        MESSAGE = format('role %I may not take ids of stream %s', current_user, s.name),
        HINT = format('run: GRANT USAGE ON SEQUENCE %s TO %I. The owner of replicad''s functions needs SELECT on it',
            s.sequence, current_user);
END
$$;


CREATE FUNCTION replicad.stream_qualified(tbl regclass) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = tbl
$$;


CREATE FUNCTION replicad.stream_question(s replicad.stream, g replicad.stream_generation, noted bigint, since xid, OUT problem text, OUT remedy text) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    command text := format('replicad streams alter %s --sequence-changed ', stream_shell(s.name));
BEGIN
    IF g.file IS NOT DISTINCT FROM pg_relation_filenode(s.sequence) OR noted IS NULL OR s.method = 'positions_table'
            OR g.sequence IS DISTINCT FROM s.sequence::oid OR g.relation IS DISTINCT FROM s.relation::oid
            OR (CASE WHEN has_sequence_privilege(s.sequence, 'USAGE, SELECT')
                THEN (pg_sequence_last_value(s.sequence) >= noted) IS NOT TRUE ELSE false END)
            OR NOT EXISTS (
                SELECT FROM pg_sequence q WHERE q.seqrelid = s.sequence AND age(q.xmin) < age(since)
                UNION ALL
                SELECT FROM pg_attribute a
                WHERE a.attrelid = s.relation AND a.attname = s.id_column AND age(a.xmin) < age(since)
                UNION ALL
                SELECT FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.reltoastrelid AND a.attnum = 1
                WHERE c.oid::text IN (SELECT split_part(k, ':', 1) FROM unnest(string_to_array(g.table_files, ',')) k)
                    AND age(a.xmin) < age(since))
            OR (SELECT sum(pg_relation_size(t)) FROM stream_tables(s.relation) t) = 0
            OR NOT stream_rewritten(s, g) THEN
        RETURN;
    END IF;
    problem := format('%s and sequence %s were written anew, as by ALTER COLUMN %I TYPE or SET LOGGED, and nothing shows whether '
        'the rows up to %s, the noted position, are the same', s.relation, s.sequence, s.id_column, noted);
    remedy := format('if every row has the id that it had, run: %ssame; if ids began again (TRUNCATE ... RESTART IDENTITY), so that '
        'readers need all rows anew, run: %srestarted', command, command);
END
$$;


CREATE FUNCTION replicad.stream_question_of(s replicad.stream, OUT problem text, OUT remedy text) RETURNS record
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT q.problem, q.remedy
    FROM (SELECT) one LEFT JOIN stream_position p ON p.stream = s.number AND p.writer = 0
    CROSS JOIN LATERAL stream_question(s, stream_generation_now(s), p.position, p.xmin) q
$$;


CREATE FUNCTION replicad.stream_reader(owner oid) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
    SELECT format('%I.%I', current_schema(), coalesce((
        SELECT p.proname
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = current_schema() AND p.proowner = owner AND p.proname ~ '^reader_1_[0-9a-f]{32}$'
            AND has_function_privilege(p.oid, 'EXECUTE')
        LIMIT 1), 'stream_reader_missing'))
    WHERE owner IS NOT NULL
$_$;


CREATE FUNCTION replicad.stream_reader_body() RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$ SELECT $body$
DECLARE
    line pg_catalog.text;
    size pg_catalog.int8 := 0;
    guarded pg_catalog.bool := false;
    finished pg_catalog.bool := false;
    ending pg_catalog.text;
    sentence pg_catalog.text;
    more pg_catalog.text;
    advice pg_catalog.text;
    cancelled pg_catalog.text;
    prepared pg_catalog.text;
BEGIN
    BEGIN
        PERFORM pg_catalog.set_config('role', 'none', true);
    EXCEPTION WHEN insufficient_privilege THEN
        guarded := true;
    END;
    IF guarded AND CURRENT_USER OPERATOR(pg_catalog.=) (SELECT pg_catalog.pg_get_userbyid(c.relowner)
            FROM pg_catalog.pg_class AS c WHERE c.oid OPERATOR(pg_catalog.=) tbl) THEN
        NULL;
    ELSE
        RAISE EXCEPTION USING ERRCODE = 'RS006', MESSAGE = 'the table changed its owner, or its reader was altered',
            HINT = 'drop the function and run stream_reader_ensure';
    END IF;
    BEGIN
        SET LOCAL transaction_read_only = on;
        PERFORM pg_catalog.set_config('search_path', path, true);
        IF pg_catalog.concat_ws('|',
            pg_catalog.current_setting('row_security'), pg_catalog.current_setting('TimeZone'),
            pg_catalog.current_setting('DateStyle'), pg_catalog.current_setting('IntervalStyle'),
            pg_catalog.current_setting('extra_float_digits'), pg_catalog.current_setting('bytea_output'),
            pg_catalog.current_setting('xmlbinary'), pg_catalog.current_setting('lc_monetary'),
            pg_catalog.current_setting('lc_numeric'), pg_catalog.current_setting('lc_time'),
            pg_catalog.current_setting('xmloption'), pg_catalog.current_setting('timezone_abbreviations'),
            pg_catalog.current_setting('array_nulls'), pg_catalog.current_setting('transform_null_equals'),
            pg_catalog.current_setting('standard_conforming_strings'), pg_catalog.current_setting('backslash_quote'),
            pg_catalog.current_setting('quote_all_identifiers'), pg_catalog.current_setting('gin_fuzzy_search_limit')
        ) OPERATOR(pg_catalog.<>) 'off|UTC|ISO, MDY|postgres|1|hex|base64|C|C|C|content|Default|on|off|on|safe_encoding|off|0' THEN
            PERFORM pg_catalog.set_config(fixed.name, fixed.setting, true)
                FROM (VALUES
                    ('row_security', 'off'), ('TimeZone', 'UTC'), ('DateStyle', 'ISO, MDY'),
                    ('IntervalStyle', 'postgres'), ('extra_float_digits', '1'), ('bytea_output', 'hex'),
                    ('xmlbinary', 'base64'), ('lc_monetary', 'C'), ('lc_numeric', 'C'), ('lc_time', 'C'),
                    ('xmloption', 'content'), ('timezone_abbreviations', 'Default'), ('array_nulls', 'on'),
                    ('transform_null_equals', 'off'), ('standard_conforming_strings', 'on'),
                    ('backslash_quote', 'safe_encoding'), ('quote_all_identifiers', 'off'),
                    ('gin_fuzzy_search_limit', '0')
                ) AS fixed (name, setting);
        END IF;
        FOR line IN EXECUTE query LOOP
            RETURN NEXT line;
            size := size OPERATOR(pg_catalog.+) pg_catalog.octet_length(line);
            IF size OPERATOR(pg_catalog.>) bound THEN
                ending := '+';
                EXIT;
            END IF;
        END LOOP;
        finished := true;
        RAISE EXCEPTION USING ERRCODE = 'RS099', MESSAGE = 'roll back';
    EXCEPTION
        WHEN query_canceled OR assert_failure THEN
            cancelled := SQLSTATE;
            GET STACKED DIAGNOSTICS sentence = MESSAGE_TEXT;
        WHEN OTHERS THEN
            IF NOT finished THEN
                GET STACKED DIAGNOSTICS sentence = MESSAGE_TEXT, more = PG_EXCEPTION_DETAIL, advice = PG_EXCEPTION_HINT;
                ending := '!' OPERATOR(pg_catalog.||) pg_catalog.json_build_object('sqlstate', SQLSTATE,
                    'message', pg_catalog.left(sentence, 500), 'detail', pg_catalog.left(more, 300),
                    'hint', pg_catalog.left(advice, 300))::pg_catalog.text;
            END IF;
    END;
    FOR prepared IN SELECT p.name FROM pg_catalog.pg_prepared_statements AS p
        WHERE p.from_sql AND p.prepare_time OPERATOR(pg_catalog.>=) pg_catalog.statement_timestamp()
    LOOP
        EXECUTE 'DEALLOCATE ' OPERATOR(pg_catalog.||) pg_catalog.quote_ident(prepared);
    END LOOP;
    IF cancelled IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = cancelled, MESSAGE = sentence;
    END IF;
    IF ending IS NOT NULL THEN
        RETURN NEXT ending;
    END IF;
END
$body$::text $_$;


CREATE FUNCTION replicad.stream_reader_ensure(tbl regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    owner oid := stream_runs_as(tbl);
    role name := pg_get_userbyid(owner);
    home name := current_schema();
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = home);
    signature text;
BEGIN
    IF stream_reader_wanted(tbl) IS NULL THEN
        RETURN;
    END IF;
    signature := format('%I.%I(oid, text, text, bigint)', home, 'reader_1_' || md5(role));
    EXECUTE format('DROP FUNCTION IF EXISTS %s', signature);  -- of a role that had this name, or that we may not call
    EXECUTE format('CREATE FUNCTION %I.%I(tbl oid, query text, path text, bound bigint) RETURNS SETOF text'
        ' LANGUAGE plpgsql SECURITY DEFINER AS %L', home, 'reader_1_' || md5(role), stream_reader_body());
    EXECUTE format('COMMENT ON FUNCTION %s IS %L', signature, format('replicad: reads the tables of %I as %1$I', role));
    EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', signature);
    PERFORM stream_give(signature, owner);
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', signature, keeper);
EXCEPTION WHEN insufficient_privilege THEN
    PERFORM stream_refuse(SQLERRM, stream_reader_wanted(tbl));
END
$_$;


COMMENT ON FUNCTION replicad.stream_reader_ensure(tbl regclass) IS 'Makes the function that reads a table as its owner';


CREATE FUNCTION replicad.stream_reader_missing(tbl oid, query text, path text, bound bigint) RETURNS SETOF text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
        MESSAGE = coalesce(stream_reader_wanted(tbl::regclass), 'what is needed to read a table was made just now; try again');
END
$$;


CREATE FUNCTION replicad.stream_reader_wanted(relation regclass) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    owner oid := stream_runs_as(relation);
    keeper name;
    present name;
BEGIN
    IF owner IS NULL OR stream_reader(owner) NOT LIKE '%.stream_reader_missing' THEN
        RETURN NULL;
    END IF;
    SELECT pg_get_userbyid(n.nspowner), p.proname INTO keeper, present
        FROM pg_namespace n
        LEFT JOIN pg_proc p ON p.pronamespace = n.oid AND p.proowner = owner AND p.proname ~ '^reader_1_[0-9a-f]{32}$'
        WHERE n.nspname = current_schema();
    IF present IS NOT NULL AND keeper <> current_user THEN
        RETURN format('%s belongs to role %I and is read with the rights of that role; run: GRANT EXECUTE ON FUNCTION'
            ' %I.%I(oid, text, text, bigint) TO %I', stream_qualified(relation), pg_get_userbyid(owner), current_schema(),
            present, current_user);
    END IF;
    RETURN format('%s belongs to role %I and is read with the rights of that role; run: GRANT %2$I TO %I',
            stream_qualified(relation), pg_get_userbyid(owner), keeper)
        || CASE WHEN keeper = current_user THEN ''
            ELSE format(', then as %I or as a superuser: SELECT %I.stream_reader_ensure(%L)', keeper, current_schema(),
                stream_qualified(relation)) END;
END
$_$;


CREATE FUNCTION replicad.stream_readers_ensure() RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    wanted regclass;
BEGIN
    FOR wanted IN SELECT r FROM stream s, unnest(ARRAY[s.relation, s.sequence, s.positions]) r
        WHERE stream_reader_wanted(r) IS NOT NULL
    LOOP
        BEGIN
            PERFORM stream_reader_ensure(wanted);
        EXCEPTION WHEN SQLSTATE 'RS002' OR undefined_object OR undefined_table THEN
            NULL;  -- stream_load shows what is missing
        END;
    END LOOP;
END
$$;


CREATE FUNCTION replicad.stream_refuse(problem text, remedy text) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'RS002', MESSAGE = problem, HINT = remedy;
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_refuse_argument(problem text, remedy text) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'RS007', MESSAGE = problem, HINT = remedy;
END
$$;


CREATE FUNCTION replicad.stream_refuse_step(sequence regclass, id bigint, bound bigint) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    PERFORM stream_refuse(format('sequence %s issued %s after %s', sequence, id, bound),
        'the sequence of a stream has CACHE 1, and is never set back while writers are at work');
END
$$;


CREATE FUNCTION replicad.stream_relay_channel() RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT 'replicad.' || left(encode(sha256(convert_to('relay ' || k.key, 'UTF8')), 'hex'), 48) FROM stream_relay_key k
$$;


CREATE FUNCTION replicad.stream_relay_secret() RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT encode(sha256(convert_to('sign ' || k.key, 'UTF8')), 'hex') FROM stream_relay_key k
$$;


CREATE FUNCTION replicad.stream_remove(name text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    PERFORM stream_changes_remove(s.number);
    PERFORM stream_guard_detach(s.number);
    EXECUTE format('DROP FUNCTION IF EXISTS stream_guard_%s()', s.number);
    DELETE FROM stream x WHERE x.number = s.number;
END
$$;


COMMENT ON FUNCTION replicad.stream_remove(name text) IS 'Unregisters a stream; the table stays as it is';


CREATE FUNCTION replicad.stream_reserve(stream text, n integer, held bigint DEFAULT NULL::bigint, OUT number integer, OUT bound bigint, OUT ids bigint[]) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find_reserved(stream);
    first bigint := stream_last_value(s.sequence);
BEGIN
    PERFORM stream_check_count(n);
    number := s.number;
    bound := first;
    IF held IS NULL THEN
        PERFORM stream_prove_or_refuse(s, true);
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, first));
        bound := stream_last_value(s.sequence);
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, bound));
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, bound, true));
        PERFORM pg_advisory_unlock_shared(stream_lock_key(number, first));
    END IF;
    ids := ARRAY(SELECT nextval(s.sequence) FROM generate_series(1, n));
    IF ids[1] <= bound THEN
        PERFORM stream_refuse_step(s.sequence, ids[1], bound);
    END IF;
END
$$;


COMMENT ON FUNCTION replicad.stream_reserve(stream text, n integer, held bigint, OUT number integer, OUT bound bigint, OUT ids bigint[]) IS 'Reserves ids for this session until stream_complete';


CREATE FUNCTION replicad.stream_retained(stream_number integer, after bigint) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = stream_number;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'RS001', MESSAGE = 'the stream was removed', HINT = 'load the streams again';
    ELSIF after < s.trimmed_upto THEN
        RAISE EXCEPTION USING ERRCODE = 'RS004',
            MESSAGE = format('stream %s is retained from %s on, and %s is older', s.name, s.trimmed_upto, after),
            HINT = 'rows in between are gone; start from EARLIEST or NOW and load what you keep anew';
    END IF;
    RETURN true;
END
$$;


CREATE FUNCTION replicad.stream_rewind(stream_number integer, seen text, upto bigint, OUT begun text, OUT wait double precision) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream;
    g stream_generation;
    times integer;
    latest timestamptz;
    shared bigint;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = stream_number FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'RS001', MESSAGE = 'the stream was removed', HINT = 'load the streams again';
    END IF;
    g := stream_generation_now(s);
    IF g.id IS DISTINCT FROM seen OR NOT stream_continues(s, g) THEN
        RETURN;
    END IF;
    SELECT count(*), max(x.created_at) INTO times, latest FROM stream_generation x
        WHERE x.stream = s.number AND x.reason = 'rows_skipped' AND x.created_at > clock_timestamp() - interval '1 hour';
    wait := extract(epoch FROM latest - clock_timestamp()) + least(600, 5 * 2 ^ least(times, 9));
    IF wait > 0 THEN
        RETURN;
    END IF;
    wait := NULL;
    shared := greatest(least(upto, (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0)),
        s.trimmed_upto);
    begun := stream_generation_add(s, shared, '{}', '{}', 'rows_skipped');
    UPDATE stream_position p SET published_at = clock_timestamp(), position = least(p.position, shared)
    WHERE p.stream = s.number;
    UPDATE stream_ack a SET generation = begun, token = least(a.token, shared)
    WHERE a.stream = s.number AND a.generation = g.id;
END
$$;


CREATE FUNCTION replicad.stream_rewritten(s replicad.stream, g replicad.stream_generation) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    present text[] := string_to_array(stream_files(s.relation), ',');
    known text[] := string_to_array(g.table_files, ',');
BEGIN
    RETURN (known && present) IS NOT TRUE OR EXISTS (SELECT FROM unnest(present) f WHERE f <> ALL (known)
        AND split_part(f, ':', 1) IN (SELECT split_part(k, ':', 1) FROM unnest(known) k));
END
$$;


CREATE FUNCTION replicad.stream_runs_as(tbl regclass) RETURNS oid
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT c.relowner FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner
    WHERE c.oid = tbl AND r.rolname <> current_user AND NOT r.rolsuper
$$;


CREATE FUNCTION replicad.stream_safe_path(path name[]) RETURNS name[]
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    safe name[] := '{}';
    folder name;
BEGIN
    FOREACH folder IN ARRAY coalesce(path, '{}') LOOP
        IF has_schema_privilege('public', folder, 'CREATE') THEN
            RAISE NOTICE 'expressions cannot see into schema %, where everybody may create objects: '
                'put the schema before the names that they need', folder;
        ELSIF folder !~ '^pg_' THEN
            safe := safe || folder;
        END IF;
    END LOOP;
    RETURN safe;
END
$$;


CREATE FUNCTION replicad.stream_sequence(tbl regclass, column_name name) RETURNS regclass
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT c.oid::regclass
    FROM pg_attribute a
    CROSS JOIN LATERAL (
        SELECT d.refobjid AS sequence, 1 AS preference  -- what the default draws from counts, where the two differ
        FROM pg_attrdef f JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid
        WHERE f.adrelid = a.attrelid AND f.adnum = a.attnum AND d.refclassid = 'pg_class'::regclass
        UNION ALL
        SELECT d.objid, CASE d.deptype WHEN 'i' THEN 2 ELSE 3 END  -- a serial column made an identity has both
        FROM pg_depend d
        WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
            AND d.refobjid = a.attrelid AND d.refobjsubid = a.attnum
    ) found
    JOIN pg_class c ON c.oid = found.sequence AND c.relkind = 'S'
    WHERE a.attrelid = tbl AND a.attname = column_name AND NOT a.attisdropped
    ORDER BY found.preference LIMIT 1
$$;


CREATE FUNCTION replicad.stream_sequence_changed(name text, what text) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find(name);
    noted bigint := (SELECT max(p.position) FROM stream_position p WHERE p.stream = s.number);
BEGIN
    IF what IS NULL OR what NOT IN ('same', 'restarted') THEN
        PERFORM stream_refuse_argument(format('%L is not what can have happened to a sequence', what),
            'say `same` where all rows have the ids that they had, or `restarted` where ids begin again');
    ELSIF what = 'same' AND (pg_sequence_last_value(s.sequence) >= noted) IS FALSE THEN
        PERFORM stream_refuse(format('sequence %s stands at %s, and stream %s was published up to %s: ids will come again',
            s.sequence, pg_sequence_last_value(s.sequence), s.name, noted),
            format('SELECT setval(%L, %s) first, or say `restarted`', s.sequence, noted));
    END IF;
    RETURN stream_fork(s.number, stream_epoch(s), CASE what WHEN 'same' THEN 'sequence_kept' ELSE 'ids_went_back' END);
END
$$;


COMMENT ON FUNCTION replicad.stream_sequence_changed(name text, what text) IS 'Says whether a changed sequence has kept its ids';


CREATE FUNCTION replicad.stream_sequence_fault(sequence regclass, method text, OUT problem text, OUT remedy text) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s pg_sequence;
BEGIN
    SELECT * INTO s FROM pg_sequence q WHERE q.seqrelid = sequence;
    IF NOT FOUND THEN
        problem := format('%s is not a sequence', sequence);
        remedy := 'name the sequence that the ids come from';
    ELSIF s.seqcache > 1 THEN
        problem := format('sequence %s has CACHE %s: sessions keep ids for later, so no position can be trusted',
            sequence, s.seqcache);
        remedy := format('run: ALTER SEQUENCE %s CACHE 1', sequence);
    ELSIF s.seqincrement < 0 THEN
        problem := format('sequence %s counts downwards (INCREMENT %s)', sequence, s.seqincrement);
        remedy := format('let it count upwards and begin above all ids: ALTER SEQUENCE %s INCREMENT BY 1, and setval()',
            sequence);
    ELSIF s.seqcycle THEN
        problem := format('sequence %s starts again at its end (CYCLE)', sequence);
        remedy := format('run: ALTER SEQUENCE %s NO CYCLE', sequence);
    ELSIF (SELECT c.relpersistence FROM pg_class c WHERE c.oid = sequence) <> 'p' THEN
        problem := format('sequence %s is not logged: after a crash it issues ids again', sequence);
        remedy := format('run: ALTER SEQUENCE %s SET LOGGED', sequence);
    ELSIF method = 'reservation' AND s.seqmin < 1 THEN
        problem := format('sequence %s can go below 1, which the lock of a reservation cannot carry', sequence);
        remedy := format('run: ALTER SEQUENCE %s MINVALUE 1', sequence);
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_shape_ensure(stream_number integer) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET "TimeZone" TO 'UTC'
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    c stream_changes;
    latest stream_shape;
    seen bigint;
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = stream_number;
    seen := stream_shape_seen(c.source);
    SELECT * INTO latest FROM stream_shape h WHERE h.stream = stream_number ORDER BY h.number DESC LIMIT 1;
    IF latest.shape IS DISTINCT FROM seen THEN
        latest.number := coalesce(latest.number, 0) + 1;
        EXECUTE format('INSERT INTO change_%s AS t (op, "row", schema) VALUES (''s'', $1, $2) RETURNING t.id, %s', stream_number,
            stream_change_line_sql()) INTO latest.since, latest.line USING stream_shape_text(c), latest.number;
        INSERT INTO stream_shape (stream, number, shape, since, line) VALUES (stream_number, latest.number, seen, latest.since, latest.line);
    END IF;
    RETURN latest.number;
END
$_$;


CREATE FUNCTION replicad.stream_shape_now(tbl oid) RETURNS bigint
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT hashtextextended(coalesce(string_agg(concat_ws(' ', a.attnum, a.attname, a.atttypid, a.atttypmod, a.attgenerated),
        E'\n' ORDER BY a.attnum), ''), 0)
    FROM pg_attribute a WHERE a.attrelid = tbl AND a.attnum > 0 AND NOT a.attisdropped
$$;


CREATE FUNCTION replicad.stream_shape_seen(tbl oid) RETURNS bigint
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT hashtextextended(coalesce(string_agg(concat_ws(' ', a.attnum, a.attname, a.atttypid, a.atttypmod, a.attgenerated),
        E'\n' ORDER BY a.attnum), ''), 0)
    FROM pg_attribute a WHERE a.attrelid = tbl AND a.attnum > 0 AND NOT a.attisdropped
$$;


CREATE FUNCTION replicad.stream_shape_text(c replicad.stream_changes) RETURNS json
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT json_build_object('table', stream_qualified(c.source), 'key', stream_columns(c.source, c.key), 'columns', (
        SELECT json_agg(json_build_object('name', n.name, 'type', format_type(a.atttypid, a.atttypmod)) ORDER BY n.place)
        FROM unnest(stream_columns(c.source, c.columns)) WITH ORDINALITY AS n (name, place)
            JOIN pg_attribute a ON a.attrelid = c.source AND a.attname = n.name))
$$;


CREATE FUNCTION replicad.stream_shell(word text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
    SELECT CASE WHEN word ~ '^[A-Za-z0-9_./:@%+=-]+$' THEN word ELSE $q$'$q$ || replace(word, $q$'$q$, $q$'\''$q$) || $q$'$q$ END
$_$;


CREATE FUNCTION replicad.stream_skip_id(name text, id bigint, reason text) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    PERFORM stream_refuse(format('%s rows of stream %s are skipped already', count(*), s.name),
        'so many are no accident of single rows: mend the row expression')
    FROM stream_skip k WHERE k.stream = s.number HAVING count(*) >= 10000;
    INSERT INTO stream_skip (stream, id, reason) VALUES (s.number, stream_skip_id.id, coalesce(stream_skip_id.reason, ''))
    ON CONFLICT DO NOTHING;
    RETURN (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
END
$$;


COMMENT ON FUNCTION replicad.stream_skip_id(name text, id bigint, reason text) IS 'Takes one id out of a stream';


CREATE FUNCTION replicad.stream_skip_undo(name text, id bigint) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    DELETE FROM stream_skip k WHERE k.stream = s.number AND k.id = stream_skip_undo.id;
    RETURN FOUND;
END
$$;


COMMENT ON FUNCTION replicad.stream_skip_undo(name text, id bigint) IS 'Takes a skipped id back into a stream';


CREATE TABLE replicad.stream_skip (
    stream smallint NOT NULL,
    id bigint NOT NULL,
    reason text NOT NULL,
    skipped_by text DEFAULT SESSION_USER NOT NULL,
    skipped_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE replicad.stream_skip IS 'replicad: rows that an operator has taken out of a stream';


CREATE FUNCTION replicad.stream_skips(name text) RETURNS SETOF replicad.stream_skip
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT k.* FROM stream_find(name) s JOIN stream_skip k ON k.stream = s.number ORDER BY k.id
$$;


COMMENT ON FUNCTION replicad.stream_skips(name text) IS 'The ids that were taken out of a stream';


CREATE FUNCTION replicad.stream_snapshot_request(name text, condition text DEFAULT NULL::text, anew boolean DEFAULT false, member regclass DEFAULT NULL::regclass, path name[] DEFAULT current_schemas(false)) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    s stream := stream_find(name);
    c stream_changes;
    trial stream_changes;
    made integer;
BEGIN
    SELECT * INTO c FROM stream_changes x WHERE x.stream = s.number FOR UPDATE;
    PERFORM stream_refuse(format('stream %s has the rows of %s and no changes', name, s.relation),
        'a snapshot belongs to a stream that was added with --changes') WHERE c.stream IS NULL;
    PERFORM stream_refuse('a snapshot anew sends all rows', 'leave the condition out') WHERE anew AND condition IS NOT NULL;
    trial := c;
    trial.predicate := condition;
    trial.path := c.path || CASE WHEN condition IS NULL THEN '{}' ELSE stream_safe_path(path) END;
    PERFORM stream_change_check_predicate(trial);
    IF anew THEN
        PERFORM stream_changes_ensure(c.stream);
        DELETE FROM stream_snapshot x WHERE x.stream = c.stream AND x.finished_at IS NULL;
        EXECUTE format('INSERT INTO change_%s (op, schema) VALUES (''t'', $1)', c.stream) USING stream_shape_ensure(c.stream);
        PERFORM stream_changes_note(c.stream);
        UPDATE stream_changes x SET missed = NULL, missed_at = NULL WHERE x.stream = c.stream;
    END IF;
    EXECUTE format('INSERT INTO change_%s (op, "row", schema) VALUES (''s'', $1, $2)', c.stream)
        USING stream_shape_text(c), stream_shape_ensure(c.stream);
    INSERT INTO stream_snapshot (stream, number, condition, path, member)
        VALUES (c.stream, (SELECT 1 + coalesce(max(x.number), 0) FROM stream_snapshot x WHERE x.stream = c.stream), condition, trial.path, member)
        RETURNING number INTO made;
    DELETE FROM stream_snapshot x WHERE x.stream = c.stream AND x.finished_at IS NOT NULL AND x.number < made - 20;
    RETURN made;
END
$_$;


COMMENT ON FUNCTION replicad.stream_snapshot_request(name text, condition text, anew boolean, member regclass, path name[]) IS 'Asks for the rows of a table in its stream of changes';


CREATE FUNCTION replicad.stream_snapshot_step(stream_number integer, size integer DEFAULT 2000, patience interval DEFAULT '00:00:10'::interval, OUT number integer, OUT sent bigint, OUT finished boolean, OUT waits_for text[]) RETURNS SETOF record
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    c stream_changes;
    w stream_snapshot;
    target regclass;
    ids bigint[];
    newest xid8 := '0';
    until timestamptz := clock_timestamp() + patience;
    pause double precision := 0.001;
    before integer;
    key name[];
    types text[];
    query text;
    shape integer;
    seen bigint;
    count bigint;
    last json;
BEGIN
    PERFORM stream_refuse('a snapshot is taken at the isolation level READ COMMITTED', 'run this in a transaction of its own')
        WHERE current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted');
    SELECT * INTO w FROM stream_snapshot x WHERE x.stream = stream_number AND x.finished_at IS NULL ORDER BY x.number LIMIT 1
        FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR EXISTS (SELECT FROM stream_snapshot x WHERE x.stream = w.stream AND x.finished_at IS NULL AND x.number < w.number) THEN
        RETURN;
    END IF;
    SELECT * INTO c FROM stream_changes x WHERE x.stream = stream_number;
    number := w.number;
    sent := w.rows;
    finished := w.member IS NOT NULL AND NOT EXISTS (SELECT FROM pg_class x WHERE x.oid = w.member);
    target := format('change_%s', c.stream)::regclass;
    shape := stream_shape_ensure(c.stream);
    seen := stream_shape_seen(c.source);
    key := stream_columns(c.source, c.key);
    types := stream_key_types(c.source, key);
    IF NOT finished THEN
        EXECUTE format('LOCK TABLE %s IN ROW EXCLUSIVE MODE', target);
        ids := ARRAY(SELECT nextval(pg_get_serial_sequence(target::text, 'id')) FROM generate_series(1, size));
        waits_for := stream_snapshot_waits(target, NULL, NULL);
        WHILE waits_for <> '{}' LOOP
            IF clock_timestamp() > until THEN
                RETURN NEXT;
                RETURN;
            END IF;
            PERFORM pg_sleep(pause);
            pause := least(2 * pause, 0.05);
            before := cardinality(waits_for);
            waits_for := stream_snapshot_waits(target, waits_for, newest);
            IF cardinality(waits_for) < before THEN  -- what has ended may have been prepared, under another name
                newest := pg_snapshot_xmax(pg_current_snapshot());
                waits_for := stream_snapshot_waits(target, waits_for, newest);
            END IF;
        END LOOP;
        IF stream_shape_seen(c.source) <> seen THEN  -- the next call describes the shape first
            waits_for := NULL;
            RETURN NEXT;
            RETURN;
        END IF;
        query := stream_change_from(c, stream_qualified(coalesce(w.member, c.source)), format(', ARRAY[%s] AS last_key',
                (SELECT string_agg(format('t.%I::text', k.name), ', ' ORDER BY k.n) FROM unnest(key) WITH ORDINALITY AS k (name, n))))
            || CASE WHEN w.condition IS NOT NULL THEN format(E' AND (\n%s\n)', w.condition) ELSE '' END
            || CASE WHEN w.after IS NOT NULL THEN (
                SELECT format(' AND (%s) > (%s)', string_agg(format('t.%I', k.name), ', ' ORDER BY k.n),
                    string_agg(format('%L::%s', w.after[k.n], types[k.n]), ', ' ORDER BY k.n))
                FROM unnest(key) WITH ORDINALITY AS k (name, n)) ELSE '' END
            || (SELECT format(' ORDER BY %s LIMIT %s', string_agg(format('t.%I', k.name), ', ' ORDER BY k.n), size)
                FROM unnest(key) WITH ORDINALITY AS k (name, n));
        c.path := w.path;
        BEGIN
            SELECT l.count, l.last INTO count, last
                FROM stream_change_lines(c, format('SELECT ''r'' AS op, q.* FROM (%s) AS q', query), 'row', shape, ids) l;
        EXCEPTION WHEN undefined_column OR feature_not_supported THEN
            IF stream_shape_seen(c.source) = seen THEN
                RAISE;
            END IF;
            waits_for := NULL;  -- a column was changed in this moment; the next call knows it
            RETURN NEXT;
            RETURN;
        END;
        sent := sent + count;
        finished := count < size;
    END IF;
    waits_for := NULL;
    UPDATE stream_snapshot x SET rows = sent, finished_at = CASE WHEN finished THEN clock_timestamp() END,
        after = coalesce((SELECT array_agg(e.value ORDER BY e.n) FROM json_array_elements_text(last -> 'last_key') WITH ORDINALITY AS e (value, n)), x.after)
        WHERE x.stream = w.stream AND x.number = w.number;
    RETURN NEXT;
END
$$;


CREATE FUNCTION replicad.stream_snapshot_waits(tbl regclass, awaited text[], newest xid8) RETURNS text[]
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT coalesce(array_agg(DISTINCT l.virtualtransaction), '{}')
    FROM pg_locks l
    WHERE l.locktype = 'relation' AND l.relation = tbl AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
        AND (awaited IS NULL OR l.virtualtransaction = ANY (awaited) OR l.virtualtransaction LIKE '-1/%' AND
            -- xids of 32 bits, which begin again
            (newest::text::numeric - split_part(l.virtualtransaction, '/', 2)::numeric) % 4294967296 BETWEEN 1 AND 2147483648)
$$;


CREATE FUNCTION replicad.stream_snapshots() RETURNS TABLE(stream integer, number integer, rows bigint, finished_at timestamp with time zone)
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT w.stream::integer, w.number, w.rows, w.finished_at FROM stream_snapshot w ORDER BY w.stream, w.number
$$;


CREATE FUNCTION replicad.stream_stray_fault(s replicad.stream, OUT problem text, OUT remedy text) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    SELECT f.problem, f.remedy INTO problem, remedy FROM stream_name_fault(s) f;
    IF problem IS NULL THEN
        SELECT f.problem, f.remedy INTO problem, remedy FROM stream_feed_fault(s) f;
    END IF;
    IF problem IS NULL THEN
        SELECT f.problem, f.remedy INTO problem, remedy FROM stream_ids_fault(s) f;
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_strayed(stream_number integer) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream;
    fault record;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = stream_number;
    SELECT * INTO fault FROM stream_stray_fault(s);
    RETURN fault.problem || '; ' || fault.remedy;
END
$$;


CREATE FUNCTION replicad.stream_tables(tbl regclass) RETURNS SETOF regclass
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    WITH RECURSIVE tree(member, depth) AS (
        SELECT tbl::oid, 0
        UNION
        SELECT i.inhrelid, tree.depth + 1 FROM tree JOIN pg_inherits i ON i.inhparent = tree.member
    )
    SELECT member::regclass FROM tree GROUP BY member ORDER BY min(depth), member
$$;


CREATE FUNCTION replicad.stream_trim(name text, upto bigint, batch integer DEFAULT 10000) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    s stream := stream_find(name);
    published bigint := (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
    step bigint;
    deleted bigint;
BEGIN
    IF published IS NULL OR upto > published THEN
        PERFORM stream_refuse(format('stream %s is published up to %s, so rows up to %s cannot be trimmed', s.name,
            coalesce(published::text, 'nothing'), upto), 'rows that no reader was sent must stay');
    END IF;
    IF stream_runs_as(s.relation) IS NOT NULL THEN
        PERFORM stream_refuse(format('to trim stream %s runs code of role %I, which owns %s, with the rights of %I', s.name,
            pg_get_userbyid(stream_runs_as(s.relation)), s.relation, current_user),
            format('connect as role %I, and trim again', pg_get_userbyid(stream_runs_as(s.relation))));
    END IF;
    EXECUTE format('SELECT max(id) FROM (SELECT t.%I FROM %s AS t WHERE t.%I <= $1 ORDER BY 1 LIMIT $2) oldest(id)',
        s.id_column, s.relation, s.id_column) INTO step USING upto, greatest(batch, 1);
    PERFORM stream_trim_note(s.number, coalesce(step, upto), step IS NULL);
    IF step IS NULL THEN
        RETURN 0;
    END IF;
    EXECUTE format('DELETE FROM %s AS t WHERE t.%I <= $1', s.relation, s.id_column) USING step;
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN deleted;
END
$_$;


COMMENT ON FUNCTION replicad.stream_trim(name text, upto bigint, batch integer) IS 'Deletes a batch of the oldest rows of a stream';


CREATE FUNCTION replicad.stream_trim_fault(tbl regclass) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT format('removing rows of %s runs code that belongs to its owner: %s', tbl, what)
    FROM (
        SELECT format('trigger %I of %s', g.tgname, g.tgrelid::regclass) AS what
        FROM stream_tables(tbl) t JOIN pg_trigger g ON g.tgrelid = t
        WHERE NOT g.tgisinternal AND g.tgtype & 8 <> 0 AND g.tgenabled <> 'D'
        UNION ALL
        SELECT format('foreign key %I of %s', k.conname, k.conrelid::regclass)
        FROM stream_tables(tbl) t JOIN pg_constraint k ON k.confrelid = t
        WHERE k.contype = 'f' AND k.confdeltype IN ('c', 'n', 'd')
        UNION ALL
        SELECT format('rule %I of %s', r.rulename, r.ev_class::regclass)
        FROM stream_tables(tbl) t JOIN pg_rewrite r ON r.ev_class = t WHERE r.ev_type = '4'
    ) code
    ORDER BY 1 LIMIT 1
$$;


CREATE FUNCTION replicad.stream_trim_kept(name text, batch integer, OUT partitions bigint, OUT removed bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    s stream := stream_find(name);
    owner oid := stream_runs_as(s.relation);
    upto bigint;
    step text;
    part record;
    patience text := current_setting('lock_timeout');
BEGIN
    partitions := 0;
    removed := 0;
    IF (s.keep_for IS NULL AND s.keep_rows IS NULL) OR NOT pg_try_advisory_xact_lock(hashtext('replicad keep'), s.number) THEN
        RETURN;
    END IF;
    upto := stream_keep_upto(s);
    IF upto IS NULL THEN
        RETURN;
    END IF;
    EXECUTE format('LOCK TABLE %s IN ROW EXCLUSIVE MODE', stream_qualified(s.relation)) ;  -- from here on nobody adds a trigger
    PERFORM stream_refuse(stream_trim_fault(s.relation), format('let the owner of the table remove rows: replicad streams trim %s',
        stream_shell(s.name))) WHERE stream_trim_fault(s.relation) IS NOT NULL;
    PERFORM stream_trimmer_ensure(s.relation);  -- the table may have another owner since the rules were set
    FOR part IN
        SELECT c.oid, (regexp_match(pg_get_expr(c.relpartbound, c.oid), '^FOR VALUES FROM \(''?[^'',]*''?\) TO \(''?(-?[0-9]+)''?\)'))[1]::bigint - 1
            AS last
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_partitioned_table p ON p.partrelid = i.inhparent
        JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
        WHERE i.inhparent = s.relation AND p.partstrat = 'r' AND p.partnatts = 1 AND a.attname = s.id_column
        ORDER BY 2
    LOOP
        CONTINUE WHEN part.last IS NULL OR part.last > upto;
        BEGIN
            PERFORM set_config('lock_timeout', '100ms', true);
            PERFORM stream_trim_note(s.number, part.last, false);
            IF owner IS NULL THEN
                EXECUTE format('DROP TABLE %s', stream_qualified(part.oid));
            ELSE
                EXECUTE format('SELECT %s($1, $2, 0, $3)', stream_trimmer(owner)) USING s.relation::oid, s.id_column, part.oid;
            END IF;
            PERFORM set_config('lock_timeout', patience, true);
        EXCEPTION WHEN lock_not_available THEN
            RETURN;  -- the block is undone, its setting too
        END;
        partitions := partitions + 1;
    END LOOP;
    PERFORM stream_change_rest_trim(s, upto);
    IF partitions > 0 OR EXISTS (
            SELECT FROM stream_changes c JOIN stream_change_parts(c.stream) p ON p.last <= pg_sequence_last_value(s.sequence)
            WHERE c.stream = s.number) THEN
        RETURN;
    END IF;
    SELECT r INTO step FROM stream_as_owner(s.relation, format('SELECT max(id)::text FROM (SELECT t.%1$I FROM %2$s AS t'
        ' WHERE t.%1$I <= %3$s ORDER BY 1 LIMIT %4$s) oldest (id)', s.id_column, stream_qualified(s.relation), upto, greatest(batch, 1))) r;
    IF step IS NULL THEN
        RETURN;
    END IF;
    PERFORM stream_trim_note(s.number, step::bigint, true);
    IF owner IS NULL THEN
        EXECUTE format('DELETE FROM %s AS t WHERE t.%I <= $1', stream_qualified(s.relation), s.id_column) USING step::bigint;
        GET DIAGNOSTICS removed = ROW_COUNT;
    ELSE
        EXECUTE format('SELECT %s($1, $2, $3, NULL)', stream_trimmer(owner)) INTO removed
            USING s.relation::oid, s.id_column, step::bigint;
    END IF;
END
$_$;


CREATE FUNCTION replicad.stream_trim_note(stream_number integer, upto bigint, finished boolean) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    IF NOT (SELECT has_table_privilege(session_user, s.relation, 'DELETE') FROM stream s WHERE s.number = stream_number) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('role %I may not delete from the table of the stream', session_user);
    END IF;
    IF (upto <= (SELECT p.position FROM stream_position p WHERE p.stream = stream_number AND p.writer = 0)) IS NOT TRUE THEN
        PERFORM stream_refuse(format('rows up to %s were not published yet', upto), 'use stream_trim');
    END IF;
    UPDATE stream x SET trimmed_upto = greatest(x.trimmed_upto, upto) WHERE x.number = stream_number;
    IF finished THEN
        DELETE FROM stream_mark m WHERE m.stream = stream_number AND m.position < upto
            AND m.at < (SELECT max(x.at) FROM stream_mark x WHERE x.stream = stream_number AND x.position <= upto);
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_trimmer(owner oid) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
    SELECT format('%I.%I', current_schema(), p.proname)
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname = current_schema() AND p.proowner = owner AND p.proname ~ '^trimmer_1_[0-9a-f]{32}$'
        AND has_function_privilege(p.oid, 'EXECUTE')
    LIMIT 1
$_$;


CREATE FUNCTION replicad.stream_trimmer_ensure(tbl regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    owner oid := stream_runs_as(tbl);
    role name := pg_get_userbyid(owner);
    home name := current_schema();
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = home);
    signature text;
    granted boolean;
BEGIN
    IF owner IS NULL OR stream_trimmer(owner) IS NOT NULL THEN
        RETURN;
    END IF;
    signature := format('%I.%I(oid, name, bigint, oid)', home, 'trimmer_1_' || md5(role));
    granted := has_schema_privilege(owner, home, 'CREATE');
    EXECUTE format('DROP FUNCTION IF EXISTS %s', signature);
    EXECUTE format('CREATE FUNCTION %I.%I(tbl oid, id_column name, upto bigint, part oid) RETURNS bigint'
        ' LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS %L', home, 'trimmer_1_' || md5(role), $body$
        DECLARE
            guarded boolean := false;
            removed bigint;
        BEGIN
            BEGIN
                PERFORM pg_catalog.set_config('role', 'none', true);
            EXCEPTION WHEN insufficient_privilege THEN
                guarded := true;
            END;
            IF NOT guarded OR current_user <> (SELECT pg_catalog.pg_get_userbyid(c.relowner) FROM pg_catalog.pg_class c
                    WHERE c.oid = tbl) THEN
                RAISE EXCEPTION USING ERRCODE = 'RS006', MESSAGE = 'the table changed its owner, or its trimmer was altered',
                    HINT = 'drop the function and set the rules anew';
            END IF;
            IF part IS NOT NULL THEN
                EXECUTE pg_catalog.format('DROP TABLE %s', part::pg_catalog.regclass);
                RETURN 0;
            END IF;
            EXECUTE pg_catalog.format('DELETE FROM %s AS t WHERE t.%I <= $1', tbl::pg_catalog.regclass, id_column) USING upto;
            GET DIAGNOSTICS removed = ROW_COUNT;
            RETURN removed;
        END
        $body$);
    EXECUTE format('COMMENT ON FUNCTION %s IS %L', signature, format('replicad: removes old rows of tables of %I as %1$I', role));
    EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', signature);
    IF NOT granted THEN
        EXECUTE format('GRANT CREATE ON SCHEMA %I TO %I', home, role);  -- no other session sees it
    END IF;
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', signature, role);
    IF NOT granted THEN
        EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM %I', home, role);
    END IF;
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', signature, keeper);
EXCEPTION WHEN insufficient_privilege THEN
    PERFORM stream_refuse(SQLERRM, format('run: GRANT %I TO %I', role, keeper));
END
$_$;


CREATE FUNCTION replicad.stream_trouble_write(daemon text, kinds text[], names text[], causes text[], codes text[], reasons text[], ages double precision[], at timestamp with time zone DEFAULT clock_timestamp()) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    DELETE FROM stream_trouble t
    WHERE t.daemon = stream_trouble_write.daemon OR t.seen_at < stream_trouble_write.at - interval '1 hour';
    INSERT INTO stream_trouble (daemon, kind, name, cause, code, reason, since, seen_at)
    SELECT stream_trouble_write.daemon, n.kind, n.name, n.cause, n.code, n.reason,
        stream_trouble_write.at - make_interval(secs => n.age), stream_trouble_write.at
    FROM unnest(kinds, names, causes, codes, reasons, ages) AS n (kind, name, cause, code, reason, age)
    ON CONFLICT ON CONSTRAINT stream_trouble_pkey DO NOTHING;  -- an error while a dump is restored, which brings rows
END
$$;


CREATE UNLOGGED TABLE replicad.stream_trouble (
    daemon text NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    cause text NOT NULL,
    code text NOT NULL,
    reason text NOT NULL,
    since timestamp with time zone NOT NULL,
    seen_at timestamp with time zone NOT NULL
);


COMMENT ON TABLE replicad.stream_trouble IS 'replicad: what running daemons report to be wrong';


CREATE FUNCTION replicad.stream_troubles(at timestamp with time zone DEFAULT clock_timestamp()) RETURNS SETOF replicad.stream_trouble
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT * FROM stream_trouble t WHERE t.seen_at > stream_troubles.at - interval '15 seconds'
    ORDER BY t.since, t.kind, t.name, t.cause, t.daemon
$$;


COMMENT ON FUNCTION replicad.stream_troubles(at timestamp with time zone) IS 'What running daemons report to be wrong';


CREATE FUNCTION replicad.stream_unprove(number integer) RETURNS void
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT pg_advisory_unlock_shared(stream_proof_key(number, (
        SELECT format('s%s %s', a.pid, a.usesysid) FROM pg_stat_get_activity(pg_backend_pid()) a)))
$$;


CREATE FUNCTION replicad.stream_writer_holder(s replicad.stream, names text[], OUT holder text, OUT remedy text) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    one record;
BEGIN
    SELECT l.pid, a.application_name, p.gid INTO one
    FROM pg_locks l
    LEFT JOIN pg_stat_get_activity(NULL) a ON a.pid = l.pid
    LEFT JOIN pg_locks x ON l.pid IS NULL AND x.locktype = 'transactionid' AND x.pid IS NULL
        AND x.virtualtransaction = l.virtualtransaction
    LEFT JOIN pg_prepared_xact() p ON p.transaction = x.transactionid
    WHERE l.granted AND l.locktype = 'relation' AND l.pid IS DISTINCT FROM pg_backend_pid()
        AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.relation IN (SELECT t::oid FROM stream_tables(s.relation) t)
        AND (l.pid IS NULL OR names IS NULL OR EXISTS (SELECT FROM unnest(names) n WHERE stream_holds_back(s.number, a.application_name, n)))
    ORDER BY p.gid, l.pid LIMIT 1;
    IF NOT FOUND AND s.method = 'reservation' THEN
        SELECT h.pid, h.session AS application_name, NULL::text AS gid INTO one FROM stream_held(s.number) h
        WHERE h.pid IS NULL OR names IS NULL OR EXISTS (SELECT FROM unnest(names) n WHERE stream_holds_back(s.number, h.session, n))
        ORDER BY h.pid LIMIT 1;
    END IF;
    IF FOUND AND one.pid IS NULL THEN
        holder := coalesce(format('prepared transaction %L', one.gid), 'a prepared transaction');
        remedy := 'COMMIT PREPARED or ROLLBACK PREPARED it first (pg_prepared_xacts lists them)';
    ELSIF FOUND THEN
        holder := format('the session with pid %s (%s)', one.pid, one.application_name);
        remedy := format('end its transaction first, or SELECT pg_terminate_backend(%s)', one.pid);
    END IF;
END
$$;


CREATE FUNCTION replicad.stream_writers(name text, OUT number integer, OUT writer text, OUT "position" bigint, OUT created_at timestamp with time zone, OUT retired_at timestamp with time zone) RETURNS SETOF record
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT w.number, w.name, greatest(p.position, l.position), w.created_at, w.retired_at
    FROM stream_find(stream_writers.name) s
    JOIN stream_writer w ON w.stream = s.number
    LEFT JOIN stream_position p ON p.stream = s.number AND p.writer = w.number
    LEFT JOIN stream_position l ON l.stream = s.number AND l.writer = 0
    ORDER BY w.number
$$;


COMMENT ON FUNCTION replicad.stream_writers(name text, OUT number integer, OUT writer text, OUT "position" bigint, OUT created_at timestamp with time zone, OUT retired_at timestamp with time zone) IS 'All writers of a stream and their positions';


CREATE FUNCTION replicad.stream_writers_discover(s replicad.stream) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    names text[] := ARRAY['master'];
BEGIN
    IF s.instance_column IS NOT NULL THEN
        names := ARRAY(SELECT stream_as_owner(s.relation, format('SELECT DISTINCT instance FROM ('
            'SELECT coalesce(t.%I::text, '''') COLLATE "C" FROM %s AS t ORDER BY t.%I DESC LIMIT 100000) newest(instance)'
            ' LIMIT 10001', s.instance_column, stream_qualified(s.relation), s.id_column)));
    END IF;
    PERFORM stream_writers_ensure(s.number, coalesce(nullif(names, '{}'), ARRAY['master']));
END
$$;


CREATE FUNCTION replicad.stream_writers_ensure(stream_number integer, names text[]) RETURNS TABLE(writer text, writer_number integer)
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    wanted text[] := ARRAY(SELECT DISTINCT stream_instance(n) FROM unnest(names) n);
BEGIN
    IF EXISTS (SELECT FROM unnest(wanted) n
               WHERE NOT EXISTS (SELECT FROM stream_writer w WHERE w.stream = stream_number AND w.name = n
                                 AND w.retired_at IS NULL)) THEN
        PERFORM FROM stream s WHERE s.number = stream_number FOR NO KEY UPDATE;  -- one after another
        UPDATE stream_writer w SET retired_at = NULL
        WHERE w.stream = stream_number AND w.name = ANY (wanted) AND w.retired_at IS NOT NULL;
        INSERT INTO stream_writer (stream, number, name)
        SELECT stream_number,
            (SELECT coalesce(max(w.number), 0) FROM stream_writer w WHERE w.stream = stream_number)
                + row_number() OVER (ORDER BY n),
            n
        FROM unnest(wanted) n
        WHERE NOT EXISTS (SELECT FROM stream_writer w WHERE w.stream = stream_number AND w.name = n);
    END IF;
    RETURN QUERY SELECT w.name, w.number FROM stream_writer w WHERE w.stream = stream_number AND w.name = ANY (wanted);
END
$$;


CREATE FUNCTION replicad.stream_writers_idle(name text, since bigint, OUT writer text) RETURNS SETOF text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    WITH busy (name) AS MATERIALIZED (
        SELECT stream_writers_last(stream_find(stream_writers_idle.name), since)
    ), active AS (
        SELECT w.number, w.name, EXISTS (SELECT FROM busy b WHERE b.name = w.name) AS busy
        FROM stream_find(stream_writers_idle.name) s
        JOIN stream_writer w ON w.stream = s.number AND w.retired_at IS NULL
    )
    SELECT a.name FROM active a
    WHERE NOT a.busy AND (a.number > (SELECT min(x.number) FROM active x) OR EXISTS (SELECT FROM active x WHERE x.busy))
    ORDER BY a.number
$$;


COMMENT ON FUNCTION replicad.stream_writers_idle(name text, since bigint, OUT writer text) IS 'Writers without a row above an id';


CREATE FUNCTION replicad.stream_writers_last(s replicad.stream, after bigint) RETURNS SETOF text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    RETURN QUERY SELECT stream_as_owner(s.relation, format('SELECT DISTINCT %I.stream_instance(%s) FROM %s AS t WHERE t.%I > %L',
        current_schema(), CASE WHEN s.instance_column IS NULL THEN 'NULL' ELSE format('t.%I::text COLLATE "C"',
        s.instance_column) END, stream_qualified(s.relation), s.id_column, after));
END
$$;


CREATE FUNCTION replicad.stream_writers_retire(name text, names text[], quiet double precision DEFAULT 60, at timestamp with time zone DEFAULT clock_timestamp()) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find(name);
    wanted text[] := ARRAY(SELECT DISTINCT stream_instance(n) FROM unnest(names) n);
    settled bigint;
    culprit text;
    remedy text;
    retired integer;
BEGIN
    PERFORM FROM stream x WHERE x.number = s.number FOR NO KEY UPDATE;  -- as stream_writers_ensure: one after another
    SELECT n INTO culprit FROM unnest(wanted) n
    WHERE NOT EXISTS (SELECT FROM stream_writer w WHERE w.stream = s.number AND w.name = n) ORDER BY n LIMIT 1;
    PERFORM stream_refuse(format('stream %s has no writer %L', s.name, culprit),
        format('`replicad streams writers %s` lists those that there are', s.name)) WHERE culprit IS NOT NULL;

    -- Up to where rows are older than `quiet`: all, where nothing was published since; else by the latest note of that age.
    SELECT CASE WHEN p.published_at <= stream_writers_retire.at - make_interval(secs => quiet) THEN p.position
        ELSE (SELECT max(m.position) FROM stream_mark m
              WHERE m.stream = s.number AND m.at <= stream_writers_retire.at - make_interval(secs => quiet)) END
    INTO settled FROM stream_position p WHERE p.stream = s.number AND p.writer = 0;
    PERFORM stream_refuse(format('of stream %s nothing was published %s s ago or earlier, so nobody is known to be quiet',
        s.name, quiet), 'retire writers when a daemon has served the stream for that long') WHERE settled IS NULL;
    SELECT b INTO culprit FROM stream_writers_last(s, settled) b WHERE b = ANY (wanted) ORDER BY b LIMIT 1;
    PERFORM stream_refuse(
        format('writer %s of stream %s has rows above %s, so it wrote not long ago', culprit, s.name, settled),
        format('retire it when it has written nothing for %s s', greatest(quiet, 1))) WHERE culprit IS NOT NULL;
    SELECT format('%s (pid %s)', a.application_name, a.pid) INTO culprit FROM pg_stat_activity a
    WHERE a.datname = current_database() AND a.xact_start IS NOT NULL AND a.pid <> pg_backend_pid()
        AND a.application_name = ANY (wanted) ORDER BY 1 LIMIT 1;
    PERFORM stream_refuse(format('writer %s has an open transaction and may be writing', culprit),
        'end that transaction first') WHERE culprit IS NOT NULL;
    SELECT h.holder, h.remedy INTO culprit, remedy FROM stream_writer_holder(s, wanted) h;
    PERFORM stream_refuse(format('%s has written to stream %s, and its rows may be those of %s', culprit, s.name,
        array_to_string(wanted, ', ')), remedy) WHERE culprit IS NOT NULL;

    UPDATE stream_writer w SET retired_at = stream_writers_retire.at
    WHERE w.stream = s.number AND w.name = ANY (wanted) AND w.retired_at IS NULL;
    GET DIAGNOSTICS retired = ROW_COUNT;
    PERFORM stream_refuse(format('that would leave stream %s without a writer', s.name), 'leave one of them')
    WHERE NOT EXISTS (SELECT FROM stream_writer w WHERE w.stream = s.number AND w.retired_at IS NULL);
    RETURN retired;
END
$$;


COMMENT ON FUNCTION replicad.stream_writers_retire(name text, names text[], quiet double precision, at timestamp with time zone) IS 'Retires writers: they are no longer listed to readers';


CREATE FUNCTION replicad.writer_beat(stream text, instance text, term bigint) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    w writer_sharding := writer_find_own(stream);
    new_beat bigint;
BEGIN
    UPDATE writer_member m SET beat = nextval('writer_term_seq'), beat_at = clock_timestamp()
        WHERE m.stream = w.stream AND m.instance = writer_beat.instance AND m.term = writer_beat.term
        RETURNING m.beat INTO new_beat;
    IF NOT FOUND THEN
        PERFORM writer_expelled(stream, instance, term);
    END IF;
    RETURN new_beat;
END
$$;


COMMENT ON FUNCTION replicad.writer_beat(stream text, instance text, term bigint) IS 'A writer''s sign of life';


CREATE FUNCTION replicad.writer_changed(number smallint) RETURNS void
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    UPDATE writer_sharding SET version = nextval('writer_term_seq') WHERE stream = number;
    SELECT pg_notify('replicad_writers', s.name) FROM stream s WHERE s.number = writer_changed.number
$$;


CREATE FUNCTION replicad.writer_disable(stream text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    found_sharding writer_sharding := writer_find(stream);
BEGIN
    DELETE FROM writer_sharding w WHERE w.stream = found_sharding.stream;
END
$$;


COMMENT ON FUNCTION replicad.writer_disable(stream text) IS 'Ends the sharing of a stream''s keys';


CREATE FUNCTION replicad.writer_enable(stream text, slots integer DEFAULT 256) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find(stream);
    present integer;
BEGIN
    IF slots IS NULL OR slots NOT BETWEEN 1 AND 4096 THEN
        PERFORM writer_refuse('RS002', format('%s is no number of slots', slots), 'give one from 1 to 4096');
    END IF;
    INSERT INTO writer_sharding (stream, slots) VALUES (s.number, writer_enable.slots) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        SELECT w.slots INTO present FROM writer_sharding w WHERE w.stream = s.number;
        IF present <> slots THEN
            PERFORM writer_refuse('RS002', format('the writers of stream %L share %s slots already', stream, present),
                format('stop them and run `replicad sharding disable %s` first: a key''s slot depends on the number',
                    stream));
        END IF;
        RETURN false;
    END IF;
    INSERT INTO writer_slot (stream, slot, term)
        SELECT s.number, n, nextval('writer_term_seq') FROM generate_series(0, slots - 1) n;
    RETURN true;
END
$$;


COMMENT ON FUNCTION replicad.writer_enable(stream text, slots integer) IS 'Lets the writers of a stream share its keys';


CREATE FUNCTION replicad.writer_expel(stream text, expired bigint[]) RETURNS text[]
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    w writer_sharding := writer_lock(stream);
    names text[];
BEGIN
    WITH gone AS (
        DELETE FROM writer_member m WHERE m.stream = w.stream AND m.beat = ANY (expired) RETURNING m.instance
    )
    SELECT array_agg(g.instance ORDER BY g.instance) INTO names FROM gone g;
    IF names IS NOT NULL THEN
        PERFORM writer_changed(w.stream);
    END IF;
    RETURN coalesce(names, '{}');
END
$$;


COMMENT ON FUNCTION replicad.writer_expel(stream text, expired bigint[]) IS 'Ends the membership of writers that gave no sign of life';


CREATE FUNCTION replicad.writer_expelled(stream text, instance text, term bigint) RETURNS void
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT writer_refuse('RS011', format('writer %s does not share stream %L under term %s', instance, stream, term),
        'join anew; what it had may be others'' by now')
$$;


CREATE SEQUENCE replicad.writer_term_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


COMMENT ON SEQUENCE replicad.writer_term_seq IS 'replicad: terms and beats of writers that share a stream';


CREATE TABLE replicad.writer_sharding (
    stream smallint NOT NULL,
    slots integer NOT NULL,
    version bigint DEFAULT nextval('replicad.writer_term_seq'::regclass) NOT NULL,
    CONSTRAINT writer_sharding_slots_check CHECK (((slots >= 1) AND (slots <= 4096)))
);


COMMENT ON TABLE replicad.writer_sharding IS 'replicad: streams whose writers share the keys; use writer_enable()';


CREATE FUNCTION replicad.writer_find(stream text) RETURNS replicad.writer_sharding
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    found_sharding writer_sharding;
BEGIN
    SELECT w.* INTO found_sharding FROM writer_sharding w JOIN stream s ON s.number = w.stream
        WHERE s.name = writer_find.stream;
    IF NOT FOUND THEN
        PERFORM stream_find(stream);
        PERFORM writer_refuse('RS002', format('the writers of stream %L do not share its keys', stream),
            format('run `replicad sharding enable %s`, or: SELECT %I.writer_enable(%L)', stream, current_schema(), stream));
    END IF;
    RETURN found_sharding;
END
$$;


CREATE FUNCTION replicad.writer_find_own(stream text) RETURNS replicad.writer_sharding
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
DECLARE
    w writer_sharding := writer_find(stream);
    me name := CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role') END;
    s stream;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = w.stream;
    IF (has_any_column_privilege(me, s.relation, 'INSERT, UPDATE') OR has_table_privilege(me, s.relation, 'DELETE')
            OR has_sequence_privilege(me, s.sequence, 'USAGE, UPDATE')) IS NOT TRUE THEN
        PERFORM writer_refuse('42501',
            format('role %I may not write stream %L, so it may not be one of its writers', me, s.name),
            format('run: GRANT INSERT ON %s TO %I; or, if functions of another owner write for it, '
                'GRANT USAGE ON SEQUENCE %s TO %2$I', s.relation, me, s.sequence));
    END IF;
    RETURN w;
END
$_$;


CREATE FUNCTION replicad.writer_give(stream text, instance text, given integer[], terms bigint[], receivers text[], patience interval DEFAULT '00:00:00'::interval) RETURNS TABLE(slot integer, term bigint)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    w writer_sharding := writer_find_own(stream);
    free integer[] := writer_lock_slots(w.stream, given, patience);
BEGIN
    w := writer_lock(stream);
    RETURN QUERY UPDATE writer_slot x
        SET owner = m.instance, term = nextval('writer_term_seq'), moved_at = clock_timestamp()
        FROM unnest(given, terms, receivers) AS g (slot, term, receiver)
        JOIN writer_member m ON m.instance = g.receiver AND NOT m.leaving
        WHERE x.stream = w.stream AND m.stream = w.stream AND x.slot = g.slot AND x.slot = ANY (free)
            AND x.owner = writer_give.instance AND x.term = g.term
        RETURNING x.slot, x.term;
    IF FOUND THEN
        PERFORM writer_changed(w.stream);
    END IF;
END
$$;


COMMENT ON FUNCTION replicad.writer_give(stream text, instance text, given integer[], terms bigint[], receivers text[], patience interval) IS 'Gives slots to other writers';


CREATE FUNCTION replicad.writer_join(stream text, instance text, ttl interval, address text DEFAULT NULL::text, expired bigint[] DEFAULT '{}'::bigint[], OUT term bigint, OUT beat bigint) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    w writer_sharding := writer_lock(stream);
BEGIN
    IF instance IS DISTINCT FROM stream_instance(instance) THEN
        PERFORM writer_refuse('RS002', format('%L cannot be the name of a writer', left(instance, 200)),
            'give one without blanks, of 1 to 200 characters');
    ELSIF ttl IS NULL OR ttl NOT BETWEEN '0.2 s' AND '1 h' OR length(address) > 500 THEN
        PERFORM writer_refuse('RS002', format('writer %s has a time to live of %s, and an address of %s characters',
            instance, ttl, coalesce(length(address), 0)), 'give 0.2 seconds to an hour, and at most 500 characters');
    END IF;
    DELETE FROM writer_member m
        WHERE m.stream = w.stream AND m.instance = writer_join.instance AND m.beat = ANY (expired);
    IF EXISTS (SELECT FROM writer_member m WHERE m.stream = w.stream AND m.instance = writer_join.instance) THEN
        PERFORM writer_refuse('RS012', format('a writer named %s shares stream %L already', instance, stream),
            'give every process a name of its own, or wait until its time to live has passed without a sign of life');
    ELSIF (SELECT count(*) FROM writer_member m WHERE m.stream = w.stream) >= 1000 THEN
        PERFORM writer_refuse('RS002', format('1000 writers share stream %L already', stream), 'stop some of them');
    END IF;
    term := nextval('writer_term_seq');
    beat := nextval('writer_term_seq');
    INSERT INTO writer_member (stream, instance, term, beat, ttl, address)
        VALUES (w.stream, writer_join.instance, writer_join.term, writer_join.beat, writer_join.ttl, writer_join.address);
    PERFORM writer_changed(w.stream);
END
$$;


COMMENT ON FUNCTION replicad.writer_join(stream text, instance text, ttl interval, address text, expired bigint[], OUT term bigint, OUT beat bigint) IS 'Makes the caller a writer of a stream';


CREATE FUNCTION replicad.writer_leave(stream text, instance text, term bigint) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    w writer_sharding := writer_lock(stream);
BEGIN
    DELETE FROM writer_member m
        WHERE m.stream = w.stream AND m.instance = writer_leave.instance AND m.term = writer_leave.term;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM writer_changed(w.stream);
    RETURN true;
END
$$;


COMMENT ON FUNCTION replicad.writer_leave(stream text, instance text, term bigint) IS 'Ends a membership';


CREATE FUNCTION replicad.writer_lock(stream text) RETURNS replicad.writer_sharding
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    w writer_sharding := writer_find_own(stream);
BEGIN
    SELECT * INTO w FROM writer_sharding x WHERE x.stream = w.stream FOR UPDATE;
    IF NOT FOUND THEN
        RETURN writer_find(stream);  -- disabled while we waited: raises
    END IF;
    RETURN w;
END
$$;


CREATE FUNCTION replicad.writer_lock_key(stream integer, slot integer) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
    SELECT stream * 65536 + slot
$$;


CREATE FUNCTION replicad.writer_lock_slots(stream smallint, wanted integer[], patience interval DEFAULT '00:00:00'::interval) RETURNS integer[]
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    got integer[] := '{}';
    n integer;
BEGIN
    IF patience > '0'::interval THEN
        PERFORM set_config('lock_timeout', ceil(extract(epoch FROM patience) * 1000)::text, true);
    END IF;
    FOREACH n IN ARRAY wanted LOOP
        IF pg_try_advisory_xact_lock(1380992591, writer_lock_key(stream, n)) THEN
            got := got || n;
        ELSIF patience > '0'::interval THEN
            BEGIN
                PERFORM pg_advisory_xact_lock(1380992591, writer_lock_key(stream, n));
                got := got || n;
            EXCEPTION WHEN lock_not_available THEN
                NULL;
            END;
        END IF;
    END LOOP;
    RETURN got;
END
$$;


CREATE FUNCTION replicad.writer_look(stream text, since bigint, OUT version bigint, OUT slots integer, OUT instances text[], OUT member_terms bigint[], OUT beats bigint[], OUT ttls double precision[], OUT addresses text[], OUT leaving boolean[], OUT changed integer[], OUT owners text[], OUT terms bigint[]) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    w writer_sharding := writer_find(stream);
BEGIN
    version := w.version;
    slots := w.slots;
    SELECT array_agg(m.instance), array_agg(m.term), array_agg(m.beat), array_agg(extract(epoch FROM m.ttl)::float8),
            array_agg(m.address), array_agg(m.leaving)
        INTO instances, member_terms, beats, ttls, addresses, leaving
        FROM writer_member m WHERE m.stream = w.stream;
    SELECT array_agg(x.slot), array_agg(x.owner), array_agg(x.term) INTO changed, owners, terms
        FROM writer_slot x WHERE x.stream = w.stream AND x.term > since AND w.version > since;
END
$$;


COMMENT ON FUNCTION replicad.writer_look(stream text, since bigint, OUT version bigint, OUT slots integer, OUT instances text[], OUT member_terms bigint[], OUT beats bigint[], OUT ttls double precision[], OUT addresses text[], OUT leaving boolean[], OUT changed integer[], OUT owners text[], OUT terms bigint[]) IS 'Members, and slots that changed hands, at one moment';


CREATE FUNCTION replicad.writer_not_owner(stream text, key text, instance text, term bigint) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    o record := writer_owner(stream, key);
BEGIN
    IF key IS NULL THEN
        PERFORM writer_refuse('RS002', 'NULL is nobody''s key', 'give the key as text');
    END IF;
    PERFORM writer_refuse('RS010',
        format('key %L of stream %L belongs to %s, not to %s under term %s', left(key, 100), stream,
            coalesce('writer ' || o.owner || coalesce(' at ' || o.address, ''), 'no writer at this moment'),
            instance, coalesce(term::text, 'NULL')),
        'nothing was written; send it to its owner, or wait until it has one');
END
$$;


CREATE FUNCTION replicad.writer_owner(stream text, key text, OUT slot integer, OUT term bigint, OUT owner text, OUT address text) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    w writer_sharding := writer_find(stream);
BEGIN
    SELECT x.slot, x.term, m.instance, m.address INTO slot, term, owner, address
        FROM writer_slot x
        LEFT JOIN writer_member m ON m.stream = x.stream AND m.instance = x.owner AND m.term < x.term
        WHERE x.stream = w.stream AND x.slot = writer_slot_of(key, w.slots);
END
$$;


COMMENT ON FUNCTION replicad.writer_owner(stream text, key text, OUT slot integer, OUT term bigint, OUT owner text, OUT address text) IS 'Whose a key is, and where to reach that writer';


CREATE FUNCTION replicad.writer_owns(stream text, key text, instance text, term bigint) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    number integer;
    place integer;
    patience interval;
    idle interval;
BEGIN
    SELECT s.number, writer_slot_of(key, w.slots) INTO number, place
        FROM stream s JOIN writer_sharding w ON w.stream = s.number WHERE s.name = writer_owns.stream;
    IF place IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock_shared(1380992591, writer_lock_key(number, place));
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            PERFORM FROM writer_slot x WHERE x.stream = number AND x.slot = place FOR SHARE;
        END IF;
        SELECT m.ttl INTO patience
            FROM writer_slot x JOIN writer_member m ON m.stream = x.stream AND m.instance = x.owner AND m.term < x.term
            WHERE x.stream = number AND x.slot = place
                AND x.owner = writer_owns.instance AND x.term = writer_owns.term;
    END IF;
    IF patience IS NULL THEN
        PERFORM writer_not_owner(stream, key, instance, term);
    END IF;
    idle := current_setting('idle_in_transaction_session_timeout');
    IF idle = '0' OR idle > patience THEN
        PERFORM set_config('idle_in_transaction_session_timeout', (extract(epoch FROM patience) * 1000)::int::text, true);
    END IF;
    RETURN place;
END
$$;


COMMENT ON FUNCTION replicad.writer_owns(stream text, key text, instance text, term bigint) IS 'Makes sure that a transaction''s writer owns a key';


CREATE FUNCTION replicad.writer_refuse(code text, message text, hint text) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint;
END
$$;


CREATE FUNCTION replicad.writer_retire(stream text, instance text, term bigint) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    w writer_sharding := writer_lock(stream);
BEGIN
    UPDATE writer_member m SET leaving = true
        WHERE m.stream = w.stream AND m.instance = writer_retire.instance AND m.term = writer_retire.term;
    IF NOT FOUND THEN
        PERFORM writer_expelled(stream, instance, term);
    END IF;
    PERFORM writer_changed(w.stream);
END
$$;


COMMENT ON FUNCTION replicad.writer_retire(stream text, instance text, term bigint) IS 'Announces that a writer is about to leave';


CREATE FUNCTION replicad.writer_slot_of(key text, slots integer) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    SELECT (('x' || encode(substr(sha256(convert_to(key, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint % slots)::integer
$$;


CREATE FUNCTION replicad.writer_take(stream text, instance text, member bigint, wanted integer[], seen bigint[], patience interval DEFAULT '00:00:00'::interval) RETURNS TABLE(slot integer, term bigint)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    w writer_sharding := writer_find_own(stream);
    free integer[] := writer_lock_slots(w.stream, wanted, patience);
BEGIN
    w := writer_lock(stream);
    IF NOT EXISTS (SELECT FROM writer_member m WHERE m.stream = w.stream AND m.instance = writer_take.instance
            AND m.term = member) THEN
        PERFORM writer_expelled(stream, instance, member);
    END IF;
    RETURN QUERY UPDATE writer_slot x
        SET owner = writer_take.instance, term = nextval('writer_term_seq'), moved_at = clock_timestamp()
        FROM unnest(wanted, seen) AS s (slot, term)
        WHERE x.stream = w.stream AND x.slot = s.slot AND x.term = s.term AND x.slot = ANY (free)
            AND NOT EXISTS (SELECT FROM writer_member m
                WHERE m.stream = w.stream AND m.instance = x.owner AND m.term < x.term)
        RETURNING x.slot, x.term;
    IF FOUND THEN
        PERFORM writer_changed(w.stream);
    END IF;
END
$$;


COMMENT ON FUNCTION replicad.writer_take(stream text, instance text, member bigint, wanted integer[], seen bigint[], patience interval) IS 'Takes slots that are nobody''s';


CREATE FUNCTION tube.tube_ack(tube text, partitions integer, partition integer, term bigint, seqs bigint[], OUT pods bigint, OUT ages bigint[], OUT seconds double precision) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_lease_hold(tube, partitions, partition, term);
    SELECT * INTO pods, ages, seconds FROM tube_remove(tube, partitions, partition, seqs);
END
$$;


CREATE FUNCTION tube.tube_ack_all(tube text, partitions integer, partitions_of integer[], terms bigint[], seqs bigint[], numbers integer[], OUT pods bigint[], OUT ages bigint[], OUT seconds double precision) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    valid text := tube_generation_valid();
    held bigint[];
    shards integer[];
BEGIN
    SELECT array_agg(l.n) INTO held FROM (
        SELECT a.n FROM unnest(partitions_of, terms) WITH ORDINALITY AS a (partition, term, n)
        JOIN tube_lease l ON l.tube = tube_ack_all.tube AND l.term = a.term AND l.generation = valid
            AND tube_ack_all.partitions % l.partitions = 0 AND a.partition % l.partitions = l.partition
        ORDER BY l.partitions, l.partition FOR KEY SHARE OF l) AS l;
    FOR number IN 1 .. cardinality(terms) LOOP
        PERFORM tube_check_partition(partitions, partitions_of[number]);
        IF (number = ANY (held)) IS NOT TRUE THEN
            PERFORM tube_lease_lost(tube, partitions, partitions_of[number], terms[number]);
        END IF;
    END LOOP;
    EXECUTE format('WITH gone AS (DELETE FROM %I AS pod USING unnest($1, $2) AS asked (seq, n)'
        ' WHERE pod.seq = asked.seq AND (pod.shard %% %s) = ($3)[asked.n] RETURNING asked.n, pod.shard, %s),'
        ' counted AS (SELECT gone.n, count(*) AS pods FROM gone GROUP BY gone.n)'
        ' SELECT array_agg(coalesce(counted.pods, 0) ORDER BY each.n), (SELECT array_agg(DISTINCT gone.shard) FROM gone), %s'
        ' FROM generate_series(1, cardinality($3)) AS each (n) LEFT JOIN counted ON counted.n = each.n',
        tube, partitions, tube_age_sql('pod'), tube_ages_sql())
        INTO pods, shards, ages, seconds USING seqs, numbers, partitions_of;
    PERFORM tube_shards_note(tube, shards);
END
$_$;


CREATE FUNCTION tube.tube_ack_upto(tube text, partitions integer, partition integer, term bigint, after_regular bigint, after_backfill bigint, upto_regular bigint, upto_backfill bigint, OUT pods bigint, OUT ages bigint[], OUT seconds double precision) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_lease_hold(tube, partitions, partition, term);
    SELECT * INTO pods, ages, seconds FROM tube_remove_range(tube, partitions, partition, false, after_regular, upto_regular);
    pods := pods + (tube_remove_range(tube, partitions, partition, true, after_backfill, upto_backfill)).pods;
END
$$;


CREATE FUNCTION tube.tube_age_sql(pod text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT format('CASE WHEN %1$s.op <> ''B'' THEN'
        ' greatest(extract(epoch FROM clock_timestamp() - %1$s.ts)::float8, 0) END AS age', pod)
$_$;


CREATE FUNCTION tube.tube_ages_sql() RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT $sql$(
        SELECT array_agg(counted.pods ORDER BY counted.bucket) FROM (
            SELECT b.bucket, count(g.age) AS pods
            FROM generate_series(0, 15) AS b (bucket)
            LEFT JOIN gone AS g ON b.bucket
                = width_bucket(g.age, '{0.005,0.01,0.025,0.05,0.1,0.25,0.5,1,2.5,5,10,30,60,300,3600}'::float8[])
            GROUP BY 1) AS counted), (SELECT coalesce(sum(g.age), 0) FROM gone AS g)$sql$
$_$;


CREATE FUNCTION tube.tube_as_owner(tbl regclass, query text, path text) RETURNS SETOF text
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    SET "DateStyle" TO 'ISO, MDY'
    SET "IntervalStyle" TO 'postgres'
    SET extra_float_digits TO '1'
    SET bytea_output TO 'hex'
    SET xmlbinary TO 'base64'
    SET lc_monetary TO 'C'
    SET lc_numeric TO 'C'
    SET lc_time TO 'C'
    SET xmloption TO 'content'
    SET array_nulls TO 'on'
    SET transform_null_equals TO 'off'
    SET standard_conforming_strings TO 'on'
    SET backslash_quote TO 'safe_encoding'
    AS $_$
DECLARE
    owner oid := tube_runs_as(tbl);
    line text;
    failure json;
BEGIN
    IF owner IS NULL THEN
        PERFORM set_config('search_path', path, true);
        RETURN QUERY EXECUTE query;
        RETURN;
    END IF;
    PERFORM tube_reader_ensure(tbl);
    FOR line IN EXECUTE format('SELECT * FROM %s($1, $2, $3, $4)', tube_reader(owner))
        USING tbl::oid, query, path, 9223372036854775807
    LOOP
        IF line LIKE '!%' THEN
            failure := substr(line, 2);
            RAISE EXCEPTION USING ERRCODE = failure ->> 'sqlstate', MESSAGE = failure ->> 'message',
                DETAIL = failure ->> 'detail', HINT = failure ->> 'hint';
        END IF;
        RETURN NEXT line;
    END LOOP;
END
$_$;


CREATE TABLE tube.tube_attachment (
    tube text NOT NULL,
    tbl regclass NOT NULL,
    root regclass NOT NULL,
    shard integer NOT NULL,
    predicate text,
    routing text,
    path name[] NOT NULL,
    key name[] NOT NULL,
    given name[] NOT NULL,
    CONSTRAINT tube_attachment_shard_check CHECK ((shard >= 0))
);


COMMENT ON TABLE tube.tube_attachment IS 'replicad: which tables touch which tubes; use tube_table_ensure_attached()';


CREATE FUNCTION tube.tube_attached(tube text, tbl regclass, order_col text) RETURNS tube.tube_attachment
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


CREATE FUNCTION tube.tube_attachment_fault(tube text, tbl regclass) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    SET lock_timeout TO '50ms'
    AS $$
DECLARE
    t tube_registry := tube_find(tube);
    a tube_attachment;
BEGIN
    SELECT * INTO a FROM tube_attachment x WHERE x.tube = t.tube AND x.tbl = tube_attachment_fault.tbl;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    PERFORM tube_check_key(t, tbl, a.key);
    IF coalesce(t.predicate, a.predicate, a.routing) IS NOT NULL THEN
        PERFORM tube_reader_ensure(tbl);
        IF NOT has_function_privilege(tube_reader(tube_runs_as(tbl)) || '(oid, text, text, bigint)', 'EXECUTE') THEN
            RETURN NULL;  -- a right that this session lacks says nothing about the triggers
        END IF;
        PERFORM tube_check_expression(tbl, 'predicate', t.predicate, t.path);
        PERFORM tube_check_expression(tbl, 'predicate', a.predicate, t.path || a.path);
        PERFORM tube_check_expression(tbl, 'routing', a.routing, t.path || a.path);
    END IF;
    RETURN NULL;
EXCEPTION
    WHEN SQLSTATE 'RT005' THEN
        RETURN SQLERRM;
    WHEN insufficient_privilege THEN
        RETURN NULL;
    WHEN OTHERS THEN
        RETURN '';
END
$$;


CREATE FUNCTION tube.tube_attempt_put(tube text, partitions integer, partition integer, term bigint, note jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
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


CREATE FUNCTION tube.tube_backfill_begin(a tube.tube_attachment, start_seq text, order_col text, shard integer, shards integer[]) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


CREATE FUNCTION tube.tube_backfill_cancel(tube text, shard_from integer DEFAULT 0, shard_to integer DEFAULT 2147483647) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


COMMENT ON FUNCTION tube.tube_backfill_cancel(tube text, shard_from integer, shard_to integer) IS 'Cancels backfills of a range of shards';


CREATE FUNCTION tube.tube_backfill_chunk(step1 text, tube text, tbl regclass, order_col text, shard integer DEFAULT NULL::integer, max_ids integer DEFAULT 100000, insert_chunk_size integer DEFAULT 250, OUT ids bigint, OUT finished boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    SET row_security TO 'off'
    SET "TimeZone" TO 'UTC'
    SET "DateStyle" TO 'ISO, MDY'
    SET "IntervalStyle" TO 'postgres'
    SET extra_float_digits TO '1'
    SET bytea_output TO 'hex'
    SET xmlbinary TO 'base64'
    SET lc_monetary TO 'C'
    SET lc_numeric TO 'C'
    SET lc_time TO 'C'
    SET xmloption TO 'content'
    SET array_nulls TO 'on'
    SET transform_null_equals TO 'off'
    SET standard_conforming_strings TO 'on'
    SET backslash_quote TO 'safe_encoding'
    AS $$
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


CREATE FUNCTION tube.tube_backfill_control(tube text, type text, start_seq text, shards integer[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
BEGIN
    EXECUTE format('INSERT INTO %I (op, shard, ids, payload)'
        ' SELECT ''B'', s, ''{}'', $2 FROM unnest($1) AS s ORDER BY s', tube)
        USING shards, jsonb_build_object('type', type, 'start_seq', start_seq);
END
$_$;


CREATE TABLE tube.tube_backfill (
    tube text NOT NULL,
    tbl regclass NOT NULL,
    shard integer NOT NULL,
    start_seq text NOT NULL,
    order_col name NOT NULL,
    after_value text,
    after_key text[],
    shards integer[] NOT NULL,
    ids bigint DEFAULT 0 NOT NULL,
    approx_ids bigint,
    finished boolean DEFAULT false NOT NULL,
    started_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    updated_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE tube.tube_backfill IS 'replicad: progress of backfills';


CREATE FUNCTION tube.tube_backfill_page(a tube.tube_attachment, b tube.tube_backfill, max_ids integer, OUT ids text[], OUT shards integer[], OUT last_value text, OUT last_key text[]) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
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


CREATE FUNCTION tube.tube_backfill_progress(a tube.tube_attachment, more bigint, finished boolean) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
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


CREATE FUNCTION tube.tube_backfill_put(b tube.tube_backfill, ids text[], shards integer[], chunk integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


CREATE FUNCTION tube.tube_backfill_request(tube text, order_col text, shard_from integer, shard_to integer, queue boolean DEFAULT true) RETURNS TABLE(tbl text, shard integer, state text)
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


COMMENT ON FUNCTION tube.tube_backfill_request(tube text, order_col text, shard_from integer, shard_to integer, queue boolean) IS 'Asks for backfills of a range of shards, also behind running ones';


CREATE FUNCTION tube.tube_backfill_schedule(tube text, order_col text, shard_from integer, shard_to integer) RETURNS integer
    LANGUAGE sql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT count(*)::integer FROM tube_backfill_request($1, $2, $3, $4, false) r WHERE r.state = 'scheduled'
$_$;


COMMENT ON FUNCTION tube.tube_backfill_schedule(tube text, order_col text, shard_from integer, shard_to integer) IS 'Asks for backfills of a range of shards';


CREATE FUNCTION tube.tube_backfill_shards(tbl regclass, source text, path text) RETURNS integer[]
    LANGUAGE sql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT ARRAY(SELECT tube_as_owner(tbl, format('SELECT DISTINCT shard::text FROM (%s) AS stored', source), path)::integer)
$$;


CREATE FUNCTION tube.tube_backfill_source(a tube.tube_attachment, order_col text, home integer) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT format('SELECT %s AS shard, %s AS id, %I AS sort_key, %s FROM %s AS tube_row WHERE %s%s',
        coalesce(E'coalesce((\n' || a.routing || format(E'\n)::integer, %s) & 2147483647', home), home::text),
        tube_key_sql(a.key, t.keys), order_col,
        (SELECT string_agg(format('%I AS key_%s', k.name, k.n), ', ' ORDER BY k.n)
            FROM unnest(a.key) WITH ORDINALITY AS k (name, n)),
        tube_qualified(a.tbl), tube_key_present_sql(a.key), tube_where(t.predicate, a.predicate))
    FROM tube_find(a.tube) AS t
$$;


CREATE FUNCTION tube.tube_backfill_step1() RETURNS text
    LANGUAGE sql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT nextval('tube_seq')::text
$$;


COMMENT ON FUNCTION tube.tube_backfill_step1() IS 'First step of a backfill: note the sequence';


CREATE FUNCTION tube.tube_backfill_step2(timeout interval DEFAULT '00:01:00'::interval) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
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


COMMENT ON FUNCTION tube.tube_backfill_step2(timeout interval) IS 'Second step of a backfill: wait for transactions in flight';


CREATE FUNCTION tube.tube_backfill_step3(step1 text, tube text, tbl regclass, order_col text, shard integer DEFAULT NULL::integer, fetch_chunk_size integer DEFAULT 20000, insert_chunk_size integer DEFAULT 250) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    SET row_security TO 'off'
    SET "TimeZone" TO 'UTC'
    SET "DateStyle" TO 'ISO, MDY'
    SET "IntervalStyle" TO 'postgres'
    SET extra_float_digits TO '1'
    SET bytea_output TO 'hex'
    SET xmlbinary TO 'base64'
    SET lc_monetary TO 'C'
    SET lc_numeric TO 'C'
    SET lc_time TO 'C'
    SET xmloption TO 'content'
    SET array_nulls TO 'on'
    SET transform_null_equals TO 'off'
    SET standard_conforming_strings TO 'on'
    SET backslash_quote TO 'safe_encoding'
    AS $$
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


COMMENT ON FUNCTION tube.tube_backfill_step3(step1 text, tube text, tbl regclass, order_col text, shard integer, fetch_chunk_size integer, insert_chunk_size integer) IS 'Third step of a backfill: all ids of a table';


CREATE FUNCTION tube.tube_backfill_stop(tube text, tbl regclass) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


CREATE FUNCTION tube.tube_backfill_unschedule(tube text, tbl regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
BEGIN
    IF to_regclass(quote_ident(tube)) IS NOT NULL THEN
        EXECUTE tube_control_removal_sql(tube, 'p.payload ->> ''type'' = ''backfill_schedule'''
            ' AND (p.payload ->> ''oid'' = $1 OR p.payload ->> ''tbl'' = $2)') USING tbl::oid::text, tube_qualified(tbl);
    END IF;
END
$_$;


CREATE FUNCTION tube.tube_backfilling(tube text, tbl regclass, shard integer) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


CREATE FUNCTION tube.tube_backfills(of_tube text DEFAULT NULL::text) RETURNS TABLE(tube text, tbl text, shard integer, order_col text, state text, ids bigint, approx_ids bigint)
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
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


COMMENT ON FUNCTION tube.tube_backfills(of_tube text) IS 'Backfills that are scheduled or have begun';


CREATE FUNCTION tube.tube_belong(what text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = current_schema());
BEGIN
    IF keeper <> current_user AND keeper !~ '^pg_' AND pg_has_role(keeper, 'MEMBER') THEN
        EXECUTE format('ALTER %s OWNER TO %I', what, keeper);
    END IF;
END
$$;


CREATE FUNCTION tube.tube_check_expression(tbl regclass, what text, expression text, path name[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    their_path text := tube_path_text(path);
    -- WHERE allows neither aggregates nor sets, and a number no OR behind a bracket that the expression closes. The
    -- alias is the one that the triggers use.
    row_seen text := (
        SELECT format('(SELECT %s FROM %s) AS %I',
            string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) FILTER (WHERE a.attgenerated <> 'v'),
            tube_qualified(tbl), CASE WHEN bool_or(a.attgenerated = 'v') THEN 'a row without virtual columns' ELSE 'tube_row' END)
        FROM pg_attribute a WHERE a.attrelid = tbl AND a.attnum > 0 AND NOT a.attisdropped);
    trial text := format(E'SELECT ''''::text FROM %s WHERE num_nulls(\n%s\n) = 2 LIMIT 0', row_seen, expression);
    typing text := format(E'SELECT pg_typeof((SELECT (\n%s\n) FROM %s LIMIT 0))::oid::text', expression, row_seen);
    remedy text := format('write SQL on the columns of %s alone, without system columns and virtual generated columns, which '
        'triggers do not see; names were looked up along %s', tbl, their_path);
    kind regtype;
    refusal text;
BEGIN
    IF expression IS NULL THEN
        RETURN;
    ELSIF btrim(expression) = '' THEN
        PERFORM tube_refuse('RT005', format('the %s for table %s is empty', what, tbl), 'leave it out, or say NULL');
    END IF;
    BEGIN
        PERFORM tube_as_owner(tbl, trial, their_path);
        kind := (SELECT named::oid::regtype FROM tube_as_owner(tbl, typing, their_path) AS named);
    EXCEPTION WHEN OTHERS THEN
        IF left(SQLSTATE, 2) IN ('08', '40', '53', '55', '57', '58', 'XX') THEN
            RAISE;  -- a lock, a deadlock, the disk: nothing is wrong with the expression
        END IF;
        refusal := SQLERRM;
    END;
    IF refusal IS NULL AND what = 'predicate' AND kind <> 'boolean'::regtype THEN
        refusal := format('it yields %s instead of boolean', kind);
    ELSIF refusal IS NULL AND what = 'routing' AND kind NOT IN ('integer'::regtype, 'smallint'::regtype) THEN
        refusal := format('it yields %s instead of integer', kind);
        remedy := format('cast it, for example ((%s) %% 1024)::integer', expression);
    END IF;
    IF refusal IS NOT NULL THEN
        PERFORM tube_refuse('RT005',
            format('the %s %L does not fit table %s: %s', what, expression, tbl, refusal), remedy);
    END IF;
END
$$;


CREATE FUNCTION tube.tube_check_function(signature text) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM tube_refuse('RT005', format('function %s belongs to role %I, and role %I may neither replace nor drop it', p.oid::regprocedure,
            r.rolname, current_user),
        CASE WHEN r.rolsuper THEN 'do the same as a superuser' ELSE format('run: GRANT %I TO %I; or do the same as a superuser', r.rolname, current_user) END)
        FROM pg_proc p JOIN pg_roles r ON r.oid = p.proowner
        WHERE p.oid = to_regprocedure(signature) AND NOT pg_has_role(p.proowner, 'USAGE');
END
$$;


CREATE TABLE tube.tube_registry (
    tube text NOT NULL,
    partitions integer NOT NULL,
    predicate text,
    path name[] NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    on_fork text DEFAULT 'report'::text NOT NULL,
    keys text DEFAULT 'bigint'::text NOT NULL,
    paused_at timestamp with time zone,
    paused_why text,
    CONSTRAINT tube_registry_keys_check CHECK ((keys = ANY (ARRAY['bigint'::text, 'text'::text]))),
    CONSTRAINT tube_registry_on_fork_check CHECK ((on_fork = ANY (ARRAY['report'::text, 'backfill'::text]))),
    CONSTRAINT tube_registry_partitions_check CHECK (((partitions >= 1) AND (partitions <= 32768)))
);


COMMENT ON TABLE tube.tube_registry IS 'replicad: the tubes; use tube_ensure_exists() and tube_ensure_absent()';


CREATE FUNCTION tube.tube_check_key(t tube.tube_registry, tbl regclass, key name[]) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    types text[] := tube_key_types(tbl, key);
    named text := array_to_string(ARRAY(SELECT quote_ident(k.name) FROM unnest(key) WITH ORDINALITY AS k (name, n) ORDER BY k.n), ', ');
    fault text;
BEGIN
    IF coalesce(cardinality(key), 0) = 0 THEN
        fault := 'it has no primary key and no column called id';
    ELSIF array_position(types, NULL) IS NOT NULL THEN
        fault := format('it has no column called %I', key[array_position(types, NULL)]);
    ELSIF EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = tbl AND a.attname = ANY (key) AND a.attgenerated = 'v') THEN
        fault := format('its key (%s) has a virtual generated column, which triggers do not see', named);
    ELSIF (SELECT count(DISTINCT k) < count(*) FROM unnest(key) AS k) THEN
        fault := format('its key (%s) has a column twice', named);
    ELSIF cardinality(key) > 1 AND EXISTS (
            SELECT FROM pg_attribute a WHERE a.attrelid = tbl AND a.attname = ANY (key) AND NOT a.attnotnull) THEN
        fault := format('its key (%s) has a column that may be NULL, and a row with a NULL has no key', named);
    ELSE
        SELECT coalesce(format('its key is (%s), and ', named) || tube_key_fault(types), (
                SELECT format('its key in tube %L is (%s) and not (%s), and {table}_touch can have one only', a.tube,
                    array_to_string(a.key, ', '), named)
                FROM tube_attachment a
                WHERE a.tbl = tube_check_key.tbl AND a.tube <> t.tube AND a.key <> tube_check_key.key LIMIT 1))
            INTO fault;
    END IF;
    IF fault IS NOT NULL THEN
        PERFORM tube_refuse('RT005', format('table %s cannot be attached to tube %L: %s', tbl, t.tube, fault),
            'name the columns that identify a row as the key: --key COLUMN[,COLUMN], or key => ''{COLUMN,COLUMN}'' in SQL');
    ELSIF tube_key_kind(types) = 'text' AND t.keys = 'bigint' THEN
        PERFORM tube_refuse('RT005', format('table %s cannot be attached to tube %L, which has keys of kind bigint: its key '
                '(%s) is %s', tbl, t.tube, named, array_to_string(types, ', ')),
            'attach it to a tube with keys of kind text: replicad tubes create TUBE --keys text. Or name one integer column '
            'as the key: --key COLUMN');
    END IF;
END
$$;


CREATE FUNCTION tube.tube_check_name(tube text) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    taken name;
BEGIN
    IF tube IS NULL OR tube = '' OR octet_length(tube) > 50 OR tube ~ '[[:space:][:cntrl:]]' THEN
        PERFORM tube_refuse('RT008',
            format('a tube cannot be called %s: a name has 1 to 50 bytes, no white space and no control characters',
                coalesce(quote_literal(left(tube, 100)), 'NULL')),
            'choose another name; letters, digits, _ and - read best');
    END IF;
    IF EXISTS (SELECT FROM tube_registry r WHERE r.tube = tube_check_name.tube) THEN
        RETURN;
    END IF;
    SELECT found.name INTO taken FROM (
        SELECT c.relname FROM pg_class c WHERE c.relnamespace = quote_ident(current_schema())::regnamespace
        UNION ALL
        SELECT p.proname FROM pg_proc p WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
    ) AS found (name)
        WHERE found.name IN (tube, tube_object_name(tube, '_touch'), tube_object_name(tube, '_trigger'));
    IF FOUND THEN
        PERFORM tube_refuse('RT005',
            format('tube %L needs the name %I.%I, which is taken', tube, current_schema(), taken),
            'choose another name for the tube, or rename what has it');
    END IF;
END
$$;


CREATE FUNCTION tube.tube_check_partition(partitions integer, partition integer) RETURNS void
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    IF (partitions BETWEEN 1 AND 32768 AND partition BETWEEN 0 AND partitions - 1) IS NOT TRUE THEN
        PERFORM tube_refuse('RT005', format('%s/%s is no partition', partition, partitions),
            'a partition is written 0/2, 1/2: counted from 0, below their number');
    END IF;
END
$$;


CREATE FUNCTION tube.tube_check_partitions(tube text, partitions integer) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    present integer := (tube_find(tube)).partitions;
BEGIN
    IF present IS DISTINCT FROM partitions THEN
        PERFORM tube_refuse('RT003', format('tube %L has %s partitions and not %s', tube, present, partitions),
            format('go on with %s partitions', present));
    END IF;
    RETURN true;
END
$$;


CREATE FUNCTION tube.tube_check_table(tube text, tbl regclass) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    fault text;
BEGIN
    SELECT CASE
            WHEN c.relnamespace = quote_ident(current_schema())::regnamespace AND (
                c.relname IN (SELECT r.tube FROM tube_registry r) OR c.relname IN ('tube_registry', 'tube_attachment',
                    'tube_lease', 'tube_parked', 'tube_backfill', 'tube_report', 'tube_shard', 'tube_low',
                    'tube_attempt', 'tube_own_shard', 'tube_worker', 'tube_version')
            ) THEN 'it is a table of the tubes themselves'
            WHEN c.relpersistence = 't' THEN 'it is temporary'
            WHEN c.relkind NOT IN ('r', 'p') THEN 'it is no ordinary or partitioned table'
            WHEN c.oid <> tube_check_table.tbl AND a.root = a.tbl THEN 'it is attached by itself'
            WHEN a.root <> tube_check_table.tbl THEN format('it is attached through %s', a.root)
            WHEN NOT has_table_privilege(f.proowner, c.oid, 'SELECT') THEN
                format('%s, who owns these functions, may not read it; run: GRANT %s TO %1$s', f.proowner::regrole, CASE
                    WHEN (SELECT r.rolsuper FROM pg_roles r WHERE r.oid = c.relowner) THEN format('SELECT ON %s', c.oid::regclass)
                    ELSE c.relowner::regrole::text END)
        END || CASE WHEN c.oid <> tube_check_table.tbl THEN format(' (partition %s)', c.oid::regclass) ELSE '' END
        INTO fault
        FROM tube_members(tbl) m JOIN pg_class c ON c.oid = m
            JOIN pg_proc f ON f.oid = to_regprocedure('tube_truncate_trigger()')
            LEFT JOIN tube_attachment a ON a.tube = tube_check_table.tube AND a.tbl = c.oid
        ORDER BY 1 LIMIT 1;
    IF fault IS NOT NULL THEN
        PERFORM tube_refuse('RT005', format('table %s cannot be attached to tube %L: %s', tbl, tube, fault),
            'a table of a tube is ordinary or partitioned, may be read by the owner of the tubes, and is attached to a tube'
            ' once');
    END IF;
END
$_$;


CREATE FUNCTION tube.tube_check_touch(shard integer, op character, chunk_size integer) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    IF shard IS NULL OR shard < 0 THEN
        PERFORM tube_refuse('RT005',
            format('shard %s: a shard is a whole number from 0 up', coalesce(shard::text, 'NULL')),
            'give the number of the shard that the ids belong to');
    ELSIF op IS NULL OR op NOT IN ('I', 'U', 'D', 'T', 'B') THEN
        PERFORM tube_refuse('RT005', format('there is no operation %L', op),
            'I is insert, U update, D delete, T touch, B backfill');
    ELSIF chunk_size IS NULL OR chunk_size NOT BETWEEN 1 AND 900 THEN
        PERFORM tube_refuse('RT005', format('pods of %s ids: they have 1 to 900', coalesce(chunk_size::text, 'NULL')),
            'the default is 250');
    END IF;
END
$$;


CREATE FUNCTION tube.tube_check_writer(tbl oid) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    me name := CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role') END;
BEGIN
    IF (has_any_column_privilege(me, tbl, 'INSERT, UPDATE') OR has_table_privilege(me, tbl, 'DELETE')) IS NOT TRUE THEN
        RAISE EXCEPTION USING ERRCODE = '42501',
            MESSAGE = format('role %I may not write table %s, so it may not touch its ids', me, tube_qualified(tbl)),
            HINT = format('run: GRANT UPDATE ON %s TO %I', tube_qualified(tbl), me);
    END IF;
END
$$;


CREATE FUNCTION tube.tube_columns_sql(tube text, partitions integer, partition integer, term bigint, backfill boolean, after bigint, upto bigint, payload boolean DEFAULT false) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    t tube_registry := tube_find(tube);
    range text;
    columns text := 'count(*)::integer AS pods, max(seq) AS last,'
        ' string_agg(int8send(seq) || int4send(shard) || int4send(cardinality(ids)) || timestamptz_send(ts)'
        ' || int4send(ascii(op)), '''') AS fixed, string_agg(substring(array_send(ids) FROM 21), '''') AS ids';
    source text := 'SELECT * FROM (%2$s) AS half WHERE seq > %%s LIMIT $2';
    fence text := format('%I.tube_lease_check(%L, %s, %s, %s)', current_schema(), tube, partitions, partition, term);
    piece text;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    range := tube_range_sql(t, partitions, partition, backfill, after, upto, NULL, true);
    IF t.keys = 'text' THEN
        columns := columns || ', true AS texts';
    END IF;
    IF payload THEN
        columns := columns || ', string_agg(int4send(coalesce(octet_length(body), -1)), '''') AS sizes,'
            ' string_agg(body, '''') AS bodies';
        source := 'SELECT * FROM (SELECT texts.*, sum('
            || CASE t.keys WHEN 'bigint' THEN '12 * cardinality(ids)' ELSE 'pg_column_size(ids)' END
            || ' + coalesce(octet_length(body), 0)) OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before'
            ' FROM (SELECT half.*, convert_to(half.payload::text, ''UTF8'') AS body FROM (' || source || ') AS half'
            ') AS texts) AS measured WHERE coalesce(before, 0) < $3';
    END IF;
    piece := format('SELECT %1$s FROM (' || source || ') AS pods', columns, replace(range, '%', '%%'));
    RETURN format(
        'WITH RECURSIVE piece AS ('
        'SELECT 1 AS step, first.* FROM (%s WHERE %s) AS first'
        ' UNION ALL SELECT piece.step + 1, next.* FROM piece, LATERAL (%s) AS next'
        ' WHERE piece.last < %s AND piece.step < 16%s'
        ') SELECT * FROM piece WHERE pods > 0',
        format(piece, '$1'), fence, format(piece, 'piece.last'), upto,
        CASE WHEN payload THEN ' AND coalesce(octet_length(piece.bodies), 0) <= $3' END);
END
$_$;


CREATE TABLE tube.tube_generation (
    number integer NOT NULL,
    id text NOT NULL,
    reason text NOT NULL,
    shared jsonb NOT NULL,
    shared_at timestamp with time zone,
    after_term bigint NOT NULL,
    incarnation text NOT NULL,
    run text NOT NULL,
    sequence oid NOT NULL,
    file text NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE tube.tube_generation IS 'replicad: the generations of the history of tubes';


CREATE FUNCTION tube.tube_continue(unattended boolean DEFAULT false) RETURNS tube.tube_generation
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    g tube_generation := tube_generation_now();
    old text[];
    present text[];
    present_id text;
BEGIN
    IF g.id = tube_generation_valid() THEN
        RETURN g;
    END IF;
    old := string_to_array(g.incarnation, '/');
    present := string_to_array(tube_incarnation(), '/');
    IF cardinality(present) = 1 THEN
        PERFORM tube_refuse('RT009', 'this server is a standby', 'connect to its primary');
    END IF;
    present_id := tube_fork(g.id, CASE
        WHEN g.id IS NULL THEN 'first'
        WHEN old[1] <> present[1] THEN 'other_server'
        WHEN old[2] <> present[2] THEN 'promoted'
        WHEN old[3] <> present[3] OR g.sequence <> 'tube_seq'::regclass::oid THEN 'restored'
        WHEN (old[4], old[5]) IS DISTINCT FROM (present[4], present[5]) THEN 'restarted'
        ELSE 'sequence_changed' END);
    g := tube_generation_now();
    IF unattended AND g.id = present_id AND g.reason IN ('other_server', 'promoted', 'restored') THEN
        PERFORM tube_miss(r, 'fork ' || g.id, coalesce((g.shared ->> r.tube)::bigint, 0), NULL, coalesce(g.shared_at, g.created_at))
        FROM tube_registry r ORDER BY r.tube;
    END IF;
    RETURN g;
END
$$;


CREATE FUNCTION tube.tube_control_removal_sql(tube text, condition text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT format('DELETE FROM %1$I WHERE ctid = ANY (ARRAY('
        'SELECT p.ctid FROM %1$I p WHERE cardinality(p.ids) = 0 AND %2$s FOR UPDATE SKIP LOCKED))', tube, condition)
$_$;


CREATE FUNCTION tube.tube_early_sql(tube text, partitions integer) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT format($sql$
        SELECT pods.backfill, pods.seq, %5$s AS line
        FROM (
            SELECT FROM %1$s AS l WHERE l.tube = %3$L AND l.term = $2::bigint
                AND l.generation = %7$s AND l.generation = coalesce($7::text, l.generation)
                AND %4$s %% l.partitions = 0 AND $1::integer %% l.partitions = l.partition
                AND EXISTS (SELECT FROM %2$s AS r WHERE r.tube = %3$L AND r.partitions = %4$s)
        ) AS fence
        LEFT JOIN LATERAL (%6$s LIMIT $5::integer) AS pods ON true
        ORDER BY pods.backfill, pods.seq$sql$,
        tube_relation('tube_lease'), tube_relation('tube_registry'), tube, partitions,
        tube_line_sql(tube, partitions, '$1::integer'),
        (SELECT string_agg(format($sql$(
                SELECT %1$L::boolean AS backfill, seq, op, shard, ids, ts, payload
                FROM %2$s
                WHERE (shard %% %3$s) = $1::integer AND (op = 'B')::integer = %4$s AND seq > $3::bigint
                    AND cardinality(ids) > 0 AND seq <> ALL ($4::bigint[])%5$s
                ORDER BY seq LIMIT $5::integer)$sql$,
            half.backfill, tube_relation(tube), partitions, half.backfill::integer,
            CASE WHEN half.backfill THEN ' AND $6::boolean' END),
            ' UNION ALL ' ORDER BY half.backfill)
        FROM (VALUES (false), (true)) AS half (backfill)),
        tube_generation_sql())
$_$;


CREATE FUNCTION tube.tube_ensure_absent(tube text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


COMMENT ON FUNCTION tube.tube_ensure_absent(tube text) IS 'Detaches all tables of a tube and drops it';


CREATE FUNCTION tube.tube_ensure_exists(tube text, partitions integer DEFAULT 1, predicate text DEFAULT NULL::text, keys text DEFAULT NULL::text, path name[] DEFAULT current_schemas(false)) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
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


COMMENT ON FUNCTION tube.tube_ensure_exists(tube text, partitions integer, predicate text, keys text, path name[]) IS 'Creates a tube, or alters it to be as asked';


CREATE FUNCTION tube.tube_fault(tube text) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    SET lock_timeout TO '200ms'
    AS $$
BEGIN
    EXECUTE format('SELECT seq::bigint, (op = ''B'')::integer, shard::integer, cardinality(ids), payload ->> ''type'', ts'
        ' FROM %s LIMIT 0', tube_relation(tube));
    RETURN NULL;
EXCEPTION WHEN OTHERS THEN
    RETURN SQLERRM;
END
$$;


CREATE FUNCTION tube.tube_few_sql(tube text, op text, rows text, rows_before text) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT tube_noted_sql(tube, format($sql$
        INSERT INTO %1$s (op, shard, ids)
        SELECT %2$s, TG_ARGV[0]::integer, few.ids
        FROM (SELECT ARRAY(%3$s LIMIT 17) AS ids%4$s OFFSET 0) AS few
        WHERE cardinality(few.ids) BETWEEN 1 AND 16%5$s;
        IF FOUND THEN
            RETURN NULL;
        END IF;
    $sql$, tube_relation(tube), op, rows,
        ', ARRAY(' || rows_before || ' LIMIT 17) AS ids_before',
        CASE WHEN rows_before IS NOT NULL THEN ' AND few.ids = few.ids_before' END))
$_$;


CREATE FUNCTION tube.tube_figures(t tube.tube_registry, exact integer) RETURNS TABLE(partition integer, backfill boolean, pods bigint, ids bigint, control bigint, min_seq bigint, max_seq bigint, min_ts timestamp with time zone, max_ts timestamp with time zone, estimated boolean)
    LANGUAGE plpgsql STABLE STRICT
    SET search_path TO 'tube', 'pg_temp'
    SET jit TO 'off'
    AS $_$
DECLARE
    pages bigint := pg_relation_size(tube_relation(t.tube)) / current_setting('block_size')::integer;
    large boolean := pages > greatest(exact / 4, 200);
    share numeric := CASE WHEN large THEN 100 * greatest(exact / 10, 200) / pages::numeric ELSE 100 END;  -- per cent
    few bigint := CASE WHEN large THEN greatest(exact / 2 / t.partitions, 1) ELSE 9223372036854775806 END;
BEGIN
    RETURN QUERY EXECUTE format($sql$
        WITH parts AS MATERIALIZED (
            SELECT numbers.p, kinds.k, tube_low_of(%6$L, %2$s, numbers.p, kinds.k = 1) AS low
            FROM generate_series(0, %2$s - 1) AS numbers (p) CROSS JOIN (VALUES (0), (1)) AS kinds (k)
        ), counted AS MATERIALIZED (
            SELECT parts.p, parts.k, few.pods, few.ids
            FROM parts CROSS JOIN LATERAL (
                SELECT count(*) AS pods, sum(cardinality(x.ids)) AS ids FROM (
                    SELECT x.ids FROM %1$s AS x
                    WHERE (x.shard %% %2$s) = parts.p AND ((x.op = 'B')::integer) = parts.k
                        AND x.seq > parts.low AND x.seq <= 9223372036854775807
                    ORDER BY x.seq LIMIT %7$s + 1
                ) AS x
            ) AS few
            WHERE %5$L
        ), scanned AS MATERIALIZED (
            SELECT shard %% %2$s AS p, (op = 'B')::integer AS k, count(*) * 100 / %4$s AS pods,
                sum(cardinality(ids)) * 100 / %4$s AS ids
            FROM %1$s %3$s
            WHERE NOT %5$L OR (SELECT bool_or(counted.pods > %7$s) FROM counted)
            GROUP BY 1, 2
        ), controls AS MATERIALIZED (
            SELECT shard %% %2$s AS p, (op = 'B')::integer AS k, count(*) AS pods
            FROM %1$s WHERE cardinality(ids) = 0 GROUP BY 1, 2
        )
        SELECT parts.p, parts.k = 1,
            CASE WHEN oldest.seq IS NULL THEN 0 WHEN c.pods <= %7$s THEN c.pods ELSE greatest(s.pods, c.pods, 1) END::bigint,
            CASE WHEN oldest.seq IS NULL THEN 0 WHEN c.pods <= %7$s THEN c.ids
                ELSE greatest(s.ids, c.ids, 0) END::bigint,
            coalesce(o.pods, 0), oldest.seq, newest.seq, oldest.ts, newest.ts, coalesce(c.pods > %7$s, false)
        FROM parts
        LEFT JOIN counted AS c ON c.p = parts.p AND c.k = parts.k
        LEFT JOIN scanned AS s ON s.p = parts.p AND s.k = parts.k
        LEFT JOIN controls AS o ON o.p = parts.p AND o.k = parts.k
        LEFT JOIN LATERAL (
            SELECT x.seq, x.ts FROM %1$s AS x
            WHERE coalesce(c.pods, s.pods) > 0
                AND (x.shard %% %2$s) = parts.p AND ((x.op = 'B')::integer) = parts.k
                AND x.seq > parts.low AND x.seq <= 9223372036854775807
            ORDER BY x.seq LIMIT 1
        ) AS oldest ON true
        LEFT JOIN LATERAL (
            SELECT x.seq, x.ts FROM %1$s AS x
            WHERE oldest.seq IS NOT NULL AND (x.shard %% %2$s) = parts.p AND ((x.op = 'B')::integer) = parts.k
                AND x.seq > parts.low AND x.seq <= 9223372036854775807
            ORDER BY x.seq DESC LIMIT 1
        ) AS newest ON true
        ORDER BY 1, 2
    $sql$, tube_relation(t.tube), t.partitions,
        CASE WHEN large THEN format('TABLESAMPLE SYSTEM (%s)', share) END, share, large, t.tube, few);
END
$_$;


CREATE FUNCTION tube.tube_find(tube text) RETURNS tube.tube_registry
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    found_tube tube_registry;
BEGIN
    SELECT * INTO found_tube FROM tube_registry r WHERE r.tube = tube_find.tube;
    IF NOT FOUND THEN
        PERFORM tube_refuse('RT001', format('there is no tube %L', tube),
            format('SELECT * FROM %I.tube_list() shows those there are', current_schema()));
    END IF;
    RETURN found_tube;
END
$$;


CREATE FUNCTION tube.tube_fixed() RETURNS text[]
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT ARRAY['TimeZone=UTC', 'DateStyle=ISO, MDY', 'IntervalStyle=postgres', 'extra_float_digits=1', 'bytea_output=hex',
        'xmlbinary=base64', 'lc_monetary=C', 'lc_numeric=C', 'lc_time=C', 'xmloption=content', 'array_nulls=on',
        'transform_null_equals=off', 'standard_conforming_strings=on', 'backslash_quote=safe_encoding'
]
$$;


CREATE FUNCTION tube.tube_fixed_sql() RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT string_agg(format(' SET %s = %L', split_part(setting, '=', 1), split_part(setting, '=', 2)), '')
    FROM unnest(tube_fixed()) AS setting
$$;


CREATE FUNCTION tube.tube_fork(seen text, why text) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    g tube_generation;
    noted tube_noted;
    new_id text := left(md5(gen_random_uuid()::text), 16);
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('replicad tube generations ' || current_schema()));
    g := tube_generation_now();
    IF g.id IS DISTINCT FROM seen THEN
        RETURN g.id;
    END IF;
    PERFORM FROM tube_generation x WHERE x.number = g.number FOR UPDATE;  -- waits for those who go on in it
    IF NOT (SELECT bool_and(i.indisvalid) AND count(*) = 2 FROM pg_index i
            WHERE i.indrelid IN ('tube_generation'::regclass, 'tube_lease'::regclass) AND i.indisprimary) THEN
        PERFORM tube_refuse('RT009', 'a dump is being restored into this database: its tubes have no primary keys yet',
            'wait until that is done; restore in one transaction, or while no daemon runs');
    END IF;
    DELETE FROM tube_low;
    IF why IN ('other_server', 'restored') THEN
        DELETE FROM tube_trigger_seen;  -- a dump makes the triggers anew
        DELETE FROM tube_attempt;  -- of processes that have ended long ago
    END IF;
    IF g.id IS NOT NULL THEN
        PERFORM tube_later('tube_seq', 1000000), tube_later('tube_term_seq', 250);
    END IF;
    SELECT * INTO noted FROM tube_noted n;
    IF why IN ('ids_went_back', 'sequence_changed') THEN
        noted := NULL;
    END IF;
    DELETE FROM tube_generation x WHERE x.number <= g.number - 999;
    INSERT INTO tube_generation (number, id, reason, shared, shared_at, after_term, incarnation, run, sequence, file)
        VALUES (coalesce(g.number, 0) + 1, new_id, why,
            coalesce(noted.positions, '{}'), noted.noted_at,
            coalesce(pg_sequence_last_value('tube_term_seq'), 0) << 24 | 16777215,
            tube_incarnation(), tube_run(), 'tube_seq'::regclass, pg_relation_filepath('tube_seq'));
    RETURN new_id;
END
$$;


CREATE FUNCTION tube.tube_free_shard(tube text, tbl regclass) RETURNS integer
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT min(n)::integer
    FROM generate_series(0, (SELECT count(*) FROM tube_attachment) + (SELECT count(*) FROM tube_own_shard)) n
    WHERE NOT EXISTS (SELECT FROM tube_attachment a
            WHERE a.tube = tube_free_shard.tube AND a.root <> tube_free_shard.tbl AND a.shard = n)
        AND NOT EXISTS (SELECT FROM tube_own_shard o
            WHERE o.tube = tube_free_shard.tube AND o.tbl <> tube_free_shard.tbl AND o.shard = n)
$$;


CREATE FUNCTION tube.tube_generation_check(in_generation text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM FROM tube_generation g WHERE g.id = in_generation FOR KEY SHARE;  -- waits for a fork that is under way
    IF in_generation IS DISTINCT FROM tube_generation_valid() THEN
        PERFORM tube_refuse('RT002', 'history forked', 'read the present generation');
    END IF;
END
$$;


CREATE FUNCTION tube.tube_generation_now() RETURNS tube.tube_generation
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT g FROM tube_generation g ORDER BY g.number DESC LIMIT 1
$$;


CREATE FUNCTION tube.tube_generation_sql() RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT format($sql$(SELECT CASE WHEN g.sequence = %L::regclass::oid AND g.file = pg_relation_filepath(g.sequence)
            AND g.run = current_setting('replicad.tube_run', true) THEN g.id ELSE %s() END
        FROM %s AS g ORDER BY g.number DESC LIMIT 1)$sql$,
        tube_relation('tube_seq'), tube_relation('tube_generation_valid'), tube_relation('tube_generation'))
$_$;


CREATE FUNCTION tube.tube_generation_valid() RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    g tube_generation;
BEGIN
    SELECT * INTO g FROM tube_generation x ORDER BY x.number DESC LIMIT 1;
    IF g.sequence = 'tube_seq'::regclass::oid AND g.file = pg_relation_filepath(g.sequence)
        AND (g.run = current_setting('replicad.tube_run', true) OR g.run = set_config('replicad.tube_run', tube_run(), false))
    THEN
        RETURN g.id;
    END IF;
    RETURN NULL;
END
$$;


CREATE FUNCTION tube.tube_give(signature text, owner oid) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    role name := pg_get_userbyid(owner);
    granted boolean := has_schema_privilege(owner, current_schema(), 'CREATE');
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = current_schema());
BEGIN
    IF NOT granted THEN
        EXECUTE format('GRANT CREATE ON SCHEMA %I TO %I', current_schema(), role);
    END IF;
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', signature, role);
    IF NOT granted THEN
        EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM %I', current_schema(), role);
    END IF;
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', signature, keeper);
EXCEPTION WHEN insufficient_privilege THEN
    PERFORM tube_refuse('RT005', format('code on a table of role %I runs with the rights of that role alone, and role %I may not '
            'prepare this: %s', role, current_user, SQLERRM),
        format('run: GRANT %I TO %I, and call this as %2$I or as a superuser', role, keeper));
END
$_$;


CREATE FUNCTION tube.tube_incarnation() RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT CASE WHEN pg_is_in_recovery() THEN 'standby' ELSE concat_ws('/',
        (SELECT c.system_identifier FROM pg_control_system() c),
        left(pg_walfile_name(pg_current_wal_lsn()), 8),
        (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()),
        extract(epoch FROM pg_postmaster_start_time()),
        extract(epoch FROM least((SELECT a.stats_reset FROM pg_stat_get_archiver() a),
            pg_stat_get_bgwriter_stat_reset_time(), (SELECT w.stats_reset FROM pg_stat_get_wal() w)))) END
$$;


CREATE FUNCTION tube.tube_index_ensure(tube text, partitions integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


CREATE FUNCTION tube.tube_infer_shard(tbl regclass) RETURNS integer
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT CASE WHEN digits::numeric <= 2147483647 THEN digits::numeric::integer END
    FROM (
        SELECT substring(n.nspname FROM '[0-9]+$') AS digits
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl
    ) AS schema_name
$_$;


CREATE FUNCTION tube.tube_insert_numbered(tubes text[], query text, path text, shard integer, op character, total bigint, every integer, chunk integer) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    SET jit TO 'off'
    AS $_$
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
$_$;


CREATE FUNCTION tube.tube_insert_sql(tube text, op text, shard text, rows text, chunk text DEFAULT '250'::text, routed boolean DEFAULT false) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT CASE WHEN routed THEN format($sql$
        INSERT INTO %1$s (op, shard, ids)
        SELECT %2$s, placed.shard, array_agg(placed.id ORDER BY placed.n)
        FROM (
            SELECT numbered.shard, numbered.id,
                row_number() OVER (PARTITION BY numbered.shard ORDER BY numbered.n) - 1 AS n
            FROM (
                SELECT coalesce(touched.tube_shard, %3$s) & 2147483647 AS shard, touched.id, row_number() OVER () AS n
                FROM (%4$s) AS touched
            ) AS numbered
        ) AS placed
        GROUP BY placed.shard, placed.n / %5$s ORDER BY placed.shard, placed.n / %5$s
    $sql$, tube_relation(tube), op, shard, rows, chunk)
    ELSE format($sql$
        INSERT INTO %1$s (op, shard, ids)
        SELECT %2$s, %3$s, array_agg(numbered.id ORDER BY numbered.n)
        FROM (SELECT touched.id, row_number() OVER () - 1 AS n FROM (%4$s) AS touched) AS numbered
        GROUP BY numbered.n / %5$s ORDER BY numbered.n / %5$s
    $sql$, tube_relation(tube), op, shard, rows, chunk)
    END
$_$;


CREATE FUNCTION tube.tube_keep(tube text) RETURNS tube.tube_registry
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM FROM tube_registry r WHERE r.tube = tube_keep.tube FOR KEY SHARE;
    RETURN tube_find(tube);
END
$$;


CREATE FUNCTION tube.tube_key_among_sql(key name[], types text[], keys text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT CASE
        WHEN tube_key_kind(types) = 'bigint' THEN format('%I = ANY (%s)', key[1], keys)
        WHEN cardinality(key) = 1 THEN format('%I = ANY (%s::%s[])', key[1], keys, types[1])
        ELSE (
            SELECT format('(%s) IN (SELECT %s FROM unnest(%s) AS given_key)', string_agg(quote_ident(k.name), ', ' ORDER BY k.n),
                string_agg(format('(given_key::json ->> %s)::%s', k.n - 1, k.type), ', ' ORDER BY k.n), keys)
            FROM unnest(key, types) WITH ORDINALITY AS k (name, type, n))
    END
$$;


CREATE FUNCTION tube.tube_key_default(tbl regclass, before name[]) RETURNS name[]
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT coalesce(
        CASE WHEN array_position(tube_key_types(tbl, before), NULL) IS NULL THEN before END,
        (SELECT array_agg(a.attname ORDER BY k.n)
            FROM pg_index i, unnest(i.indkey::smallint[]) WITH ORDINALITY AS k (number, n)
                JOIN pg_attribute a ON a.attnum = k.number
            WHERE i.indrelid = tbl AND i.indisprimary AND a.attrelid = tbl AND k.n <= i.indnkeyatts),
        (SELECT ARRAY[a.attname] FROM pg_attribute a
            WHERE a.attrelid = tbl AND a.attname = 'id' AND a.attnum > 0 AND NOT a.attisdropped))
$$;


CREATE FUNCTION tube.tube_key_fault(types text[]) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    type text;
BEGIN
    FOREACH type IN ARRAY types LOOP
        BEGIN
            EXECUTE format('SELECT FROM (SELECT NULL::%s AS k) AS one WHERE k > NULL::%1$s ORDER BY k', type);
        EXCEPTION WHEN undefined_function OR datatype_mismatch OR ambiguous_function THEN
            RETURN format('its type %s has no order', type);
        END;
    END LOOP;
    RETURN NULL;
END
$_$;


CREATE FUNCTION tube.tube_key_kind(types text[]) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT CASE WHEN cardinality(types) = 1 AND types[1] IN ('smallint', 'integer', 'bigint') THEN 'bigint' ELSE 'text' END
$$;


CREATE FUNCTION tube.tube_key_present_sql(key name[]) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT string_agg(format('%I IS NOT NULL', k.name), ' AND ' ORDER BY k.n)
    FROM unnest(key) WITH ORDINALITY AS k (name, n)
$$;


CREATE FUNCTION tube.tube_key_sql(key name[], kind text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT CASE
        WHEN kind = 'bigint' THEN format('%I::bigint', key[1])
        WHEN cardinality(key) = 1 THEN format('%I::text', key[1])
        ELSE format('json_build_array(%s)::text',
            (SELECT string_agg(format('%I::text', k.name), ', ' ORDER BY k.n) FROM unnest(key) WITH ORDINALITY AS k (name, n)))
    END
$$;


CREATE FUNCTION tube.tube_key_text_sql(types text[], key text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT CASE WHEN cardinality(types) = 1 THEN format('%s::%s::text', key, types[1])
        ELSE format('json_build_array(%s)::text',
            (SELECT string_agg(format('(%s::json ->> %s)::%s::text', key, k.n - 1, k.type), ', ' ORDER BY k.n)
                FROM unnest(types) WITH ORDINALITY AS k (type, n)))
    END
$$;


CREATE FUNCTION tube.tube_key_types(tbl regclass, key name[]) RETURNS text[]
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    types text[];
    one name;
    type oid;
    base oid;
BEGIN
    FOREACH one IN ARRAY coalesce(key, '{}') LOOP
        SELECT a.atttypid INTO type FROM pg_attribute a
            WHERE a.attrelid = tbl AND a.attname = one AND a.attnum > 0 AND NOT a.attisdropped;
        LOOP
            SELECT d.typbasetype INTO base FROM pg_type d WHERE d.oid = type AND d.typtype = 'd';
            EXIT WHEN NOT FOUND;
            type := base;
        END LOOP;
        types := types || format_type(type, -1);
    END LOOP;
    RETURN types;
END
$$;


CREATE FUNCTION tube.tube_keys_ensure(t tube.tube_registry, wanted text) RETURNS tube.tube_registry
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
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


CREATE FUNCTION tube.tube_later(sequence regclass, a_second integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    present bigint := pg_sequence_last_value(sequence);
    later bigint := (extract(epoch FROM clock_timestamp()) - 1735689600) * a_second;
BEGIN
    IF NOT has_sequence_privilege(sequence, 'UPDATE') THEN
        RAISE EXCEPTION USING ERRCODE = '42501',
            MESSAGE = format('sequence %s cannot be moved beyond the numbers of lost pods and leases after a fork', sequence),
            HINT = format('run: GRANT UPDATE ON SEQUENCE %s TO %I', sequence, current_user);
    END IF;
    IF present < later THEN
        PERFORM setval(sequence, later);
    END IF;
END
$$;


CREATE FUNCTION tube.tube_lease_check(tube text, partitions integer, partition integer, term bigint, in_generation text DEFAULT NULL::text) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    valid text := tube_generation_valid();
BEGIN
    PERFORM FROM tube_lease l
        WHERE l.tube = tube_lease_check.tube AND l.term = tube_lease_check.term
            AND l.generation = valid AND valid = coalesce(in_generation, valid)
            AND tube_lease_check.partitions % l.partitions = 0
            AND tube_lease_check.partition % l.partitions = l.partition;
    IF NOT FOUND THEN
        PERFORM tube_lease_lost(tube, partitions, partition, term);
    END IF;
    RETURN true;
END
$$;


CREATE FUNCTION tube.tube_lease_claim(tube text, partitions integer, partition integer, holder text, ttl interval, expired bigint[], OUT term bigint, OUT beat bigint, OUT generation text) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    present text := (tube_continue()).id;
    t tube_registry;
    other tube_lease;
BEGIN
    PERFORM tube_generation_check(present);
    t := tube_lock(tube);
    PERFORM tube_check_partition(partitions, partition);
    IF partitions <> 1 THEN
        PERFORM tube_check_partitions(tube, partitions);
    END IF;
    IF coalesce(holder, '') = '' OR coalesce(ttl, '0') <= '0'::interval THEN
        PERFORM tube_refuse('RT005', 'a lease has a holder with a name, and a time to live above 0', 'give both');
    END IF;
    DELETE FROM tube_lease l WHERE l.tube = t.tube AND l.beat = ANY (expired)
        AND l.partition % gcd(l.partitions, tube_lease_claim.partitions)
            = tube_lease_claim.partition % gcd(l.partitions, tube_lease_claim.partitions);
    SELECT * INTO other FROM tube_lease l WHERE l.tube = t.tube
        AND l.partition % gcd(l.partitions, tube_lease_claim.partitions)
            = tube_lease_claim.partition % gcd(l.partitions, tube_lease_claim.partitions)
        AND (l.holder, l.partitions, l.partition)
            IS DISTINCT FROM (tube_lease_claim.holder, tube_lease_claim.partitions, tube_lease_claim.partition)
        LIMIT 1;
    IF FOUND THEN
        PERFORM tube_refuse('RT004',
            format('partition %s/%s of tube %L is held by %s', other.partition, other.partitions, t.tube, other.holder),
            'wait until it is released, or until its time to live has passed without a sign of life');
    END IF;
    INSERT INTO tube_lease AS l (tube, partitions, partition, holder, term, beat, ttl, generation)
        VALUES (t.tube, partitions, partition, holder, tube_term_next(), nextval('tube_term_seq'), ttl, present)
        ON CONFLICT ON CONSTRAINT tube_lease_pkey DO UPDATE SET beat = excluded.beat, ttl = excluded.ttl,
            term = CASE WHEN l.generation = present THEN l.term ELSE excluded.term END, generation = present
        RETURNING l.term, l.beat, l.generation INTO term, beat, generation;
END
$$;


CREATE FUNCTION tube.tube_lease_hold(tube text, partitions integer, partition integer, term bigint) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    valid text := tube_generation_valid();
BEGIN
    PERFORM FROM tube_lease l
        WHERE l.tube = tube_lease_hold.tube AND l.term = tube_lease_hold.term
            AND l.generation = valid
            AND tube_lease_hold.partitions % l.partitions = 0
            AND tube_lease_hold.partition % l.partitions = l.partition
        FOR KEY SHARE;
    IF NOT FOUND THEN
        PERFORM tube_lease_lost(tube, partitions, partition, term);
    END IF;
END
$$;


CREATE FUNCTION tube.tube_lease_lost(tube text, partitions integer, partition integer, term bigint) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    holder text;
    g tube_generation := tube_generation_now();
BEGIN
    IF tube_generation_valid() IS NULL OR term <= g.after_term AND g.number > 1 THEN
        PERFORM tube_refuse('RT002',
            format('history forked%s: term %s of partition %s/%s of tube %L was given before that',
                CASE WHEN term <= g.after_term THEN format(' (%s, %s)', g.reason, g.created_at) END,
                term, partition, partitions, tube),
            'nothing was read or acked; claim the partition anew, and read it from its first pod');
    END IF;
    SELECT string_agg(DISTINCT l.holder, ', ') INTO holder FROM tube_lease l
        WHERE l.tube = tube_lease_lost.tube AND l.partition % gcd(l.partitions, tube_lease_lost.partitions)
            = tube_lease_lost.partition % gcd(l.partitions, tube_lease_lost.partitions);
    PERFORM tube_refuse('RT002',
        format('term %s does not hold partition %s/%s of tube %L%s', term, partition, partitions, tube,
            coalesce(': it is held by ' || holder, '')), 'nothing was read or acked; claim the partition anew');
END
$$;


CREATE FUNCTION tube.tube_lease_release(tube text, partitions integer, partition integer, term bigint) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    DELETE FROM tube_lease l
        WHERE l.tube = tube_lease_release.tube AND l.partitions = tube_lease_release.partitions
            AND l.partition = tube_lease_release.partition AND l.term = tube_lease_release.term;
    RETURN FOUND;
END
$$;


CREATE FUNCTION tube.tube_lease_renew(tube text, partitions integer, partition integer, term bigint) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    new_beat bigint;
    valid text := tube_generation_valid();
BEGIN
    UPDATE tube_lease l SET beat = nextval('tube_term_seq')
        WHERE l.tube = tube_lease_renew.tube AND l.partitions = tube_lease_renew.partitions
            AND l.partition = tube_lease_renew.partition AND l.term = tube_lease_renew.term
            AND l.generation = valid
        RETURNING l.beat INTO new_beat;
    IF NOT FOUND THEN
        PERFORM tube_lease_lost(tube, partitions, partition, term);
    END IF;
    RETURN new_beat;
END
$$;


CREATE FUNCTION tube.tube_line_sql(tube text, partitions integer, partition text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT format($sql$concat(%L, %s, %L, seq, ' {"seq":', seq, ',"op":"', op, '","shard":', shard,
        ',"ids":', array_to_json(ids),
        ',"ts":"', to_char(ts AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'), '+00:00"',
        ',"payload":' || payload::text, '}')$sql$,
        format('RDATA tube:%s ', tube), partition, format('/%s ', partitions))
$_$;


CREATE FUNCTION tube.tube_lines_sql(tube text, partitions integer, partition integer, term bigint, after_regular bigint, after_backfill bigint, upto_regular bigint, upto_backfill bigint) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    t tube_registry := tube_find(tube);
    fence text := format('%I.tube_lease_check(%L, %s, %s, %s)', current_schema(), tube, partitions, partition, term);
    statement text;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    SELECT string_agg(format('SELECT %s AS line FROM (%s) AS half WHERE %s',
            tube_line_sql(tube, partitions, partition::text),
            tube_range_sql(t, partitions, partition, halves.backfill, halves.after, halves.upto, NULL, true), fence),
            ' UNION ALL ' ORDER BY halves.backfill)
        INTO statement
        FROM (VALUES (false, after_regular, upto_regular), (true, after_backfill, upto_backfill))
            AS halves (backfill, after, upto)
        WHERE halves.after < halves.upto;
    RETURN coalesce(statement,
        format('SELECT NULL::text AS line FROM (SELECT %s AS held OFFSET 0) AS fence WHERE NOT held', fence));
END
$$;


CREATE FUNCTION tube.tube_list(tbl regclass DEFAULT NULL::regclass) RETURNS TABLE(tube text, predicate text, partitions integer, tbl regclass, shard integer, table_predicate text, routing text, unattached regclass[], key name[], keys text)
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    WITH RECURSIVE attached AS MATERIALIZED (
        SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl
        WHERE x.tbl = x.root AND ($1 IS NULL OR x.tbl = $1)
    ), tree (root, member, depth) AS (  -- of all tables at once: one by one, a thousand tables take seconds
        SELECT DISTINCT a.tbl::oid, a.tbl::oid, 0 FROM attached a
        UNION
        SELECT tree.root, i.inhrelid, tree.depth + 1 FROM tree JOIN pg_inherits i ON i.inhparent = tree.member
    ), without AS MATERIALIZED (
        SELECT m.tube, m.root, array_agg(m.member::regclass ORDER BY m.depth, m.member) AS members
        FROM (
            SELECT a.tube, tree.root, tree.member, min(tree.depth) AS depth
            FROM attached a JOIN tree ON tree.root = a.tbl GROUP BY 1, 2, 3
        ) AS m LEFT JOIN tube_attachment x ON x.tube = m.tube AND x.tbl = m.member
        WHERE x.tbl IS NULL GROUP BY 1, 2
    )
    SELECT r.tube, r.predicate, r.partitions, a.tbl, a.shard, a.predicate, a.routing,
        CASE WHEN a.tbl IS NOT NULL THEN coalesce(w.members, '{}') END, a.key, r.keys
    FROM tube_registry r LEFT JOIN attached a ON a.tube = r.tube LEFT JOIN without w ON w.tube = a.tube AND w.root = a.tbl
    WHERE $1 IS NULL OR a.tbl = $1
    ORDER BY r.tube, a.shard, a.tbl
$_$;


COMMENT ON FUNCTION tube.tube_list(tbl regclass) IS 'Tubes and the tables attached to them';


CREATE FUNCTION tube.tube_lock(tube text) RETURNS tube.tube_registry
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    locked_tube tube_registry;
BEGIN
    SELECT * INTO locked_tube FROM tube_registry r WHERE r.tube = tube_lock.tube FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN tube_find(tube);
    END IF;
    RETURN locked_tube;
END
$$;


CREATE FUNCTION tube.tube_lock_table(tbl regclass) RETURNS void
    LANGUAGE sql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT pg_advisory_xact_lock(
        hashtext('replicad tube ' || current_schema()), (tbl::oid::bigint - 2147483648)::integer)
$$;


CREATE FUNCTION tube.tube_low_of(tube text, partitions integer, partition integer, backfill boolean, upto bigint DEFAULT '9223372036854775807'::bigint) RETURNS bigint
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT coalesce(max(l.seq), 0) FROM tube_low l
    WHERE (l.tube, l.partitions, l.partition, l.backfill) = ($1, $2, $3, $4) AND l.seq <= $5
$_$;


CREATE FUNCTION tube.tube_low_put(tube text, partitions integer, partition integer, backfill boolean, seq bigint) RETURNS void
    LANGUAGE sql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    INSERT INTO tube_low AS l VALUES ($1, $2, $3, $4, $5)
    ON CONFLICT ON CONSTRAINT tube_low_pkey DO UPDATE SET seq = excluded.seq WHERE excluded.seq >= l.seq + 1000
$_$;


CREATE FUNCTION tube.tube_low_raise(tube text, partitions integer, partition integer, upto bigint, in_generation text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    t tube_registry;
    own record;
    first_left bigint;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_generation_check(coalesce(in_generation, tube_generation_valid()));
    SELECT * INTO t FROM tube_registry r WHERE r.tube = tube_low_raise.tube;
    IF NOT FOUND OR t.partitions % partitions <> 0 OR t.partitions / partitions > 64 THEN
        RETURN;
    END IF;
    FOR own IN SELECT p, backfill
        FROM generate_series(partition, t.partitions - 1, partitions) AS p, (VALUES (false), (true)) AS kinds (backfill)
        ORDER BY p, backfill  -- two who raise the same marks do it in the same order
    LOOP
        EXECUTE format('SELECT min(seq) FROM (%s) AS oldest',
            tube_range_sql(t, t.partitions, own.p, own.backfill, upto => upto, pods => 1)) INTO first_left;
        PERFORM tube_low_put(t.tube, t.partitions, own.p, own.backfill, coalesce(first_left - 1, upto));
    END LOOP;
    IF partitions <> t.partitions THEN
        PERFORM tube_low_put(t.tube, partitions, partition, k.backfill, k.seq) FROM (
            SELECT kinds.backfill, min(tube_low_of(t.tube, t.partitions, p, kinds.backfill)) AS seq
            FROM generate_series(partition, t.partitions - 1, partitions) AS p, (VALUES (false), (true)) AS kinds (backfill)
            GROUP BY 1 ORDER BY 1) AS k;
    END IF;
END
$$;


CREATE FUNCTION tube.tube_many_sql(tube text, op text, rows text, rows_before text, touched text, size integer) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT tube_noted_sql(tube, format($sql$
        INSERT INTO %1$s (op, shard, ids)
        SELECT %2$s, TG_ARGV[0]::integer, cut.ids[cut.k:cut.k + %8$s]
        FROM (
            SELECT many.ids, generate_series(1, cardinality(many.ids), %7$s) AS k
            FROM (SELECT ARRAY(%3$s LIMIT 1000001) AS ids%4$s OFFSET 0) AS many
            WHERE cardinality(many.ids) <= 1000000%5$s
        ) AS cut;
        IF FOUND OR NOT EXISTS (SELECT FROM %6$s) THEN
            RETURN NULL;
        END IF;
    $sql$, tube_relation(tube), op, rows,
        ', ARRAY(' || rows_before || ' LIMIT 1000001) AS ids_before',
        CASE WHEN rows_before IS NOT NULL THEN ' AND many.ids = many.ids_before' END, touched, size, size - 1))
$_$;


CREATE FUNCTION tube.tube_member_detach(tube text, tbl regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    trigger_name name;
BEGIN
    FOR trigger_name IN SELECT x.name FROM tube_triggers_of(tube, tbl) x LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', trigger_name, tube_qualified(tbl));
    END LOOP;
    DELETE FROM tube_attachment a WHERE a.tube = tube_member_detach.tube AND a.tbl = tube_member_detach.tbl;
    DELETE FROM tube_trigger_seen s WHERE s.tube = tube_member_detach.tube AND s.tbl = tube_member_detach.tbl;
END
$$;


CREATE FUNCTION tube.tube_members(tbl regclass) RETURNS SETOF regclass
    LANGUAGE sql STABLE ROWS 2
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    WITH RECURSIVE tree(member, depth) AS (
        SELECT tbl::oid, 0
        UNION
        SELECT i.inhrelid, tree.depth + 1 FROM tree JOIN pg_inherits i ON i.inhparent = tree.member
    )
    SELECT member::regclass FROM tree GROUP BY member ORDER BY min(depth), member
$$;


CREATE FUNCTION tube.tube_mirror(tube text, source regclass) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    t tube_registry := tube_lock(tube);
    name text := tube_object_name(tube, '_mirror');
    highest bigint;
    above bigint;
BEGIN
    IF t.keys <> 'bigint' THEN
        PERFORM tube_refuse('RT005', format('tube %L has keys of kind %s, and those of %s are numbers', tube, t.keys, source),
            'mirror it into a tube with keys of kind bigint');
    END IF;
    EXECUTE format('CREATE OR REPLACE FUNCTION %I() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER'
        ' SET search_path = pg_temp AS %L', name, format($body$
BEGIN
    INSERT INTO %s (op, shard, ids, payload)
    SELECT r.op, r.shard, r.ids[k:k + 249], r.payload
    FROM replicad_rows AS r CROSS JOIN pg_catalog.generate_series(1, greatest(cardinality(r.ids), 1), 250) AS k
    WHERE cardinality(r.ids) > 0 OR coalesce(r.payload ->> 'type', '') NOT LIKE 'backfill_%%'
    ORDER BY r.seq, k;
    RETURN NULL;
END
$body$, tube_relation(t.tube)));
    EXECUTE format('REVOKE EXECUTE ON FUNCTION %I() FROM PUBLIC', name);
    PERFORM tube_belong(format('FUNCTION %I()', name));
    EXECUTE format('CREATE OR REPLACE TRIGGER replicad_mirror AFTER INSERT ON %s REFERENCING NEW TABLE AS replicad_rows'
        ' FOR EACH STATEMENT EXECUTE FUNCTION %I()', tube_qualified(source), name);
    EXECUTE format('SELECT coalesce(max(p.seq), 0) FROM %s p', tube_qualified(source)) INTO highest;
    above := highest + 1000000000;  -- far above what other tubes of pg-tube give out meanwhile
    IF coalesce(pg_sequence_last_value('tube_seq'), 0) < above THEN
        PERFORM setval('tube_seq', above);
    END IF;
    EXECUTE format('COMMENT ON FUNCTION %I() IS %L', name, format('replicad: mirrors %s from seq %s on', source::oid, highest + 1));
    RETURN highest;
END
$_$;


COMMENT ON FUNCTION tube.tube_mirror(tube text, source regclass) IS 'Records in a tube what is recorded in a tube of pg-tube';


CREATE FUNCTION tube.tube_mirror_copy(tube text, source regclass, upto bigint) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    t tube_registry := tube_keep(tube);
    pods bigint;
BEGIN
    EXECUTE format('INSERT INTO %s (op, shard, ids, payload) SELECT r.op, r.shard, r.ids[k:k + 249], r.payload'
        ' FROM %s AS r CROSS JOIN generate_series(1, greatest(cardinality(r.ids), 1), 250) AS k'
        ' WHERE r.seq <= $1 AND (cardinality(r.ids) > 0 OR coalesce(r.payload ->> ''type'', '''') NOT LIKE ''backfill_%%'')'
        ' ORDER BY r.seq, k', tube_relation(t.tube), tube_qualified(source)) USING upto;
    GET DIAGNOSTICS pods = ROW_COUNT;
    EXECUTE format('COMMENT ON FUNCTION %I() IS %L', tube_object_name(tube, '_mirror'),
        format('replicad: mirrors %s, complete', source::oid));
    RETURN pods;
END
$_$;


CREATE FUNCTION tube.tube_mirror_end(tube text, source regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    EXECUTE format('DROP TRIGGER IF EXISTS replicad_mirror ON %s', tube_qualified(source));
    EXECUTE format('DROP FUNCTION IF EXISTS %I()', tube_object_name(tube, '_mirror'));
END
$$;


CREATE FUNCTION tube.tube_mirror_state(tube text, source regclass) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT CASE WHEN obj_description(p.oid, 'pg_proc') LIKE '% complete' THEN 'complete' ELSE 'begun' END
    FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
    WHERE g.tgrelid = source AND p.pronamespace = quote_ident(current_schema())::regnamespace
        AND p.proname = tube_object_name(tube, '_mirror') AND g.tgenabled IN ('O', 'A')
$$;


CREATE FUNCTION tube.tube_miss(t tube.tube_registry, name text, first bigint, last bigint, at timestamp with time zone) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    a tube_attachment;
BEGIN
    FOR a IN SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl
        WHERE x.tube = t.tube AND x.tbl = x.root ORDER BY x.tbl::oid
    LOOP
        INSERT INTO tube_missed AS m (tube, cause, tbl, after, upto, since) VALUES (t.tube, name, a.tbl, first, last, at)
            ON CONFLICT ON CONSTRAINT tube_missed_pkey DO NOTHING;
        IF FOUND AND t.on_fork = 'backfill' THEN
            PERFORM tube_backfill_request(t.tube, NULL, a.shard, a.shard);
        END IF;
        UPDATE tube_missed m SET after = least(m.after, first), upto = greatest(m.upto, last)
            WHERE m.tube = t.tube AND m.cause = name AND m.tbl = a.tbl AND (m.after > first OR m.upto < last);
    END LOOP;
    DELETE FROM tube_missed m WHERE m.tube = t.tube AND m.healed_at < clock_timestamp() - interval '30 days';
END
$$;


CREATE FUNCTION tube.tube_missing() RETURNS TABLE(tube text, cause text, tbl text, after bigint, upto bigint, since timestamp with time zone, until timestamp with time zone, shard integer, routed boolean)
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT m.tube, m.cause, tube_qualified(m.tbl::regclass), m.after, m.upto, m.since, m.seen_at, a.shard, a.routing IS NOT NULL
    FROM tube_missed m JOIN tube_attachment a ON a.tube = m.tube AND a.tbl = m.tbl
    WHERE m.healed_at IS NULL AND NOT m.lasts ORDER BY m.tube, m.cause, m.tbl
$$;


CREATE FUNCTION tube.tube_move(source_schema text, tbl regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    attached record;
    arguments CONSTANT text := '(bigint[], character, jsonb, integer)';
    own_schema name;
    own_name name;
    touch boolean;
    tubes text[];
    shards integer[];
BEGIN
    FOR attached IN SELECT p.* FROM tube_pg_tube(source_schema) p WHERE p.tbl = tube_move.tbl LOOP
        IF tube_mirror_state(attached.tube, attached.source) IS DISTINCT FROM 'complete' THEN
            PERFORM tube_refuse('RT005', format('tube %L does not mirror %s completely, so touches that wait there would be '
                'missing here', attached.tube, attached.source), format('run: replicad tubes pg-tube mirror %s', attached.tube));
        END IF;
        tubes := tubes || attached.tube;
        shards := shards || attached.shard;
    END LOOP;
    IF tubes IS NULL THEN
        PERFORM tube_refuse('RT005', format('table %s is not attached to a tube of pg-tube in schema %I', tbl, source_schema),
            'replicad tubes pg-tube check shows its tables');
    END IF;
    -- {table}_touch stays the same function with another body, since programs call it at this moment, and have prepared statements.
    -- pg-tube drops it by its name, so it has another one meanwhile.
    SELECT n.nspname, tube_object_name(c.relname, '_touch') INTO own_schema, own_name
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl;
    touch := to_regprocedure(format('%I.%I%s', own_schema, own_name, arguments)) IS NOT NULL;
    IF touch THEN
        EXECUTE format('ALTER FUNCTION %I.%I%s RENAME TO replicad_moving', own_schema, own_name, arguments);
    END IF;
    EXECUTE format('SELECT %I.tube_table_ensure_detached(NULL, %L::oid::regclass)', source_schema, tbl::oid);
    IF touch THEN
        EXECUTE format('ALTER FUNCTION %I.replicad_moving%s RENAME TO %I', own_schema, arguments, own_name);
        EXECUTE format('CREATE OR REPLACE FUNCTION %I.%I(ids bigint[], op char = ''T'', payload jsonb = NULL, chunk_size integer = 250)'
            ' RETURNS void LANGUAGE plpgsql AS %L', own_schema, own_name,
            format(E'\n-- replicad: touches the tubes of schema %I\nBEGIN END', current_schema()));  -- it is ours to replace
    END IF;
    FOR n IN 1..cardinality(tubes) LOOP
        PERFORM tube_table_ensure_attached(tubes[n], tbl, shards[n], key => '{id}');
    END LOOP;
END
$$;


COMMENT ON FUNCTION tube.tube_move(source_schema text, tbl regclass) IS 'Moves a table from the tubes of pg-tube to those of the same names';


CREATE FUNCTION tube.tube_note(in_generation text, positions jsonb) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    noted bigint;
BEGIN
    PERFORM tube_generation_check(in_generation);
    INSERT INTO tube_noted AS n (positions) VALUES (tube_note.positions)
    ON CONFLICT (one) DO UPDATE SET number = n.number + 1, noted_at = clock_timestamp(), positions = (
        SELECT coalesce(jsonb_object_agg(p.tube, p.upto), '{}') FROM (
            SELECT k.key AS tube, max(k.value::bigint) AS upto
            FROM (SELECT * FROM jsonb_each_text(n.positions) UNION ALL SELECT * FROM jsonb_each_text(excluded.positions)) AS k
            WHERE k.key IN (SELECT r.tube FROM tube_registry r)
            GROUP BY 1
        ) AS p)
    RETURNING n.number INTO noted;
    RETURN noted;
END
$$;


CREATE FUNCTION tube.tube_noted_sql(tube text, insertion text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT E'\n        INSERT ' || format(
        '/* This records this write in tube %1$s of replicad. If it fails, a column of the table was renamed, dropped or '
        'has another type. Attach the table again with a --predicate and --routing that fit: replicad tubes attach %1$s '
        'TABLE; or stop recording it: replicad tubes detach %1$s TABLE */',
        replace(replace(tube, '*/', '* /'), '/*', '/ *'))  -- comments nest
        || substr(ltrim(insertion, E' \n'), length('INSERT') + 1)
$_$;


CREATE FUNCTION tube.tube_object_name(base text, suffix text) RETURNS name
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    hash text := '_' || left(md5(base || suffix), 8);
    kept text := left(base, 63);
BEGIN
    IF octet_length(base || suffix) <= 63 THEN
        RETURN base || suffix;
    END IF;
    IF octet_length(hash || suffix) > 63 THEN
        RAISE name_too_long USING MESSAGE = format('no name of 63 bytes can end with %L', left(suffix, 80));
    END IF;
    WHILE octet_length(kept || hash || suffix) > 63 LOOP
        kept := left(kept, -1);
    END LOOP;
    RETURN kept || hash || suffix;
END
$$;


CREATE FUNCTION tube.tube_on_disk() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'local', true);
    END IF;
    RETURN NULL;
END
$$;


CREATE FUNCTION tube.tube_on_fork(tube text, what text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    t tube_registry := tube_lock(tube);
BEGIN
    IF (what IN ('report', 'backfill')) IS NOT TRUE THEN
        PERFORM tube_refuse('RT008', format('%L is nothing that a tube can do after a fork of history', what),
            'give report or backfill');
    END IF;
    UPDATE tube_registry r SET on_fork = what WHERE r.tube = t.tube AND r.on_fork <> what;
END
$$;


COMMENT ON FUNCTION tube.tube_on_fork(tube text, what text) IS 'What happens when touches are unknown after a fork of history: report, or backfill';


CREATE FUNCTION tube.tube_op_sql(op text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT format(
        'CASE WHEN strpos(current_setting(''application_name''), ''backfill'') > 0 THEN ''B'' ELSE %s END', op)
$$;


CREATE FUNCTION tube.tube_owner_rows(tbl regclass, query text, path text) RETURNS TABLE(tube_shard integer, id text, n bigint)
    LANGUAGE sql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT nullif(split_part(line, ',', 1), '')::integer,
        substr(line, 3 + length(split_part(line, ',', 1)) + length(split_part(line, ',', 2))), split_part(line, ',', 2)::bigint
    FROM tube_as_owner(tbl, format(
        'SELECT pg_catalog.concat(q.tube_shard, '','', q.n, '','', q.id) FROM (%s) AS q', query), path) AS line
$$;


CREATE FUNCTION tube.tube_park(tube text, partitions integer, partition integer, term bigint, seq bigint, ids text[], tries integer, error text) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


CREATE FUNCTION tube.tube_parked_drop(tube text, parked_ids bigint[] DEFAULT NULL::bigint[]) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    t tube_registry := tube_keep(tube);
    dropped bigint;
BEGIN
    DELETE FROM tube_parked p WHERE p.tube = t.tube AND (parked_ids IS NULL OR p.parked = ANY (parked_ids));
    GET DIAGNOSTICS dropped = ROW_COUNT;
    RETURN dropped;
END
$$;


COMMENT ON FUNCTION tube.tube_parked_drop(tube text, parked_ids bigint[]) IS 'Forgets what failed too often';


CREATE TABLE tube.tube_parked (
    parked bigint NOT NULL,
    tube text NOT NULL,
    seq bigint NOT NULL,
    op character(1) NOT NULL,
    shard integer NOT NULL,
    ids bigint[] NOT NULL,
    payload jsonb,
    ts timestamp with time zone NOT NULL,
    tries integer NOT NULL,
    error text NOT NULL,
    parked_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    keys text[]
);


COMMENT ON TABLE tube.tube_parked IS 'replicad: what failed too often; use tube_parked_list(), _replay() and _drop()';


CREATE FUNCTION tube.tube_parked_list(tube text DEFAULT NULL::text) RETURNS SETOF tube.tube_parked
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT p.* FROM tube_parked p WHERE $1 IS NULL OR p.tube = $1 ORDER BY p.parked
$_$;


COMMENT ON FUNCTION tube.tube_parked_list(tube text) IS 'Lists what failed too often';


CREATE FUNCTION tube.tube_parked_replay(tube text, parked_ids bigint[] DEFAULT NULL::bigint[]) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


COMMENT ON FUNCTION tube.tube_parked_replay(tube text, parked_ids bigint[]) IS 'Puts what failed too often back into its tube';


CREATE FUNCTION tube.tube_partitions_check(of_tube text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    a tube_attachment;
    own name[];
BEGIN
    FOR a IN SELECT x.* FROM tube_attachment x JOIN pg_class r ON r.oid = x.root
        WHERE x.tube = coalesce(of_tube, x.tube) AND x.tbl <> x.root AND NOT EXISTS (
            SELECT FROM pg_inherits i WHERE i.inhrelid = x.tbl AND i.inhparent IN (
                SELECT y.tbl FROM tube_attachment y WHERE y.tube = x.tube AND y.root = x.root))
        ORDER BY x.tube, x.tbl::oid
    LOOP
        PERFORM tube_lock(a.tube);
        SELECT ARRAY[n.nspname, c.relname] INTO own
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = a.tbl;
        IF FOUND THEN
            UPDATE tube_attachment x SET root = x.tbl, given = own WHERE x.tube = a.tube AND x.tbl = a.tbl;
        ELSE
            DELETE FROM tube_attachment x WHERE x.tube = a.tube AND x.tbl = a.tbl;
        END IF;
        INSERT INTO tube_missed AS m (tube, cause, tbl) VALUES (a.tube, 'partitions', a.root)
            ON CONFLICT ON CONSTRAINT tube_missed_pkey DO UPDATE SET seen_at = clock_timestamp(), healed_at = NULL,
                since = CASE WHEN m.healed_at IS NULL THEN m.since ELSE clock_timestamp() END;
    END LOOP;
END
$$;


CREATE FUNCTION tube.tube_path_text(path name[]) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT string_agg(part, ', ' ORDER BY place)
    FROM (
        SELECT quote_ident(given.name) AS part, min(given.place) AS place
        FROM unnest(path) WITH ORDINALITY AS given(name, place) GROUP BY given.name
        UNION ALL SELECT 'pg_temp', 1 + coalesce(cardinality(path), 0)
    ) AS parts
$$;


CREATE FUNCTION tube.tube_pause(tube text, reason text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM tube_keep(tube);
    UPDATE tube_registry r SET paused_at = coalesce(r.paused_at, clock_timestamp()), paused_why = left(nullif(reason, ''), 200)
        WHERE r.tube = tube_pause.tube;
END
$$;


COMMENT ON FUNCTION tube.tube_pause(tube text, reason text) IS 'Gives no reader the pods of a tube until tube_resume()';


CREATE FUNCTION tube.tube_pg_tube(source_schema text) RETURNS TABLE(tube text, source regclass, partitions integer, predicate text, tbl regclass, shard integer)
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
BEGIN
    IF source_schema = current_schema() OR to_regprocedure(format('%I._tube_predicate(text)', source_schema)) IS NULL
            OR to_regprocedure(format('%I.tube_list(regclass)', source_schema)) IS NULL THEN
        PERFORM tube_refuse('RT005', format('schema %I has no pg-tube', source_schema),
            'name the schema in which it is installed: --pg-schema SCHEMA. Schema of these tubes: ' || current_schema());
    END IF;
    RETURN QUERY EXECUTE format('SELECT l.tube, to_regclass(format(''%%I.%%I'', %1$L, l.tube)), l.partitions,'
        ' nullif(l.predicate, ''''), l.tbl, l.shard FROM %1$I.tube_list() AS l ORDER BY l.tube, l.shard, l.tbl', source_schema);
END
$_$;


CREATE FUNCTION tube.tube_plan(tube text, partitions integer, partition integer, term bigint, after_regular bigint, after_backfill bigint, upto bigint, max_pods integer, max_ids bigint DEFAULT NULL::bigint, max_backfill integer DEFAULT NULL::integer, in_generation text DEFAULT NULL::text, OUT regular bigint, OUT backfill bigint, OUT pods integer, OUT ids bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    t tube_registry := tube_find(tube);
    half record;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_lease_check(tube, partitions, partition, term, in_generation);
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


CREATE FUNCTION tube.tube_plan_half(range text, max_ids bigint, at_least integer, OUT last bigint, OUT pods integer, OUT ids bigint, OUT cut boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


CREATE FUNCTION tube.tube_pod_size(kind text) RETURNS integer
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT CASE kind WHEN 'bigint' THEN 250 ELSE 100 END
$$;


CREATE FUNCTION tube.tube_pods_delete(tube text, partitions integer, partition integer, seqs bigint[]) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM FROM tube_registry r WHERE r.tube = tube_pods_delete.tube FOR SHARE;
    PERFORM tube_check_partitions(tube, partitions);
    RETURN (tube_remove(tube, partitions, partition, seqs)).pods;
END
$$;


COMMENT ON FUNCTION tube.tube_pods_delete(tube text, partitions integer, partition integer, seqs bigint[]) IS 'Deletes pods of a partition';


CREATE FUNCTION tube.tube_pods_insert(tube_or_tubes text, query text, shard integer, op character DEFAULT 'B'::bpchar, approx_size bigint DEFAULT NULL::bigint, fetch_chunk_size integer DEFAULT 20000, insert_chunk_size integer DEFAULT 250, path name[] DEFAULT current_schemas(true)) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    SET row_security TO 'off'
    AS $$
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


COMMENT ON FUNCTION tube.tube_pods_insert(tube_or_tubes text, query text, shard integer, op character, approx_size bigint, fetch_chunk_size integer, insert_chunk_size integer, path name[]) IS 'Touches every id that a query returns';


CREATE FUNCTION tube.tube_pods_sql(tube text, partitions integer, partition integer, exclude_backfill boolean DEFAULT false) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
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


COMMENT ON FUNCTION tube.tube_pods_sql(tube text, partitions integer, partition integer, exclude_backfill boolean) IS 'The query that reads one partition of a tube';


CREATE FUNCTION tube.tube_progress(first bigint, last bigint, every integer, total bigint) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    IF last / every > first / every THEN
        RAISE NOTICE '% ids%', last / every * every,
            coalesce(' of about ' || total || ' (' || least(100, 100 * last / nullif(total, 0)) || ' %)', '');
    END IF;
    RETURN true;
END
$$;


CREATE FUNCTION tube.tube_qualified(tbl regclass) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT format('%I.%I', n.nspname, c.relname)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl
$$;


CREATE FUNCTION tube.tube_range_sql(t tube.tube_registry, partitions integer, partition integer, backfill boolean, after bigint DEFAULT 0, upto bigint DEFAULT '9223372036854775807'::bigint, pods bigint DEFAULT NULL::bigint, served boolean DEFAULT false) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT CASE WHEN count(*) = 1 THEN min(part.query)
        ELSE format('SELECT * FROM (%s) AS pods ORDER BY seq%s',
            string_agg(format('(%s)', part.query), ' UNION ALL ' ORDER BY part.p), ' LIMIT ' || pods) END
    FROM (
        SELECT numbered.p, format(
            'SELECT * FROM %s WHERE (shard %% %s) = %s AND (op = ''B'')::integer = %s'
            ' AND seq > %s AND seq <= %s%s ORDER BY seq%s',
            tube_relation(t.tube), numbered.n, numbered.p, $4::integer, greatest(after, low.seq), upto,
            CASE WHEN served AND $4 THEN ' AND ' || tube_served_sql() END, ' LIMIT ' || pods) AS query
        FROM (
            SELECT t.partitions AS n, p
            FROM generate_series(partition, t.partitions - 1, partitions) AS p
            WHERE t.partitions % partitions = 0 AND t.partitions / partitions <= 64
            UNION ALL
            SELECT partitions, partition WHERE t.partitions % partitions <> 0 OR t.partitions / partitions > 64
        ) AS numbered
        LEFT JOIN tube_low AS low ON low.tube = t.tube AND low.partitions = numbered.n AND low.partition = numbered.p
            AND low.backfill = $4 AND low.seq <= $6  -- a mark above the position: the sequence was set back
    ) AS part
$_$;


CREATE FUNCTION tube.tube_reader(owner oid) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT format('%I.%I', n.nspname, p.proname)
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname = current_schema() AND p.proowner = owner AND p.proname ~ '^reader_1_[0-9a-f]{32}$'
    LIMIT 1
$_$;


CREATE FUNCTION tube.tube_reader_body() RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$ SELECT $body$
DECLARE
    line pg_catalog.text;
    size pg_catalog.int8 := 0;
    guarded pg_catalog.bool := false;
    finished pg_catalog.bool := false;
    ending pg_catalog.text;
    sentence pg_catalog.text;
    more pg_catalog.text;
    advice pg_catalog.text;
    cancelled pg_catalog.text;
    prepared pg_catalog.text;
BEGIN
    BEGIN
        PERFORM pg_catalog.set_config('role', 'none', true);
    EXCEPTION WHEN insufficient_privilege THEN
        guarded := true;
    END;
    IF guarded AND CURRENT_USER OPERATOR(pg_catalog.=) (SELECT pg_catalog.pg_get_userbyid(c.relowner)
            FROM pg_catalog.pg_class AS c WHERE c.oid OPERATOR(pg_catalog.=) tbl) THEN
        NULL;
    ELSE
        RAISE EXCEPTION USING ERRCODE = 'RS006', MESSAGE = 'the table changed its owner, or its reader was altered',
            HINT = 'drop the function and run stream_reader_ensure';
    END IF;
    BEGIN
        SET LOCAL transaction_read_only = on;
        PERFORM pg_catalog.set_config('search_path', path, true);
        IF pg_catalog.concat_ws('|',
            pg_catalog.current_setting('row_security'), pg_catalog.current_setting('TimeZone'),
            pg_catalog.current_setting('DateStyle'), pg_catalog.current_setting('IntervalStyle'),
            pg_catalog.current_setting('extra_float_digits'), pg_catalog.current_setting('bytea_output'),
            pg_catalog.current_setting('xmlbinary'), pg_catalog.current_setting('lc_monetary'),
            pg_catalog.current_setting('lc_numeric'), pg_catalog.current_setting('lc_time'),
            pg_catalog.current_setting('xmloption'), pg_catalog.current_setting('timezone_abbreviations'),
            pg_catalog.current_setting('array_nulls'), pg_catalog.current_setting('transform_null_equals'),
            pg_catalog.current_setting('standard_conforming_strings'), pg_catalog.current_setting('backslash_quote'),
            pg_catalog.current_setting('quote_all_identifiers'), pg_catalog.current_setting('gin_fuzzy_search_limit')
        ) OPERATOR(pg_catalog.<>) 'off|UTC|ISO, MDY|postgres|1|hex|base64|C|C|C|content|Default|on|off|on|safe_encoding|off|0' THEN
            PERFORM pg_catalog.set_config(fixed.name, fixed.setting, true)
                FROM (VALUES
                    ('row_security', 'off'), ('TimeZone', 'UTC'), ('DateStyle', 'ISO, MDY'),
                    ('IntervalStyle', 'postgres'), ('extra_float_digits', '1'), ('bytea_output', 'hex'),
                    ('xmlbinary', 'base64'), ('lc_monetary', 'C'), ('lc_numeric', 'C'), ('lc_time', 'C'),
                    ('xmloption', 'content'), ('timezone_abbreviations', 'Default'), ('array_nulls', 'on'),
                    ('transform_null_equals', 'off'), ('standard_conforming_strings', 'on'),
                    ('backslash_quote', 'safe_encoding'), ('quote_all_identifiers', 'off'),
                    ('gin_fuzzy_search_limit', '0')
                ) AS fixed (name, setting);
        END IF;
        FOR line IN EXECUTE query LOOP
            RETURN NEXT line;
            size := size OPERATOR(pg_catalog.+) pg_catalog.octet_length(line);
            IF size OPERATOR(pg_catalog.>) bound THEN
                ending := '+';
                EXIT;
            END IF;
        END LOOP;
        finished := true;
        RAISE EXCEPTION USING ERRCODE = 'RS099', MESSAGE = 'roll back';
    EXCEPTION
        WHEN query_canceled OR assert_failure THEN
            cancelled := SQLSTATE;
            GET STACKED DIAGNOSTICS sentence = MESSAGE_TEXT;
        WHEN OTHERS THEN
            IF NOT finished THEN
                GET STACKED DIAGNOSTICS sentence = MESSAGE_TEXT, more = PG_EXCEPTION_DETAIL, advice = PG_EXCEPTION_HINT;
                ending := '!' OPERATOR(pg_catalog.||) pg_catalog.json_build_object('sqlstate', SQLSTATE,
                    'message', pg_catalog.left(sentence, 500), 'detail', pg_catalog.left(more, 300),
                    'hint', pg_catalog.left(advice, 300))::pg_catalog.text;
            END IF;
    END;
    FOR prepared IN SELECT p.name FROM pg_catalog.pg_prepared_statements AS p
        WHERE p.from_sql AND p.prepare_time OPERATOR(pg_catalog.>=) pg_catalog.statement_timestamp()
    LOOP
        EXECUTE 'DEALLOCATE ' OPERATOR(pg_catalog.||) pg_catalog.quote_ident(prepared);
    END LOOP;
    IF cancelled IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = cancelled, MESSAGE = sentence;
    END IF;
    IF ending IS NOT NULL THEN
        RETURN NEXT ending;
    END IF;
END
$body$::text $_$;


CREATE FUNCTION tube.tube_reader_ensure(tbl regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    owner oid := tube_runs_as(tbl);
    signature text;
BEGIN
    IF owner IS NULL OR tube_reader(owner) IS NOT NULL THEN
        RETURN;
    END IF;
    signature := format('%I.%I(oid, text, text, bigint)', current_schema(), 'reader_1_' || md5(pg_get_userbyid(owner)));
    IF to_regprocedure(signature) IS NOT NULL THEN
        EXECUTE format('DROP FUNCTION %s', signature);  -- of a role that had this name
    END IF;
    EXECUTE format('CREATE FUNCTION %I.%I(tbl oid, query text, path text, bound bigint) RETURNS SETOF text'
        ' LANGUAGE plpgsql SECURITY DEFINER AS %L', current_schema(), 'reader_1_' || md5(pg_get_userbyid(owner)),
        tube_reader_body());
    EXECUTE format('COMMENT ON FUNCTION %s IS %L', signature, 'replicad: reads the tables of its owner');
    EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', signature);
    PERFORM tube_give(signature, owner);
END
$$;


CREATE FUNCTION tube.tube_refuse(code text, message text, hint text) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint;
END
$$;


CREATE FUNCTION tube.tube_relation(tube text) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT format('%I.%I', current_schema(), tube)
$$;


CREATE FUNCTION tube.tube_removal_sql(tube text, condition text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT format('WITH gone AS (DELETE FROM %I AS pod WHERE %s RETURNING pod.shard, %s)'
        ' SELECT (SELECT count(*) FROM gone), (SELECT array_agg(DISTINCT gone.shard) FROM gone), %s',
        tube, condition, tube_age_sql('pod'), tube_ages_sql())
$$;


CREATE FUNCTION tube.tube_remove(tube text, partitions integer, partition integer, seqs bigint[], OUT pods bigint, OUT ages bigint[], OUT seconds double precision) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    shards integer[];
BEGIN
    EXECUTE tube_removal_sql(tube, format('seq = ANY ($1) AND (shard %% %s) = %s', partitions, partition)) INTO pods, shards, ages, seconds USING seqs;
    PERFORM tube_shards_note(tube, shards);
END
$_$;


CREATE FUNCTION tube.tube_remove_range(tube text, partitions integer, partition integer, backfill boolean, after bigint, upto bigint, OUT pods bigint, OUT ages bigint[], OUT seconds double precision) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    shards integer[];
BEGIN
    pods := 0;
    IF after < upto THEN
        EXECUTE tube_removal_sql(tube, format('(shard %% %s) = %s AND (op = ''B'')::integer = %s'
            ' AND seq > %s AND seq <= %s AND %s', partitions, partition, backfill::integer,
            greatest(after, tube_low_of(tube, partitions, partition, backfill, upto)), upto, tube_served_sql())) INTO pods, shards, ages, seconds;
        PERFORM tube_shards_note(tube, shards);
    END IF;
END
$$;


CREATE FUNCTION tube.tube_report_put(tube text, reporter text, counts jsonb) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
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


CREATE FUNCTION tube.tube_resume(tube text) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM tube_keep(tube);
    UPDATE tube_registry r SET paused_at = NULL, paused_why = NULL WHERE r.tube = tube_resume.tube AND r.paused_at IS NOT NULL;
    RETURN FOUND;
END
$$;


COMMENT ON FUNCTION tube.tube_resume(tube text) IS 'Gives readers the pods of a paused tube again';


CREATE FUNCTION tube.tube_rows_sql(source text, key name[], kind text, predicate text, routing text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT format('SELECT %s%s AS id FROM %s AS tube_row WHERE %s%s',
        E'(\n' || routing || E'\n)::integer AS tube_shard, ', tube_key_sql(key, kind), source, tube_key_present_sql(key),
        predicate)
$$;


CREATE FUNCTION tube.tube_run() RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    RETURN concat_ws('/', left(pg_walfile_name(pg_current_wal_lsn()), 8), extract(epoch FROM pg_postmaster_start_time()),
        extract(epoch FROM least((pg_stat_get_archiver()).stats_reset, pg_stat_get_bgwriter_stat_reset_time(),
            (pg_stat_get_wal()).stats_reset)))
;
END
$$;


CREATE FUNCTION tube.tube_runs_as(tbl regclass) RETURNS oid
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT c.relowner FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner
    WHERE c.oid = tbl AND r.rolname <> current_user AND NOT r.rolsuper
$$;


CREATE FUNCTION tube.tube_safe_path(path name[]) RETURNS name[]
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    safe name[] := '{}';
    folder name;
BEGIN
    FOREACH folder IN ARRAY coalesce(path, '{}') LOOP
        IF has_schema_privilege('public', folder, 'CREATE') THEN
            RAISE NOTICE 'expressions cannot see into schema %, where everybody may create objects: '
                'put the schema before the names that they need', folder;
        ELSIF folder !~ '^pg_' THEN
            safe := safe || folder;
        END IF;
    END LOOP;
    RETURN safe;
END
$$;


CREATE FUNCTION tube.tube_seen(tube text, in_generation text, upto bigint, OUT generation text, OUT shared bigint, OUT since timestamp with time zone, OUT state text, OUT mended bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    t tube_registry;
    first_fork tube_generation;
    name text;
BEGIN
    generation := (tube_continue()).id;
    t := tube_lock(tube);
    shared := tube_shared(t.tube, in_generation);
    state := 'same';
    IF upto <= coalesce(shared, upto) THEN
        mended := upto;
        RETURN;
    END IF;
    -- The first generation in which they are unknown. A backfill after it has mended what later restarts find unknown again.
    SELECT * INTO first_fork FROM tube_generation g
        WHERE g.number > coalesce((SELECT h.number FROM tube_generation h WHERE h.id = in_generation),
                (SELECT max(h.number) FROM tube_generation h) - 1)
            AND coalesce((g.shared ->> t.tube)::bigint, 0) < tube_seen.upto
        ORDER BY g.number LIMIT 1;
    name := 'fork ' || coalesce(first_fork.id, generation);
    since := coalesce(first_fork.shared_at, first_fork.created_at);
    PERFORM tube_miss(t, name, shared, upto, since);
    state := CASE
        WHEN NOT EXISTS (SELECT FROM tube_missed m WHERE m.tube = t.tube AND m.cause = name AND m.healed_at IS NULL) THEN 'healed'
        WHEN t.on_fork = 'backfill' THEN 'scheduled'
        ELSE 'unknown' END;
    mended := CASE WHEN state = 'healed' THEN pg_sequence_last_value('tube_seq') END;
END
$$;


CREATE FUNCTION tube.tube_served_sql() RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT '(cardinality(ids) > 0 OR payload ->> ''type'' IS DISTINCT FROM ''backfill_schedule'')'
$$;


CREATE FUNCTION tube.tube_shard_ensure(tube text, tbl regclass) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    t tube_registry := tube_lock(tube);
    present integer := (SELECT o.shard FROM tube_own_shard o WHERE o.tube = t.tube AND o.tbl = tube_shard_ensure.tbl);
    other regclass;
BEGIN
    IF present IS NULL THEN  -- the one that it is attached with, if that is of no other table
        SELECT a.shard INTO present FROM tube_attachment a
            WHERE a.tube = t.tube AND a.tbl = tube_shard_ensure.tbl AND a.routing IS NULL
                AND NOT EXISTS (SELECT FROM tube_own_shard o WHERE o.tube = a.tube AND o.shard = a.shard);
    END IF;
    IF present IS NULL THEN
        EXECUTE format('SELECT 1 + greatest((SELECT max(a.shard) FROM tube_attachment a WHERE a.tube = $1),'
            ' (SELECT max(o.shard) FROM tube_own_shard o WHERE o.tube = $1),'
            ' (SELECT max(s.shard) FROM tube_shard s WHERE s.tube = $1),'
            ' (SELECT max(p.shard) FROM tube_parked p WHERE p.tube = $1),'
            ' CASE WHEN NOT EXISTS (SELECT FROM tube_own_shard o WHERE o.tube = $1)'
            ' THEN (SELECT max(p.shard) FROM %s p) END, 0)', tube_relation(t.tube)) INTO present USING t.tube;
    END IF;
    SELECT a.tbl INTO other FROM tube_attachment a
        WHERE a.tube = t.tube AND a.root <> tube_shard_ensure.tbl AND (a.shard = present OR a.routing IS NOT NULL) LIMIT 1;
    IF FOUND THEN
        PERFORM tube_refuse('RT005', format('table %s cannot have a shard of its own in tube %L: table %s has the same shard, or '
            'a routing, which may give any shard', tbl, t.tube, other), 'use another tube, or attach that table with another shard');
    END IF;
    INSERT INTO tube_own_shard (tube, shard, tbl, given, key)
        SELECT t.tube, present, c.oid, ARRAY[n.nspname, c.relname], coalesce(tube_key_default(c.oid, NULL), '{}')
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tube_shard_ensure.tbl
        ON CONFLICT ON CONSTRAINT tube_own_shard_pkey DO NOTHING;
    RETURN present;
END
$_$;


COMMENT ON FUNCTION tube.tube_shard_ensure(tube text, tbl regclass) IS 'The shard that a table has for itself in a tube of many tables';


CREATE FUNCTION tube.tube_shards_note(tube text, shards integer[]) RETURNS void
    LANGUAGE sql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    INSERT INTO tube_shard (tube, shard)
        SELECT $1, s FROM unnest($2) AS s
        WHERE NOT EXISTS (SELECT FROM tube_shard k WHERE k.tube = $1 AND k.shard = s)
$_$;


CREATE FUNCTION tube.tube_shards_past(a tube.tube_attachment) RETURNS integer[]
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
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


CREATE FUNCTION tube.tube_shared(tube text, in_generation text) RETURNS bigint
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT CASE
        WHEN NOT EXISTS (SELECT FROM tube_generation g WHERE g.id = $2) THEN 0
        ELSE (SELECT min(coalesce((later.shared ->> $1)::bigint, 0)) FROM tube_generation g
            JOIN tube_generation later ON later.number > g.number WHERE g.id = $2) END
$_$;


CREATE FUNCTION tube.tube_short_sql(tube text, partitions integer, many boolean DEFAULT false) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT format($sql$
        SELECT %8$s AS n, fence.held, pods.backfill, pods.seq, pods.ids, pods.line
        FROM %9$s (
            SELECT EXISTS (SELECT FROM %1$s AS l WHERE l.tube = %3$L AND l.term = %10$s
                    AND l.generation = %7$s AND l.generation = coalesce($8::text, l.generation)
                    AND %4$s %% l.partitions = 0 AND %11$s %% l.partitions = l.partition)
                AND EXISTS (SELECT FROM %2$s AS r WHERE r.tube = %3$L AND r.partitions = %4$s) AS held
            OFFSET 0
        ) AS fence
        LEFT JOIN LATERAL (
            SELECT taken.backfill, taken.seq, cardinality(taken.ids) AS ids,
                CASE WHEN count(*) OVER () <= %12$s AND sum(taken.size) OVER () <= $7::integer
                    THEN %5$s END AS line
            FROM (%6$s) AS taken
        ) AS pods ON true
        ORDER BY 1, pods.backfill, pods.seq$sql$,
        tube_relation('tube_lease'), tube_relation('tube_registry'), tube, partitions,
        tube_line_sql(tube, partitions, asked.partition),
        (SELECT string_agg(format($sql$(
                SELECT %1$L::boolean AS backfill, seq, op, shard, ids, ts, payload,
                    pg_column_size(ids) + coalesce(pg_column_size(payload), 0) AS size
                FROM %2$s
                WHERE fence.held AND (shard %% %3$s) = %10$s AND (op = 'B')::integer = %4$s
                    AND seq > greatest(%5$s, (SELECT low.seq FROM %7$s AS low WHERE low.tube = %8$L
                        AND low.partitions = %3$s AND low.partition = %10$s AND low.backfill = %1$L
                        AND low.seq <= %9$s)) AND seq <= %9$s%6$s
                ORDER BY seq LIMIT %11$s + 1)$sql$,
            halves.backfill, tube_relation(tube), partitions, halves.backfill::integer, halves.after,
            CASE WHEN halves.backfill THEN ' AND ' || tube_served_sql() END, tube_relation('tube_low'), tube,
            asked.upto, asked.partition, asked.pods),
            ' UNION ALL ' ORDER BY halves.backfill)
        FROM (VALUES (false, asked.after_regular), (true, asked.after_backfill)) AS halves (backfill, after)),
        tube_generation_sql(), asked.n, asked.source, asked.term, asked.partition, asked.pods)
    FROM (VALUES
        (false, '1', '', '$1::integer', '$2::bigint', '$3::bigint', '$4::bigint', '$5::bigint', '$6::integer'),
        (true, 'asked.n',
            'unnest($1::integer[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::integer[]) WITH ORDINALITY'
            ' AS asked (partition, term, after_regular, after_backfill, upto, pods, n) CROSS JOIN LATERAL',
            'asked.partition', 'asked.term', 'asked.after_regular', 'asked.after_backfill', 'asked.upto', 'asked.pods')
    ) AS asked (many, n, source, partition, term, after_regular, after_backfill, upto, pods)
    WHERE asked.many = tube_short_sql.many
$_$;


CREATE FUNCTION tube.tube_split(tube_or_tubes text) RETURNS text[]
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT array_agg((tube_find(name)).tube ORDER BY n)
    FROM unnest(CASE WHEN EXISTS (SELECT FROM tube_registry r WHERE r.tube = tube_or_tubes) THEN ARRAY[tube_or_tubes]
        ELSE regexp_split_to_array(btrim(tube_or_tubes, ' {}'), ' *, *') END) WITH ORDINALITY AS g(name, n)
$$;


CREATE FUNCTION tube.tube_stats(exact integer DEFAULT 10000) RETURNS TABLE(tube text, predicate text, partition integer, shards integer[], inc_count bigint, inc_min_seq bigint, inc_max_seq bigint, inc_min_ts timestamp with time zone, inc_max_ts timestamp with time zone, backfill_count bigint, backfill_min_seq bigint, backfill_max_seq bigint, backfill_min_ts timestamp with time zone, backfill_max_ts timestamp with time zone, control_count bigint, inc_ids bigint, backfill_ids bigint, estimated boolean)
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT s.* FROM tube_registry r, tube_stats_of(r.tube, exact) AS s ORDER BY s.tube, s.partition
$$;


COMMENT ON FUNCTION tube.tube_stats(exact integer) IS 'The contents of each partition of each tube';


CREATE FUNCTION tube.tube_stats_of(name text, exact integer DEFAULT 10000) RETURNS TABLE(tube text, predicate text, partition integer, shards integer[], inc_count bigint, inc_min_seq bigint, inc_max_seq bigint, inc_min_ts timestamp with time zone, inc_max_ts timestamp with time zone, backfill_count bigint, backfill_min_seq bigint, backfill_max_seq bigint, backfill_min_ts timestamp with time zone, backfill_max_ts timestamp with time zone, control_count bigint, inc_ids bigint, backfill_ids bigint, estimated boolean)
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    WITH one AS MATERIALIZED (
        SELECT found.t, tube_fault((found.t).tube) AS fault FROM (SELECT tube_find(name) AS t OFFSET 0) AS found
    ), figures AS MATERIALIZED (
        SELECT f.* FROM one, tube_figures(CASE WHEN one.fault IS NULL THEN one.t END, exact) AS f
    ), attached AS (
        SELECT a.shard % (one.t).partitions AS p, array_agg(DISTINCT a.shard ORDER BY a.shard) AS shards
        FROM one, tube_attachment a WHERE a.tube = (one.t).tube GROUP BY 1
    )
    SELECT (one.t).tube, (one.t).predicate, p, coalesce(a.shards, '{}'),
        inc.pods, inc.min_seq, inc.max_seq, inc.min_ts, inc.max_ts,
        bf.pods, bf.min_seq, bf.max_seq, bf.min_ts, bf.max_ts,
        inc.control + bf.control, inc.ids, bf.ids, inc.estimated OR bf.estimated
    FROM one CROSS JOIN LATERAL generate_series(0, (one.t).partitions - 1) AS p
        LEFT JOIN attached a USING (p)
        LEFT JOIN figures inc ON inc.partition = p AND NOT inc.backfill
        LEFT JOIN figures bf ON bf.partition = p AND bf.backfill
    ORDER BY p
$$;


COMMENT ON FUNCTION tube.tube_stats_of(name text, exact integer) IS 'The contents of each partition of a tube';


CREATE FUNCTION tube.tube_table_ensure(tube text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


CREATE FUNCTION tube.tube_table_ensure_attached(tube text, tbl regclass, shard integer DEFAULT NULL::integer, predicate text DEFAULT NULL::text, routing text DEFAULT NULL::text, key name[] DEFAULT NULL::name[], path name[] DEFAULT current_schemas(false)) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    t tube_registry;
    before tube_attachment;
    wanted tube_attachment;
    function text;
    member regclass;
BEGIN
    IF tbl IS NULL THEN
        PERFORM tube_refuse('RT005', 'no table to attach was named', 'name one');
    END IF;
    t := tube_lock(tube);
    PERFORM tube_lock_table(tbl);
    PERFORM tube_check_table(tube, tbl);
    PERFORM tube_partitions_check(t.tube);
    PERFORM tube_triggers_check(t.tube, tbl);  -- if they were off, what was missed stays known
    SELECT * INTO before FROM tube_attachment a WHERE a.tube = t.tube AND a.tbl = tube_table_ensure_attached.tbl;
    wanted := (t.tube, tbl, tbl,
        coalesce(shard, tube_infer_shard(tbl), before.shard, CASE WHEN routing IS NOT NULL THEN 0 END,
            tube_free_shard(t.tube, tbl)),
        predicate, routing,
        CASE WHEN predicate IS NULL AND routing IS NULL THEN '{}' ELSE tube_safe_path(path) END,
        coalesce(key, tube_key_default(tbl, before.key)),
        (SELECT ARRAY[n.nspname, c.relname] FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl));
    IF tube_key_kind(tube_key_types(tbl, wanted.key)) = 'text' AND NOT EXISTS (
            SELECT FROM tube_attachment a WHERE a.tube = t.tube) THEN
        t := tube_keys_ensure(t, 'text');
    END IF;
    PERFORM tube_check_key(t, tbl, wanted.key);
    IF wanted.shard < 0 THEN
        PERFORM tube_refuse('RT005', format('shard %s: a shard is a whole number from 0 up', shard), 'give another shard');
    END IF;
    PERFORM tube_reader_ensure(tbl);
    PERFORM tube_check_expression(tbl, 'predicate', t.predicate, t.path);
    PERFORM tube_check_expression(tbl, 'predicate', predicate, t.path || wanted.path);
    PERFORM tube_check_expression(tbl, 'routing', routing, t.path || wanted.path);
    function := tube_trigger_ensure(t.tube, predicate, routing, wanted.path, tbl, wanted.key);
    FOR member IN SELECT m FROM tube_members(tbl) m LOOP
        PERFORM tube_triggers_ensure(t.tube, member, function, wanted.shard);
        wanted.tbl := member;
        INSERT INTO tube_attachment SELECT wanted.* ON CONFLICT ON CONSTRAINT tube_attachment_pkey DO UPDATE
            SET shard = excluded.shard, predicate = excluded.predicate, routing = excluded.routing,
                path = excluded.path, key = excluded.key, given = excluded.given;
    END LOOP;
    FOR member IN SELECT a.tbl FROM tube_attachment a
        WHERE a.tube = t.tube AND a.root = tube_table_ensure_attached.tbl AND a.tbl NOT IN (SELECT tube_members(a.root))
    LOOP
        PERFORM tube_member_detach(t.tube, member);
    END LOOP;
    PERFORM tube_triggers_note(t.tube, tbl);
    PERFORM tube_triggers_check(t.tube, tbl);  -- they are on from now on, so a backfill that begins later brings in what was missed
    PERFORM tube_trigger_sweep(t.tube);
    PERFORM tube_table_touch_sweep();
    PERFORM tube_table_touch_ensure(tbl);
    UPDATE tube_own_shard o SET given = wanted.given, key = wanted.key
        WHERE o.tube = t.tube AND o.shard = wanted.shard AND o.tbl = tube_table_ensure_attached.tbl;
END
$$;


COMMENT ON FUNCTION tube.tube_table_ensure_attached(tube text, tbl regclass, shard integer, predicate text, routing text, key name[], path name[]) IS 'Attaches a table to a tube, or alters the attachment to be as asked';


CREATE FUNCTION tube.tube_table_ensure_detached(tube text, tbl regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    a tube_attachment;
    member regclass;
BEGIN
    PERFORM tube_lock(x.tube) FROM (
        SELECT y.tube FROM tube_attachment y
        WHERE y.tbl = tube_table_ensure_detached.tbl AND y.tube = coalesce(tube_table_ensure_detached.tube, y.tube)
        ORDER BY y.tube
    ) AS x;
    PERFORM tube_lock_table(tbl);
    FOR a IN SELECT x.* FROM tube_attachment x
        WHERE x.tbl = tube_table_ensure_detached.tbl AND x.tube = coalesce(tube_table_ensure_detached.tube, x.tube)
        ORDER BY x.tube
    LOOP
        IF a.root <> a.tbl THEN
            PERFORM tube_refuse('RT005', format('table %s is attached to tube %L through %s', tbl, a.tube, a.root),
                format('detach %s', a.root));
        END IF;
        FOR member IN SELECT x.tbl FROM tube_attachment x WHERE x.tube = a.tube AND x.root = a.tbl LOOP
            PERFORM tube_member_detach(a.tube, member);
        END LOOP;
        PERFORM tube_backfill_unschedule(a.tube, a.tbl);
        PERFORM tube_backfill_stop(a.tube, a.tbl);
        PERFORM tube_shards_note(b.tube, b.shards) FROM tube_backfill b WHERE b.tube = a.tube AND b.tbl = a.tbl;
        DELETE FROM tube_backfill b WHERE b.tube = a.tube AND b.tbl = a.tbl;
        DELETE FROM tube_missed m WHERE m.tube = a.tube AND m.tbl = a.tbl;
        PERFORM tube_trigger_sweep(a.tube);
    END LOOP;
    PERFORM tube_table_touch_sweep();
    IF EXISTS (SELECT FROM tube_attachment x WHERE x.tbl = tube_table_ensure_detached.tbl AND x.root = x.tbl) THEN
        PERFORM tube_table_touch_ensure(tbl);
    END IF;
END
$$;


COMMENT ON FUNCTION tube.tube_table_ensure_detached(tube text, tbl regclass) IS 'Detaches a table from a tube, or from all (tube NULL)';


CREATE FUNCTION tube.tube_table_to_text(tube text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    EXECUTE format('ALTER TABLE %I ALTER ids TYPE text[] USING ''{}'', ALTER ids SET STORAGE EXTERNAL', tube);
    EXECUTE format('ALTER TABLE %I SET (toast_tuple_target = 8160)', tube);  -- what fits into a page stays in it
END
$$;


CREATE FUNCTION tube.tube_table_touch_call(a tube.tube_attachment) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    t tube_registry := tube_find(a.tube);
    types text[] := tube_key_types(a.tbl, a.key);
    given text := CASE tube_key_kind(types) WHEN 'bigint' THEN '$1' ELSE 'replicad_touched_keys' END;  -- for the columns of the key
    ids text := CASE t.keys WHEN 'bigint' THEN '$1' ELSE 'replicad_touched_keys' END;  -- for the tube
    touch text := format('%I.%I', current_schema(), tube_object_name(a.tube, '_touch'));
    rows text;
BEGIN
    IF a.routing IS NULL THEN
        RETURN format($sql$
    pods := pods + %1$s(%2$s, %3$s, $2, $3, $4);$sql$, touch, a.shard, ids);
    END IF;
    rows := tube_rows_sql(tube_qualified(a.tbl), a.key, t.keys, ' AND ' || tube_key_among_sql(a.key, types, given), a.routing);
    IF tube_runs_as(a.tbl) IS NOT NULL THEN
        rows := tube_rows_sql(tube_qualified(a.tbl), a.key, t.keys,
            ' AND ' || tube_key_among_sql(a.key, types, '{replicad:ids}'), a.routing);
        rows := format('SELECT r.tube_shard, r.id::%s AS id FROM %I.tube_owner_rows(%L::oid::regclass, %L'
            ' || pg_catalog.quote_literal(%s) || %L, %L) AS r', t.keys, current_schema(), a.tbl::oid,
            'SELECT found.tube_shard, found.id, 0 AS n FROM (' || split_part(rows, '{replicad:ids}', 1), given,
            '::' || tube_key_kind(types) || '[]' || split_part(rows, '{replicad:ids}', 2) || ') AS found',
            tube_path_text(a.path));
    END IF;
    RETURN format($sql$
    IF coalesce(cardinality($1), 0) = 0 THEN
        pods := pods + %1$s(%2$s, %4$s, $2, $3, $4);
    ELSE
        pods := pods + (
            SELECT coalesce(sum(%1$s(placed.shard, placed.ids, $2, $3, $4)), 0)
            FROM (
                SELECT coalesce(stored.tube_shard, %2$s) & 2147483647 AS shard,
                    array_agg(given.id ORDER BY given.n) AS ids
                FROM unnest(%4$s) WITH ORDINALITY AS given(id, n) LEFT JOIN (%3$s) AS stored ON stored.id = given.id
                WHERE given.id IS NOT NULL GROUP BY 1 ORDER BY 1
            ) AS placed);
    END IF;$sql$, touch, a.shard, rows, ids);
END
$_$;


CREATE FUNCTION tube.tube_table_touch_ensure(tbl regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    marker text := format('-- replicad: touches the tubes of schema %I', current_schema());
    full_name text;
    calls text;
    path name[];
    types text[];
    kind text;
    texts boolean;
    present text;
    returns regtype := 'bigint';
    body text;
BEGIN
    SELECT format('%I.%I', n.nspname, tube_object_name(c.relname, '_touch')) INTO full_name
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl;
    SELECT string_agg(tube_table_touch_call(a), '' ORDER BY a.tube), (array_agg(tube_key_types(a.tbl, a.key)))[1:1],
            bool_or((tube_find(a.tube)).keys = 'text')
        INTO calls, types, texts
        FROM tube_attachment a WHERE a.tbl = tube_table_touch_ensure.tbl AND a.tbl = a.root;
    types := ARRAY(SELECT unnest(types));
    kind := tube_key_kind(types);
    SELECT array_agg(s) INTO path
        FROM tube_attachment a, unnest(a.path) s
        WHERE a.tbl = tube_table_touch_ensure.tbl AND a.tbl = a.root AND a.routing IS NOT NULL;
    SELECT p.prorettype::regtype INTO returns FROM pg_proc p
        WHERE p.oid = to_regprocedure(format('%s(%s[], character, jsonb, integer)', full_name, kind));
    returns := coalesce(returns, 'bigint');  -- void, if tube_move took it over: programs may have prepared statements with it
    body := format(
        E'\n%s\n#variable_conflict use_column\nDECLARE\n    pods bigint := 0;\n%sBEGIN\n'
        '    PERFORM %I.tube_check_writer(%s);%s\n    RETURN%s;\nEND\n',
        marker, CASE WHEN texts THEN format(
            E'    replicad_touched_keys text[] := ARRAY(SELECT %s FROM unnest($1) WITH ORDINALITY AS g (u, n) WHERE u IS NOT NULL ORDER BY n);\n',
            CASE kind WHEN 'bigint' THEN 'u::text' ELSE tube_key_text_sql(types, 'u') END) END,
        current_schema(), tbl::oid, calls, CASE WHEN returns <> 'void'::regtype THEN ' pods' END);
    present := (SELECT p.prosrc FROM pg_proc p WHERE p.oid = to_regprocedure(format('%s(%s[], character, jsonb, integer)',
        full_name, CASE kind WHEN 'bigint' THEN 'text' ELSE 'bigint' END)));
    IF strpos(present, marker) > 0 THEN  -- for another key
        EXECUTE format('DROP FUNCTION %s(%s[], character, jsonb, integer)',
            full_name, CASE kind WHEN 'bigint' THEN 'text' ELSE 'bigint' END);
    END IF;
    present := (SELECT p.prosrc FROM pg_proc p
        WHERE p.oid = to_regprocedure(format('%s(%s[], character, jsonb, integer)', full_name, kind)));
    IF strpos(present, marker) = 0 THEN
        PERFORM tube_refuse('RT005', format('function %s exists and is not ours', full_name),
            'rename it, or rename the table: attached tables have a function of that name. If it is one of pg-tube: replicad tubes pg-tube');
    ELSIF present IS DISTINCT FROM body THEN
        PERFORM tube_check_function(format('%s(%s[], character, jsonb, integer)', full_name, kind));
        EXECUTE format('CREATE OR REPLACE FUNCTION %s(ids %s[], op character = ''T'', payload jsonb = NULL,'
            ' chunk_size integer = %s) RETURNS %s LANGUAGE plpgsql SECURITY DEFINER SET search_path = %s'
            ' SET row_security = off%s AS %L', full_name, kind, tube_pod_size(kind), returns, tube_path_text(path), tube_fixed_sql(), body);
        EXECUTE format('COMMENT ON FUNCTION %s(%s[], character, jsonb, integer) IS %L', full_name, kind,
            'replicad: touches ids in the tubes that the table is attached to');
        -- Rows are read as the table's owner (tube_owner_rows), so that the owner of this schema, who detaches the table, may have it.
        IF tube_runs_as(tbl) IS NOT NULL AND (SELECT r.rolsuper FROM pg_roles r WHERE r.rolname = current_user) THEN
            PERFORM tube_belong(format('FUNCTION %s(%s[], character, jsonb, integer)', full_name, kind));
        END IF;
    END IF;
END
$_$;


CREATE FUNCTION tube.tube_table_touch_sweep() RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    marker text := format('-- replicad: touches the tubes of schema %I', current_schema());
    stale regprocedure;
BEGIN
    DELETE FROM tube_attachment a WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = a.tbl)
        AND (a.tbl = a.root OR NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = a.root));  -- partitions: tube_partitions_check
    PERFORM tube_shards_note(b.tube, b.shards)
        FROM tube_backfill b WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = b.tbl);
    DELETE FROM tube_backfill b WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = b.tbl);
    FOR stale IN
        WITH named AS MATERIALIZED (  -- each attachment happens here: no function is called for names that are short enough
            SELECT c.relnamespace, CASE WHEN octet_length(c.relname) <= 57 THEN (c.relname || '_touch')::name
                ELSE tube_object_name(c.relname, '_touch') END AS name
            FROM tube_attachment a JOIN pg_class c ON c.oid = a.tbl WHERE a.tbl = a.root
        )
        SELECT p.oid FROM pg_proc p
        WHERE right(p.proname, 6) = '_touch' AND strpos(p.prosrc, E'\n' || marker || E'\n') = 1
            AND (p.pronamespace, p.proname) NOT IN (SELECT n.relnamespace, n.name FROM named n)  -- by a hash
    LOOP
        PERFORM tube_check_function(stale::text);
        EXECUTE format('DROP FUNCTION %s', stale);
    END LOOP;
END
$$;


CREATE FUNCTION tube.tube_tables_of(tube text, shards integer[] DEFAULT NULL::integer[]) RETURNS TABLE(shard integer, tbl text, key name[], attached boolean, relation oid)
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    WITH present AS (
        SELECT a.shard, min(a.tbl::oid::bigint)::oid AS oid FROM tube_attachment a JOIN pg_class c ON c.oid = a.tbl
        WHERE a.tube = $1 AND a.tbl = a.root AND (a.shard = ANY ($2) OR $2 IS NULL)
        GROUP BY a.shard HAVING count(*) = 1 AND bool_and(a.routing IS NULL)
    )
    SELECT p.shard, tube_qualified(p.oid), a.key, true, p.oid
    FROM present p JOIN tube_attachment a ON a.tube = $1 AND a.tbl = p.oid
    UNION ALL
    SELECT o.shard, format('%I.%I', o.given[1], o.given[2]), o.key, false, o.tbl FROM tube_own_shard o
    WHERE o.tube = $1 AND (o.shard = ANY ($2) OR $2 IS NULL)
        AND NOT EXISTS (SELECT FROM tube_attachment a WHERE a.tube = o.tube AND a.shard = o.shard)
    ORDER BY 1
$_$;


COMMENT ON FUNCTION tube.tube_tables_of(tube text, shards integer[]) IS 'Of which table the ids of a shard are';


CREATE FUNCTION tube.tube_term_next() RETURNS bigint
    LANGUAGE sql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT nextval('tube_term_seq') << 24 | ('x' || right(gen_random_uuid()::text, 6))::bit(24)::bigint
$$;


CREATE FUNCTION tube.tube_touch_ensure(tube text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    name text := tube_object_name(tube, '_touch');
    keys text := (tube_find(tube)).keys;
    other text := CASE keys WHEN 'bigint' THEN 'text' ELSE 'bigint' END;
    body text := format($body$
DECLARE
    touched %4$s[] := ARRAY(SELECT u FROM unnest(ids) u WHERE u IS NOT NULL);
    pods bigint;
BEGIN
    PERFORM %2$I.tube_check_touch(shard, op, chunk_size);
    IF touched = '{}' AND payload IS NULL THEN
        RETURN 0;
    END IF;
    INSERT INTO %1$s (op, shard, ids, payload)
    SELECT %3$s, $1, touched[k:k + chunk_size - 1], $4
    FROM generate_series(1, greatest(cardinality(touched), 1), chunk_size) AS k ORDER BY k;
    GET DIAGNOSTICS pods = ROW_COUNT;
    RETURN pods;
END
$body$, tube_relation(tube), current_schema(), tube_op_sql('$3'), keys);
BEGIN
    EXECUTE format('DROP FUNCTION IF EXISTS %I(integer, %s[], character, jsonb, integer)', name, other);
    IF NOT EXISTS (SELECT FROM pg_proc p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname = name
            AND p.prosrc = body) THEN
        EXECUTE format('CREATE OR REPLACE FUNCTION %I(shard integer, ids %s[], op character, payload jsonb = NULL,'
            ' chunk_size integer = %s) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_temp'
            ' AS %L', name, keys, tube_pod_size(keys), body);
        EXECUTE format('COMMENT ON FUNCTION %I(integer, %s[], character, jsonb, integer) IS %L',
            name, keys, 'replicad: puts ids or a control pod into tube ' || tube);
        PERFORM tube_belong(format('FUNCTION %I(integer, %s[], character, jsonb, integer)', name, keys));
    END IF;
END
$_$;


CREATE FUNCTION tube.tube_trigger_body(tube text, key name[], kind text, predicate text, routing text) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    rows_now text := tube_rows_sql('tube_new_rows', key, kind, predicate, routing);
    rows_before text := tube_rows_sql('tube_old_rows', key, kind, predicate, routing);
    rows_either text := format('(%1$s) UNION ALL ((%2$s) EXCEPT (%1$s))', rows_now, rows_before);
    event record;
    body text := '';
BEGIN
    FOR event IN SELECT * FROM (VALUES
        ('UPDATE', 'U', rows_now, rows_either, rows_before, 'tube_new_rows'),
        ('INSERT', 'I', rows_now, rows_now, NULL, 'tube_new_rows'),
        ('DELETE', 'D', rows_before, rows_before, NULL, 'tube_old_rows')
    ) AS e (name, op, few, rows, few_before, touched) LOOP
        body := body || format(E'    IF TG_OP = %L THEN%s%s;\n        RETURN NULL;\n    END IF;\n',
            event.name,
            CASE WHEN routing IS NULL THEN
                tube_few_sql(tube, tube_op_sql(quote_literal(event.op)), event.few, event.few_before)
                || tube_many_sql(tube, tube_op_sql(quote_literal(event.op)), event.few, event.few_before, event.touched,
                    tube_pod_size(kind))
            END,
            tube_noted_sql(tube, tube_insert_sql(tube, tube_op_sql(quote_literal(event.op)), 'TG_ARGV[0]::integer',
                event.rows, tube_pod_size(kind)::text, routed => routing IS NOT NULL)));
    END LOOP;
    RETURN format(E'\n#variable_conflict use_column\nBEGIN\n%s    RETURN NULL;\nEND\n', body);
END
$_$;


CREATE FUNCTION tube.tube_trigger_ensure(tube text, predicate text, routing text, path name[], tbl regclass DEFAULT NULL::regclass, key name[] DEFAULT '{id}'::name[]) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    t tube_registry := tube_find(tube);
    owner oid := tube_runs_as(tbl);
    fixed boolean := coalesce(predicate, routing, t.predicate) IS NOT NULL OR t.keys = 'text';
    own boolean := predicate IS NOT NULL OR routing IS NOT NULL OR owner IS NOT NULL OR key <> '{id}';
    -- It does not depend on what tube_ensure_exists can change: that replaces the function, and not the triggers.
    hash text := left(md5(concat_ws(E'\n', coalesce(predicate, '-'), coalesce(routing, '-'), path::text,
        pg_get_userbyid(owner), nullif(key, '{id}')::text)), 12);
    name text := tube_object_name(tube, CASE WHEN own THEN '_trigger_' || hash ELSE '_trigger' END);
    body text := tube_trigger_body(tube, key, t.keys, tube_where(t.predicate, predicate), routing);
    setting text := tube_path_text(CASE WHEN own THEN t.path || path ELSE t.path END);
BEGIN
    IF NOT EXISTS (SELECT FROM pg_proc p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname = name
            AND p.prosrc = body AND p.prosecdef
            AND p.proconfig = ARRAY['search_path=' || setting] || CASE WHEN fixed THEN tube_fixed() ELSE '{}' END
            AND p.proowner = coalesce(owner, p.proowner)
            AND obj_description(p.oid, 'pg_proc') = 'replicad: touches tube ' || tube) THEN
        PERFORM tube_check_function(format('%I()', name));
        EXECUTE format('CREATE OR REPLACE FUNCTION %I() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER'
            ' SET search_path = %s%s AS %L', name, setting, CASE WHEN fixed THEN tube_fixed_sql() END, body);
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %I() FROM PUBLIC', name);
        EXECUTE format('COMMENT ON FUNCTION %I() IS %L', name, 'replicad: touches tube ' || tube);
        IF owner IS NULL AND coalesce(predicate, routing, t.predicate) IS NULL THEN  -- nobody's code is in it
            PERFORM tube_belong(format('FUNCTION %I()', name));
        ELSIF owner IS NOT NULL THEN
            PERFORM tube_give(format('%I.%I()', current_schema(), name), owner);
            EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', current_schema(), pg_get_userbyid(owner));
            EXECUTE format('GRANT USAGE ON SEQUENCE tube_seq TO %I', pg_get_userbyid(owner));
            EXECUTE format('GRANT INSERT (op, shard, ids, payload) ON %I TO %I', tube, pg_get_userbyid(owner));
        END IF;
    END IF;
    RETURN format('%I.%I', current_schema(), name);
END
$$;


CREATE FUNCTION tube.tube_trigger_marks(of_tube text, of_root regclass) RETURNS TABLE(tube text, tbl oid, root oid, marks text, fires boolean)
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH chosen AS MATERIALIZED (
        SELECT a.tube, a.tbl, a.root FROM tube_attachment a
        WHERE (of_tube IS NULL OR a.tube = of_tube) AND (of_root IS NULL OR a.root = of_root)
            AND EXISTS (SELECT FROM pg_class c WHERE c.oid = a.tbl)
    ), present AS MATERIALIZED (
        SELECT c.tube, c.tbl, g.* FROM chosen c CROSS JOIN LATERAL (
            SELECT t.oid, t.xmin, t.tgfoid, t.tgargs, t.tgtype, t.tgenabled IN ('O', 'A') AND t.tgqual IS NULL
                AND t.tgtype & 1 = 0 AS fires
            FROM pg_trigger t WHERE t.tgrelid = c.tbl OFFSET 0
        ) AS g
    ), functions AS MATERIALIZED (
        SELECT p.oid, p.proname = 'tube_truncate_trigger' AS truncates, d.description
        FROM (SELECT DISTINCT x.tgfoid FROM present x) AS used
            JOIN pg_proc p ON p.oid = used.tgfoid AND p.pronamespace = quote_ident(current_schema())::regnamespace
            LEFT JOIN pg_description d ON d.objoid = p.oid AND d.classoid = 'pg_proc'::regclass AND d.objsubid = 0
    ), marked AS (
        SELECT x.tube, x.tbl, string_agg(x.oid || ':' || x.xmin, ' ' ORDER BY x.oid) AS marks,
            bit_or(CASE WHEN x.fires THEN x.tgtype::integer END) AS events
        FROM present x JOIN functions f ON f.oid = x.tgfoid
        WHERE CASE WHEN f.truncates THEN x.tgargs = convert_to(x.tube, getdatabaseencoding()) || decode('00', 'hex')
            ELSE f.description = 'replicad: touches tube ' || x.tube END
        GROUP BY 1, 2
    )
    SELECT c.tube, c.tbl::oid, c.root::oid, coalesce(m.marks, ''), coalesce(m.events, 0) & 60 = 60
    FROM chosen c LEFT JOIN marked m ON m.tube = c.tube AND m.tbl = c.tbl;
END
$$;


CREATE FUNCTION tube.tube_trigger_name(tbl regclass, tube text, moment text) RETURNS name
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT tube_object_name(format('%s_%s', c.relname, tube), format('_%s_trigger', moment))
    FROM pg_class c WHERE c.oid = tbl
$$;


CREATE FUNCTION tube.tube_trigger_sweep(tube text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    own name := tube_object_name(tube, '_trigger');
    stale regprocedure;
BEGIN
    FOR stale IN
        WITH ours AS MATERIALIZED (  -- few: no index leads from a function to its triggers
            SELECT p.oid FROM pg_proc p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.prorettype = 'trigger'::regtype
                AND p.proname <> own AND 'replicad: touches tube ' || tube = (SELECT d.description FROM pg_description d
                    WHERE d.objoid = p.oid AND d.classoid = 'pg_proc'::regclass AND d.objsubid = 0)
        )
        SELECT o.oid FROM ours o WHERE NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgfoid = o.oid)
    LOOP
        PERFORM tube_check_function(stale::text);
        EXECUTE format('DROP FUNCTION %s', stale);
    END LOOP;
END
$$;


CREATE FUNCTION tube.tube_triggers_check(of_tube text DEFAULT NULL::text, of_root regclass DEFAULT NULL::regclass) RETURNS void
    LANGUAGE sql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    WITH seen AS MATERIALIZED (
        SELECT m.*, s.marks IS NULL AS fresh, s.marks <> m.marks AS changed
        FROM tube_trigger_marks($1, $2) m LEFT JOIN tube_trigger_seen s ON s.tube = m.tube AND s.tbl = m.tbl
    ), stored AS (
        INSERT INTO tube_trigger_seen AS s SELECT m.tube, m.tbl, m.marks FROM seen m WHERE m.fresh OR m.changed
        ON CONFLICT ON CONSTRAINT tube_trigger_seen_pkey DO UPDATE SET marks = excluded.marks
    ), tables AS (
        SELECT m.tube, m.root, bool_or(NOT m.fires) AS off, bool_or(m.changed IS TRUE) AS changed FROM seen m GROUP BY 1, 2
    ), over AS (
        UPDATE tube_missed x SET lasts = false, seen_at = clock_timestamp() FROM tables t
        WHERE x.tube = t.tube AND x.tbl = t.root AND x.cause = 'triggers' AND x.lasts AND NOT t.off
    )
    INSERT INTO tube_missed AS x (tube, cause, tbl, lasts)
    SELECT t.tube, 'triggers', t.root, t.off FROM tables t LEFT JOIN tube_missed x ON x.tube = t.tube AND x.tbl = t.root
        AND x.cause = 'triggers' AND x.healed_at IS NULL
    WHERE (t.off AND x.lasts IS NOT TRUE) OR (t.changed AND NOT t.off AND x.lasts IS NOT TRUE)
    ON CONFLICT ON CONSTRAINT tube_missed_pkey DO UPDATE SET lasts = excluded.lasts, seen_at = clock_timestamp(), healed_at = NULL,
        since = CASE WHEN x.healed_at IS NULL THEN x.since ELSE clock_timestamp() END
$_$;


CREATE FUNCTION tube.tube_triggers_ensure(tube text, tbl regclass, function text, shard integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    wanted record;
    present record;
    replaced name;
    kept boolean;
BEGIN
    FOR wanted IN
        SELECT tube_trigger_name(tbl, tube, w.moment) AS name, w.*, to_regprocedure(w.function || '()') AS called
        FROM (VALUES
            (4, 'after_insert', 'AFTER INSERT', 'REFERENCING NEW TABLE AS tube_new_rows', function, shard::text),
            (16, 'after_update', 'AFTER UPDATE', 'REFERENCING NEW TABLE AS tube_new_rows OLD TABLE AS tube_old_rows',
                function, shard::text),
            (8, 'after_delete', 'AFTER DELETE', 'REFERENCING OLD TABLE AS tube_old_rows', function, shard::text),
            (32, 'before_truncate', 'BEFORE TRUNCATE', '', format('%I.tube_truncate_trigger', current_schema()), tube)
        ) AS w (bit, moment, event, transitions, function, argument)
    LOOP
        replaced := NULL;
        kept := false;
        FOR present IN SELECT * FROM (
            SELECT x.*, x.fires AND (x.function, x.argument) = (wanted.called, wanted.argument) AS fits
            FROM tube_triggers_of(tube, tbl) x WHERE x.event = wanted.bit
        ) AS judged ORDER BY judged.fits DESC NULLS LAST, judged.name
        LOOP
            IF kept OR replaced IS NOT NULL THEN
                EXECUTE format('DROP TRIGGER %I ON %s', present.name, tube_qualified(tbl));
            ELSIF present.fits THEN
                kept := true;
            ELSE
                replaced := present.name;
            END IF;
        END LOOP;
        CONTINUE WHEN kept;
        IF replaced IS NULL THEN  -- a trigger of the user may have the name
            FOR n IN 1..1000 LOOP  -- the first name that is free
                replaced := CASE WHEN n = 1 THEN wanted.name ELSE tube_trigger_name(tbl, tube, wanted.moment || '_' || n) END;
                EXIT WHEN NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = tbl AND g.tgname = replaced);
            END LOOP;
        END IF;
        -- Replacing a trigger enables it, and does not make readers of the table wait as DROP TRIGGER does.
        EXECUTE format('CREATE OR REPLACE TRIGGER %I %s ON %s %s FOR EACH STATEMENT EXECUTE FUNCTION %s(%L)',
            replaced, wanted.event, tube_qualified(tbl), wanted.transitions, wanted.function,
            wanted.argument);
    END LOOP;
END
$$;


CREATE FUNCTION tube.tube_triggers_note(of_tube text, of_root regclass DEFAULT NULL::regclass) RETURNS void
    LANGUAGE sql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    INSERT INTO tube_trigger_seen AS s SELECT m.tube, m.tbl, m.marks FROM tube_trigger_marks($1, $2) m
    ON CONFLICT ON CONSTRAINT tube_trigger_seen_pkey DO UPDATE SET marks = excluded.marks WHERE s.marks <> excluded.marks
$_$;


CREATE FUNCTION tube.tube_triggers_of(tube text, tbl regclass) RETURNS TABLE(name name, event integer, function regprocedure, argument text, fires boolean)
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT g.tgname, g.tgtype & 60, p.oid::regprocedure,
        CASE WHEN g.tgnargs = 1 THEN
            convert_from(substring(g.tgargs FROM 1 FOR length(g.tgargs) - 1), getdatabaseencoding()) END,
        g.tgenabled IN ('O', 'A') AND g.tgqual IS NULL AND g.tgtype & 1 = 0
    FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
    WHERE g.tgrelid = $2 AND p.pronamespace = quote_ident(current_schema())::regnamespace
        AND ('replicad: touches tube ' || $1 = (SELECT d.description FROM pg_description d
                WHERE d.objoid = p.oid AND d.classoid = 'pg_proc'::regclass AND d.objsubid = 0)
            OR p.proname = 'tube_truncate_trigger'
                AND g.tgargs = convert_to($1, getdatabaseencoding()) || decode('00', 'hex'));
END
$_$;


CREATE FUNCTION tube.tube_truncate_trigger() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'tube', 'pg_temp'
    SET row_security TO 'off'
    SET "TimeZone" TO 'UTC'
    SET "DateStyle" TO 'ISO, MDY'
    SET "IntervalStyle" TO 'postgres'
    SET extra_float_digits TO '1'
    SET bytea_output TO 'hex'
    SET xmlbinary TO 'base64'
    SET lc_monetary TO 'C'
    SET lc_numeric TO 'C'
    SET lc_time TO 'C'
    SET xmloption TO 'content'
    SET array_nulls TO 'on'
    SET transform_null_equals TO 'off'
    SET standard_conforming_strings TO 'on'
    SET backslash_quote TO 'safe_encoding'
    AS $$
DECLARE
    a tube_attachment;
    t tube_registry;
    source text;
    rows text;
    touch text;
BEGIN
    SELECT * INTO a FROM tube_attachment x WHERE x.tube = TG_ARGV[0] AND x.tbl = TG_RELID;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        PERFORM tube_refuse('RT005',
            format('table %s is attached to tube %L, so TRUNCATE needs the isolation level READ COMMITTED, and this '
                'transaction is %s: rows that were committed after it began would be removed and not recorded',
                TG_RELID::regclass, a.tube, upper(current_setting('transaction_isolation'))),
            'run TRUNCATE in a transaction of its own at READ COMMITTED, or use DELETE');
    END IF;
    t := tube_find(a.tube);
    SELECT format('(SELECT * FROM %s WHERE tableoid = ANY (%L::oid[]))', tube_qualified(TG_RELID), array_agg(m::oid))
        INTO source
        FROM tube_members(TG_RELID) m
        WHERE m = TG_RELID OR NOT EXISTS (SELECT FROM tube_attachment x WHERE x.tube = a.tube AND x.tbl = m);
    rows := tube_rows_sql(source, a.key, t.keys, tube_where(t.predicate, a.predicate), a.routing);
    IF tube_runs_as(TG_RELID) IS NOT NULL THEN
        rows := format('SELECT r.tube_shard, r.id::%s AS id FROM %I.tube_owner_rows(%L::oid::regclass, %L, %L) AS r', t.keys,
            current_schema(), TG_RELID, format('SELECT %s AS tube_shard, found.id, 0 AS n FROM (%s) AS found',
                CASE WHEN a.routing IS NULL THEN 'NULL' ELSE 'found.tube_shard' END, rows),
            tube_path_text(t.path || a.path));
    END IF;
    touch := tube_insert_sql(a.tube, tube_op_sql('''D'''), a.shard::text, rows, tube_pod_size(t.keys)::text,
        routed => a.routing IS NOT NULL);
    PERFORM set_config('search_path', tube_path_text(t.path || a.path), true);
    EXECUTE touch;
    RETURN NULL;
END
$$;


CREATE FUNCTION tube.tube_where(VARIADIC predicates text[]) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT coalesce(string_agg(E' AND (\n' || p || E'\n)', '' ORDER BY n), '')
    FROM unnest(predicates) WITH ORDINALITY AS given(p, n) WHERE p IS NOT NULL
$$;


CREATE FUNCTION tube.tube_worker_beat(tube text, worker text, ttl interval, expired bigint[], OUT partitions integer, OUT most integer, OUT free integer, OUT workers integer) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
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


CREATE FUNCTION tube.tube_writers() RETURNS TABLE(virtualtransaction text, pid integer)
    LANGUAGE sql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT DISTINCT l.virtualtransaction, l.pid
    FROM pg_locks l
    WHERE l.locktype = 'relation' AND l.granted AND l.mode = 'RowExclusiveLock'
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.relation IN (
            SELECT to_regclass(format('%I.%I', current_schema(), r.tube)) FROM tube_registry r
            UNION ALL SELECT a.tbl FROM tube_attachment a)
        AND l.pid IS DISTINCT FROM pg_backend_pid()
$$;


CREATE SEQUENCE replicad.cache_invalidation_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


ALTER SEQUENCE replicad.cache_invalidation_id_seq OWNED BY replicad.cache_invalidation.id;


CREATE TABLE replicad.cache_version (
    version integer NOT NULL,
    serves integer NOT NULL,
    digest text NOT NULL,
    installed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE replicad.cache_version IS 'replicad: what is installed in this schema';


CREATE TABLE replicad.federation_destination (
    source text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    last_successful_stream_ordering bigint DEFAULT 0 NOT NULL,
    last_successful_part integer DEFAULT 0 NOT NULL,
    serial bigint DEFAULT 0 NOT NULL,
    txn_id text,
    txn_ts bigint,
    txn_stream_ordering bigint,
    txn_part integer,
    txn_edus text[],
    txn_edu_ids bigint[],
    txn_pdus text[],
    failures integer DEFAULT 0 NOT NULL,
    failing_since timestamp with time zone,
    retry_at timestamp with time zone,
    last_error text,
    catching_up boolean DEFAULT false NOT NULL,
    txn_aside json
)
WITH (fillfactor='60');


COMMENT ON TABLE replicad.federation_destination IS 'replicad sender: destinations, how far each has got, and their back-off';


CREATE TABLE replicad.federation_destination_room (
    source text NOT NULL COLLATE pg_catalog."C",
    destination text NOT NULL COLLATE pg_catalog."C",
    stream_ordering bigint NOT NULL,
    part integer NOT NULL,
    room text COLLATE pg_catalog."C"
)
WITH (autovacuum_vacuum_scale_factor='0.05');


COMMENT ON TABLE replicad.federation_destination_room IS 'replicad sender: the facts that each destination has yet to take';


CREATE TABLE replicad.federation_edu (
    id bigint NOT NULL,
    source text NOT NULL COLLATE pg_catalog."C",
    destination text NOT NULL COLLATE pg_catalog."C",
    key text COLLATE pg_catalog."C",
    body json NOT NULL
);


COMMENT ON TABLE replicad.federation_edu IS 'replicad sender: updates that each destination has yet to take';


ALTER TABLE replicad.federation_edu ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME replicad.federation_edu_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);


CREATE TABLE replicad.federation_fact (
    source text NOT NULL COLLATE pg_catalog."C",
    stream_ordering bigint NOT NULL,
    part integer NOT NULL,
    body json NOT NULL
);


COMMENT ON TABLE replicad.federation_fact IS 'replicad sender: facts that some destination has yet to take';


CREATE TABLE replicad.federation_parked (
    id bigint NOT NULL,
    source text NOT NULL COLLATE pg_catalog."C",
    destination text NOT NULL COLLATE pg_catalog."C",
    stream_ordering bigint,
    part integer,
    room text COLLATE pg_catalog."C",
    body json NOT NULL,
    reason text NOT NULL,
    parked_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    wanted boolean DEFAULT false NOT NULL
);


COMMENT ON TABLE replicad.federation_parked IS 'replicad sender: what destinations refuse';


ALTER TABLE replicad.federation_parked ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME replicad.federation_parked_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);


CREATE TABLE replicad.federation_sender (
    source text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    stream text NOT NULL COLLATE pg_catalog."C",
    token bigint,
    senders text[] NOT NULL,
    epoch text
)
WITH (fillfactor='20');


COMMENT ON TABLE replicad.federation_sender IS 'replicad sender: how far each sender has recorded each stream';


CREATE TABLE replicad.federation_version (
    version integer NOT NULL,
    serves integer NOT NULL,
    digest text NOT NULL,
    installed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE replicad.federation_version IS 'replicad: what is installed in this schema';


CREATE TABLE replicad.presence_daemon (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    name text NOT NULL,
    beat bigint DEFAULT 1 NOT NULL,
    buried boolean DEFAULT false NOT NULL,
    enlisted_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
)
WITH (fillfactor='50');


COMMENT ON TABLE replicad.presence_daemon IS 'replicad: the daemons that write presence, each with its beat';


CREATE TABLE replicad.presence_seen (
    user_id text NOT NULL COLLATE pg_catalog."C",
    daemon uuid NOT NULL
);


COMMENT ON TABLE replicad.presence_seen IS 'replicad: which users sync at which daemon';


CREATE TABLE replicad.presence_setting (
    singleton boolean DEFAULT true NOT NULL,
    grace interval DEFAULT '00:00:30'::interval NOT NULL,
    lost_grace interval DEFAULT '00:00:30'::interval NOT NULL,
    ttl interval DEFAULT '00:00:15'::interval NOT NULL,
    ip_retention interval DEFAULT '28 days'::interval NOT NULL,
    CONSTRAINT presence_setting_grace_check CHECK ((grace >= '00:00:00'::interval)),
    CONSTRAINT presence_setting_ip_retention_check CHECK ((ip_retention > '00:00:00'::interval)),
    CONSTRAINT presence_setting_lost_grace_check CHECK ((lost_grace >= '00:00:00'::interval)),
    CONSTRAINT presence_setting_singleton_check CHECK (singleton),
    CONSTRAINT presence_setting_ttl_check CHECK ((ttl >= '00:00:00.3'::interval))
);


COMMENT ON TABLE replicad.presence_setting IS 'replicad: the settings of presence; use presence_enable()';


CREATE TABLE replicad.presence_stream (
    id bigint NOT NULL,
    user_id text NOT NULL COLLATE pg_catalog."C",
    state text NOT NULL,
    last_active_ts bigint NOT NULL,
    last_federation_update_ts bigint NOT NULL,
    last_user_sync_ts bigint NOT NULL,
    status_msg text,
    currently_active boolean NOT NULL,
    CONSTRAINT presence_stream_state_check CHECK ((state = ANY (ARRAY['online'::text, 'offline'::text])))
);


COMMENT ON TABLE replicad.presence_stream IS 'replicad: the stream of who came online and who went offline';


ALTER TABLE replicad.presence_stream ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME replicad.presence_stream_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);


CREATE TABLE replicad.presence_user (
    user_id text NOT NULL COLLATE pg_catalog."C",
    told bigint,
    last_sync bigint NOT NULL
);


COMMENT ON TABLE replicad.presence_user IS 'replicad: the users that are online';


CREATE TABLE replicad.presence_user_ip (
    key bytea NOT NULL,
    user_id text NOT NULL COLLATE pg_catalog."C",
    ip text NOT NULL,
    device_id text,
    user_agent text NOT NULL,
    token_sha256 bytea,
    last_seen bigint NOT NULL,
    stored_at timestamp with time zone NOT NULL
);


COMMENT ON TABLE replicad.presence_user_ip IS 'replicad: from where users were seen last';


CREATE TABLE replicad.presence_version (
    version integer NOT NULL,
    serves integer NOT NULL,
    digest text NOT NULL,
    installed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE replicad.presence_version IS 'replicad: what is installed in this schema';


CREATE SEQUENCE replicad.redis_beat_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


COMMENT ON SEQUENCE replicad.redis_beat_seq IS 'replicad: the terms and beats of those who publish to Redis';


CREATE TABLE replicad.redis_publisher (
    server text NOT NULL,
    holder text,
    term bigint NOT NULL,
    beat bigint NOT NULL,
    tokens jsonb DEFAULT '{}'::jsonb NOT NULL,
    renewed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
)
WITH (fillfactor='50');


COMMENT ON TABLE replicad.redis_publisher IS 'replicad: which daemon publishes to Redis, and up to where';


CREATE TABLE replicad.redis_version (
    version integer NOT NULL,
    serves integer NOT NULL,
    digest text NOT NULL,
    installed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE replicad.redis_version IS 'replicad: what is installed in this schema';


CREATE TABLE replicad.sharding_version (
    version integer NOT NULL,
    serves integer NOT NULL,
    digest text NOT NULL,
    installed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE replicad.sharding_version IS 'replicad: what is installed in this schema';


CREATE TABLE replicad.stream_ack (
    stream smallint NOT NULL,
    instance text NOT NULL COLLATE pg_catalog."C",
    token bigint NOT NULL,
    generation text NOT NULL,
    acked_at timestamp with time zone NOT NULL
)
WITH (fillfactor='50');


COMMENT ON TABLE replicad.stream_ack IS 'replicad: what senders have acknowledged';


CREATE TABLE replicad.stream_change_member (
    stream smallint NOT NULL,
    member oid NOT NULL,
    marks text NOT NULL
);


COMMENT ON TABLE replicad.stream_change_member IS 'replicad: the tables with triggers of a stream of changes';


CREATE UNLOGGED TABLE replicad.stream_daemon (
    id uuid NOT NULL,
    name text NOT NULL,
    pid integer NOT NULL,
    host inet,
    addresses text[] NOT NULL,
    version text NOT NULL,
    started_at timestamp with time zone NOT NULL,
    seen_at timestamp with time zone NOT NULL
)
WITH (fillfactor='50');


COMMENT ON TABLE replicad.stream_daemon IS 'replicad: the daemons of this database, each with its last beat';


CREATE TABLE replicad.stream_kept (
    stream smallint NOT NULL,
    generation integer NOT NULL,
    lowest bigint,
    published bigint NOT NULL
);


COMMENT ON TABLE replicad.stream_kept IS 'replicad: the oldest row of each stream, to notice that rows were removed';


CREATE TABLE replicad.stream_mark (
    stream smallint NOT NULL,
    at timestamp with time zone NOT NULL,
    "position" bigint NOT NULL,
    hourly boolean NOT NULL
);


COMMENT ON TABLE replicad.stream_mark IS 'replicad: positions of the past, to trim by age';


CREATE TABLE replicad.stream_position (
    stream smallint NOT NULL,
    writer integer NOT NULL,
    "position" bigint NOT NULL,
    published_at timestamp with time zone NOT NULL
)
WITH (fillfactor='50');


COMMENT ON TABLE replicad.stream_position IS 'replicad: last published position per stream and writer (0: linear)';


CREATE TABLE replicad.stream_relay_key (
    single boolean DEFAULT true NOT NULL,
    key text DEFAULT replace(((gen_random_uuid())::text || (gen_random_uuid())::text), '-'::text, ''::text) NOT NULL,
    CONSTRAINT stream_relay_key_key_check CHECK ((length(key) >= 32)),
    CONSTRAINT stream_relay_key_single_check CHECK (single)
);


COMMENT ON TABLE replicad.stream_relay_key IS 'A secret of the daemons: nobody else may read it';


CREATE TABLE replicad.stream_reservation_key (
    single boolean DEFAULT true NOT NULL,
    key bytea DEFAULT sha256(convert_to(((gen_random_uuid())::text || (gen_random_uuid())::text), 'UTF8'::name)) NOT NULL,
    CONSTRAINT stream_reservation_key_key_check CHECK ((length(key) = 32)),
    CONSTRAINT stream_reservation_key_single_check CHECK (single)
);


COMMENT ON TABLE replicad.stream_reservation_key IS 'A secret of replicad: no role of a user may read it. Never change it';


CREATE TABLE replicad.stream_shape (
    stream smallint NOT NULL,
    number integer NOT NULL,
    shape bigint NOT NULL,
    since bigint NOT NULL,
    line text NOT NULL
);


COMMENT ON TABLE replicad.stream_shape IS 'replicad: the shapes of tables whose changes are streams';


CREATE TABLE replicad.stream_snapshot (
    stream smallint NOT NULL,
    number integer NOT NULL,
    condition text,
    path name[] NOT NULL,
    member regclass,
    after text[],
    rows bigint DEFAULT 0 NOT NULL,
    asked_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    finished_at timestamp with time zone
);


COMMENT ON TABLE replicad.stream_snapshot IS 'replicad: snapshots of tables whose changes are streams';


CREATE TABLE replicad.stream_version (
    version integer NOT NULL,
    serves integer NOT NULL,
    digest text NOT NULL,
    installed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE replicad.stream_version IS 'replicad: what is installed in this schema';


CREATE TABLE replicad.writer_member (
    stream smallint NOT NULL,
    instance text NOT NULL COLLATE pg_catalog."C",
    term bigint NOT NULL,
    beat bigint NOT NULL,
    ttl interval NOT NULL,
    address text,
    leaving boolean DEFAULT false NOT NULL,
    joined_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    beat_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
)
WITH (fillfactor='50');


COMMENT ON TABLE replicad.writer_member IS 'replicad: writers that share a stream, and their signs of life';


CREATE TABLE replicad.writer_slot (
    stream smallint NOT NULL,
    slot integer NOT NULL,
    owner text COLLATE pg_catalog."C",
    term bigint NOT NULL,
    moved_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT writer_slot_slot_check CHECK ((slot >= 0))
)
WITH (fillfactor='50');


COMMENT ON TABLE replicad.writer_slot IS 'replicad: which writer owns which slot of a stream''s keys, fenced by the term';


CREATE TABLE tube.tube_attempt (
    tube text NOT NULL,
    partitions integer NOT NULL,
    partition integer NOT NULL,
    note jsonb NOT NULL
);


COMMENT ON TABLE tube.tube_attempt IS 'replicad: what the readers of partitions were doing when they noted it';


CREATE TABLE tube.tube_lease (
    tube text NOT NULL,
    partitions integer NOT NULL,
    partition integer NOT NULL,
    holder text NOT NULL,
    term bigint NOT NULL,
    beat bigint NOT NULL,
    ttl interval NOT NULL,
    generation text NOT NULL,
    CONSTRAINT tube_lease_check CHECK (((partition >= 0) AND (partition <= (partitions - 1))))
);


COMMENT ON TABLE tube.tube_lease IS 'replicad: leases of partitions, fenced by their term';


CREATE TABLE tube.tube_low (
    tube text NOT NULL,
    partitions integer NOT NULL,
    partition integer NOT NULL,
    backfill boolean NOT NULL,
    seq bigint NOT NULL
);


COMMENT ON TABLE tube.tube_low IS 'replicad: below which seq a partition has no pods any more';


CREATE TABLE tube.tube_missed (
    tube text NOT NULL,
    cause text NOT NULL,
    tbl oid NOT NULL,
    after bigint,
    upto bigint,
    lasts boolean DEFAULT false NOT NULL,
    since timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    seen_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    healed_at timestamp with time zone
);


COMMENT ON TABLE tube.tube_missed IS 'replicad: changes that a tube may have missed; a backfill ends them';


CREATE TABLE tube.tube_noted (
    one boolean DEFAULT true NOT NULL,
    number bigint DEFAULT 1 NOT NULL,
    positions jsonb NOT NULL,
    noted_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT tube_noted_one_check CHECK (one)
);


COMMENT ON TABLE tube.tube_noted IS 'replicad: the positions of tubes up to which no pod is lost by a restore of this database';


CREATE TABLE tube.tube_own_shard (
    tube text NOT NULL,
    shard integer NOT NULL,
    tbl oid NOT NULL,
    given name[] NOT NULL,
    key name[] NOT NULL
);


COMMENT ON TABLE tube.tube_own_shard IS 'replicad: of which table the ids of a shard are, in tubes of many tables';


ALTER TABLE tube.tube_parked ALTER COLUMN parked ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME tube.tube_parked_parked_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);


CREATE TABLE tube.tube_report (
    tube text NOT NULL,
    reporter text NOT NULL,
    counts jsonb NOT NULL,
    reported_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE tube.tube_report IS 'replicad: what readers of tubes have counted';


CREATE SEQUENCE tube.tube_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


COMMENT ON SEQUENCE tube.tube_seq IS 'replicad: seq of the pods of all tubes; must keep CACHE 1';


CREATE TABLE tube.tube_shard (
    tube text NOT NULL,
    shard integer NOT NULL
);


COMMENT ON TABLE tube.tube_shard IS 'replicad: the shards of which a downstream may hold rows';


CREATE SEQUENCE tube.tube_term_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


COMMENT ON SEQUENCE tube.tube_term_seq IS 'replicad: terms and beats of all leases';


CREATE TABLE tube.tube_trigger_seen (
    tube text NOT NULL,
    tbl oid NOT NULL,
    marks text NOT NULL
);


COMMENT ON TABLE tube.tube_trigger_seen IS 'replicad: the triggers of attached tables, to notice that they were off';


CREATE TABLE tube.tube_version (
    version integer NOT NULL,
    serves integer NOT NULL,
    digest text NOT NULL,
    installed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE tube.tube_version IS 'replicad: what is installed in this schema';


CREATE TABLE tube.tube_worker (
    tube text NOT NULL,
    worker text NOT NULL,
    seen_at timestamp with time zone NOT NULL,
    ttl interval NOT NULL
);


COMMENT ON TABLE tube.tube_worker IS 'replicad: the living workers that divide the partitions of tubes';


ALTER TABLE ONLY replicad.cache_invalidation ALTER COLUMN id SET DEFAULT nextval('replicad.cache_invalidation_id_seq'::regclass);


ALTER TABLE ONLY replicad.cache_invalidation
    ADD CONSTRAINT cache_invalidation_pkey PRIMARY KEY (id);


ALTER TABLE ONLY replicad.federation_destination
    ADD CONSTRAINT federation_destination_pkey PRIMARY KEY (source, name);


ALTER TABLE ONLY replicad.federation_destination_room
    ADD CONSTRAINT federation_destination_room_pkey PRIMARY KEY (source, destination, stream_ordering, part);


ALTER TABLE ONLY replicad.federation_edu
    ADD CONSTRAINT federation_edu_pkey PRIMARY KEY (id);


ALTER TABLE ONLY replicad.federation_edu
    ADD CONSTRAINT federation_edu_source_destination_key_key UNIQUE (source, destination, key);


ALTER TABLE ONLY replicad.federation_fact
    ADD CONSTRAINT federation_fact_pkey PRIMARY KEY (source, stream_ordering, part);


ALTER TABLE ONLY replicad.federation_parked
    ADD CONSTRAINT federation_parked_pkey PRIMARY KEY (id);


ALTER TABLE ONLY replicad.federation_sender
    ADD CONSTRAINT federation_sender_pkey PRIMARY KEY (source, name, stream);


ALTER TABLE ONLY replicad.presence_daemon
    ADD CONSTRAINT presence_daemon_pkey PRIMARY KEY (id);


ALTER TABLE ONLY replicad.presence_seen
    ADD CONSTRAINT presence_seen_pkey PRIMARY KEY (user_id, daemon);


ALTER TABLE ONLY replicad.presence_setting
    ADD CONSTRAINT presence_setting_pkey PRIMARY KEY (singleton);


ALTER TABLE ONLY replicad.presence_stream
    ADD CONSTRAINT presence_stream_pkey PRIMARY KEY (id);


ALTER TABLE ONLY replicad.presence_user_ip
    ADD CONSTRAINT presence_user_ip_pkey PRIMARY KEY (key);


ALTER TABLE ONLY replicad.presence_user
    ADD CONSTRAINT presence_user_pkey PRIMARY KEY (user_id);


ALTER TABLE ONLY replicad.redis_publisher
    ADD CONSTRAINT redis_publisher_pkey PRIMARY KEY (server);


ALTER TABLE ONLY replicad.stream_ack
    ADD CONSTRAINT stream_ack_pkey PRIMARY KEY (stream, instance);


ALTER TABLE ONLY replicad.stream_change_member
    ADD CONSTRAINT stream_change_member_pkey PRIMARY KEY (stream, member);


ALTER TABLE ONLY replicad.stream_changes
    ADD CONSTRAINT stream_changes_pkey PRIMARY KEY (stream);


ALTER TABLE ONLY replicad.stream_daemon
    ADD CONSTRAINT stream_daemon_pkey PRIMARY KEY (id);


ALTER TABLE ONLY replicad.stream_generation
    ADD CONSTRAINT stream_generation_pkey PRIMARY KEY (stream, number);


ALTER TABLE ONLY replicad.stream_kept
    ADD CONSTRAINT stream_kept_pkey PRIMARY KEY (stream);


ALTER TABLE ONLY replicad.stream_mark
    ADD CONSTRAINT stream_mark_pkey PRIMARY KEY (stream, at);


ALTER TABLE ONLY replicad.stream
    ADD CONSTRAINT stream_name_key UNIQUE (name);


ALTER TABLE ONLY replicad.stream
    ADD CONSTRAINT stream_pkey PRIMARY KEY (number);


ALTER TABLE ONLY replicad.stream_position
    ADD CONSTRAINT stream_position_pkey PRIMARY KEY (stream, writer);


ALTER TABLE ONLY replicad.stream_relay_key
    ADD CONSTRAINT stream_relay_key_pkey PRIMARY KEY (single);


ALTER TABLE ONLY replicad.stream_reservation_key
    ADD CONSTRAINT stream_reservation_key_pkey PRIMARY KEY (single);


ALTER TABLE ONLY replicad.stream_skip
    ADD CONSTRAINT stream_skip_pkey PRIMARY KEY (stream, id);


ALTER TABLE ONLY replicad.stream_snapshot
    ADD CONSTRAINT stream_snapshot_pkey PRIMARY KEY (stream, number);


ALTER TABLE ONLY replicad.stream_trouble
    ADD CONSTRAINT stream_trouble_pkey PRIMARY KEY (daemon, kind, name, cause);


ALTER TABLE ONLY replicad.stream_writer
    ADD CONSTRAINT stream_writer_pkey PRIMARY KEY (stream, number);


ALTER TABLE ONLY replicad.stream_writer
    ADD CONSTRAINT stream_writer_stream_name_key UNIQUE (stream, name);


ALTER TABLE ONLY replicad.writer_member
    ADD CONSTRAINT writer_member_pkey PRIMARY KEY (stream, instance);


ALTER TABLE ONLY replicad.writer_sharding
    ADD CONSTRAINT writer_sharding_pkey PRIMARY KEY (stream);


ALTER TABLE ONLY replicad.writer_slot
    ADD CONSTRAINT writer_slot_pkey PRIMARY KEY (stream, slot);


ALTER TABLE ONLY tube.tube_attachment
    ADD CONSTRAINT tube_attachment_pkey PRIMARY KEY (tube, tbl);


ALTER TABLE ONLY tube.tube_attempt
    ADD CONSTRAINT tube_attempt_pkey PRIMARY KEY (tube, partitions, partition);


ALTER TABLE ONLY tube.tube_backfill
    ADD CONSTRAINT tube_backfill_pkey PRIMARY KEY (tube, tbl);


ALTER TABLE ONLY tube.tube_generation
    ADD CONSTRAINT tube_generation_id_key UNIQUE (id);


ALTER TABLE ONLY tube.tube_generation
    ADD CONSTRAINT tube_generation_pkey PRIMARY KEY (number);


ALTER TABLE ONLY tube.tube_lease
    ADD CONSTRAINT tube_lease_pkey PRIMARY KEY (tube, partitions, partition);


ALTER TABLE ONLY tube.tube_low
    ADD CONSTRAINT tube_low_pkey PRIMARY KEY (tube, partitions, partition, backfill);


ALTER TABLE ONLY tube.tube_missed
    ADD CONSTRAINT tube_missed_pkey PRIMARY KEY (tube, cause, tbl);


ALTER TABLE ONLY tube.tube_noted
    ADD CONSTRAINT tube_noted_pkey PRIMARY KEY (one);


ALTER TABLE ONLY tube.tube_own_shard
    ADD CONSTRAINT tube_own_shard_pkey PRIMARY KEY (tube, shard);


ALTER TABLE ONLY tube.tube_own_shard
    ADD CONSTRAINT tube_own_shard_tube_tbl_key UNIQUE (tube, tbl);


ALTER TABLE ONLY tube.tube_parked
    ADD CONSTRAINT tube_parked_pkey PRIMARY KEY (parked);


ALTER TABLE ONLY tube.tube_registry
    ADD CONSTRAINT tube_registry_pkey PRIMARY KEY (tube);


ALTER TABLE ONLY tube.tube_report
    ADD CONSTRAINT tube_report_pkey PRIMARY KEY (tube, reporter);


ALTER TABLE ONLY tube.tube_trigger_seen
    ADD CONSTRAINT tube_trigger_seen_pkey PRIMARY KEY (tube, tbl);


ALTER TABLE ONLY tube.tube_worker
    ADD CONSTRAINT tube_worker_pkey PRIMARY KEY (tube, worker);


CREATE INDEX federation_destination_room_order ON replicad.federation_destination_room USING btree (((stream_ordering + 0)), part, source);


CREATE INDEX federation_edu_destination_id ON replicad.federation_edu USING btree (source, destination, id);


CREATE UNIQUE INDEX federation_parked_once ON replicad.federation_parked USING btree (source, stream_ordering, part, md5(destination));


CREATE INDEX federation_parked_wanted ON replicad.federation_parked USING btree (source, id) WHERE wanted;


CREATE INDEX presence_seen_daemon ON replicad.presence_seen USING btree (daemon, user_id);


CREATE INDEX presence_stream_user ON replicad.presence_stream USING btree (user_id, id);


CREATE INDEX presence_user_ip_stored ON replicad.presence_user_ip USING btree (stored_at);


CREATE INDEX presence_user_ip_user ON replicad.presence_user_ip USING btree (user_id, last_seen);


CREATE INDEX presence_user_told ON replicad.presence_user USING btree (told);


CREATE INDEX stream_shape_number ON replicad.stream_shape USING btree (stream, number);


CREATE INDEX tube_parked_tube ON tube.tube_parked USING btree (tube, parked);


CREATE INDEX tube_shard_noted ON tube.tube_shard USING btree (tube, shard);


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.cache_invalidation FOR EACH STATEMENT EXECUTE FUNCTION replicad.cache_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.cache_version FOR EACH STATEMENT EXECUTE FUNCTION replicad.cache_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.federation_destination FOR EACH STATEMENT EXECUTE FUNCTION replicad.federation_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.federation_destination_room FOR EACH STATEMENT EXECUTE FUNCTION replicad.federation_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.federation_edu FOR EACH STATEMENT EXECUTE FUNCTION replicad.federation_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.federation_fact FOR EACH STATEMENT EXECUTE FUNCTION replicad.federation_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.federation_parked FOR EACH STATEMENT EXECUTE FUNCTION replicad.federation_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.federation_sender FOR EACH STATEMENT EXECUTE FUNCTION replicad.federation_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.federation_version FOR EACH STATEMENT EXECUTE FUNCTION replicad.federation_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.presence_daemon FOR EACH STATEMENT EXECUTE FUNCTION replicad.presence_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.presence_seen FOR EACH STATEMENT EXECUTE FUNCTION replicad.presence_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.presence_setting FOR EACH STATEMENT EXECUTE FUNCTION replicad.presence_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.presence_stream FOR EACH STATEMENT EXECUTE FUNCTION replicad.presence_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.presence_user FOR EACH STATEMENT EXECUTE FUNCTION replicad.presence_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.presence_user_ip FOR EACH STATEMENT EXECUTE FUNCTION replicad.presence_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.presence_version FOR EACH STATEMENT EXECUTE FUNCTION replicad.presence_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.redis_publisher FOR EACH STATEMENT EXECUTE FUNCTION replicad.redis_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.redis_version FOR EACH STATEMENT EXECUTE FUNCTION replicad.redis_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.sharding_version FOR EACH STATEMENT EXECUTE FUNCTION replicad.sharding_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_ack FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_change_member FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_changes FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_generation FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_kept FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_mark FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_position FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_relay_key FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_reservation_key FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_shape FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_skip FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_snapshot FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_version FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.stream_writer FOR EACH STATEMENT EXECUTE FUNCTION replicad.stream_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.writer_member FOR EACH STATEMENT EXECUTE FUNCTION replicad.sharding_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.writer_sharding FOR EACH STATEMENT EXECUTE FUNCTION replicad.sharding_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON replicad.writer_slot FOR EACH STATEMENT EXECUTE FUNCTION replicad.sharding_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_attachment FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_attempt FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_backfill FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_generation FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_lease FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_low FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_missed FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_noted FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_own_shard FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_parked FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_registry FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_report FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_shard FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_trigger_seen FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_version FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


CREATE TRIGGER on_disk BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tube.tube_worker FOR EACH STATEMENT EXECUTE FUNCTION tube.tube_on_disk();


ALTER TABLE ONLY replicad.presence_seen
    ADD CONSTRAINT presence_seen_daemon_fkey FOREIGN KEY (daemon) REFERENCES replicad.presence_daemon(id) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_ack
    ADD CONSTRAINT stream_ack_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream(number) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_change_member
    ADD CONSTRAINT stream_change_member_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream_changes(stream) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_changes
    ADD CONSTRAINT stream_changes_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream(number) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_generation
    ADD CONSTRAINT stream_generation_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream(number) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_kept
    ADD CONSTRAINT stream_kept_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream(number) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_mark
    ADD CONSTRAINT stream_mark_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream(number) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_position
    ADD CONSTRAINT stream_position_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream(number) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_shape
    ADD CONSTRAINT stream_shape_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream(number) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_skip
    ADD CONSTRAINT stream_skip_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream(number) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_snapshot
    ADD CONSTRAINT stream_snapshot_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream_changes(stream) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_writer
    ADD CONSTRAINT stream_writer_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream(number) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.writer_member
    ADD CONSTRAINT writer_member_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.writer_sharding(stream) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.writer_sharding
    ADD CONSTRAINT writer_sharding_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream(number) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.writer_slot
    ADD CONSTRAINT writer_slot_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.writer_sharding(stream) ON DELETE CASCADE;


ALTER TABLE ONLY tube.tube_attachment
    ADD CONSTRAINT tube_attachment_tube_fkey FOREIGN KEY (tube) REFERENCES tube.tube_registry(tube) ON DELETE CASCADE;


ALTER TABLE ONLY tube.tube_attempt
    ADD CONSTRAINT tube_attempt_tube_fkey FOREIGN KEY (tube) REFERENCES tube.tube_registry(tube) ON DELETE CASCADE;


ALTER TABLE ONLY tube.tube_backfill
    ADD CONSTRAINT tube_backfill_tube_fkey FOREIGN KEY (tube) REFERENCES tube.tube_registry(tube) ON DELETE CASCADE;


ALTER TABLE ONLY tube.tube_lease
    ADD CONSTRAINT tube_lease_tube_fkey FOREIGN KEY (tube) REFERENCES tube.tube_registry(tube) ON DELETE CASCADE;


ALTER TABLE ONLY tube.tube_missed
    ADD CONSTRAINT tube_missed_tube_fkey FOREIGN KEY (tube) REFERENCES tube.tube_registry(tube) ON DELETE CASCADE;


ALTER TABLE ONLY tube.tube_own_shard
    ADD CONSTRAINT tube_own_shard_tube_fkey FOREIGN KEY (tube) REFERENCES tube.tube_registry(tube) ON DELETE CASCADE;


ALTER TABLE ONLY tube.tube_parked
    ADD CONSTRAINT tube_parked_tube_fkey FOREIGN KEY (tube) REFERENCES tube.tube_registry(tube) ON DELETE CASCADE;


ALTER TABLE ONLY tube.tube_report
    ADD CONSTRAINT tube_report_tube_fkey FOREIGN KEY (tube) REFERENCES tube.tube_registry(tube) ON DELETE CASCADE;


GRANT USAGE ON SCHEMA replicad TO PUBLIC;


REVOKE ALL ON FUNCTION replicad.cache_disable() FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.cache_enable(writers text[]) FROM PUBLIC;


GRANT SELECT ON TABLE replicad.stream TO PUBLIC;


GRANT SELECT ON TABLE replicad.stream_writer TO PUBLIC;


REVOKE ALL ON FUNCTION replicad.cache_names() FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.cache_write(func text, entries jsonb) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_add(name text, tbl regclass, id_column name, instance_column name, row_sql text, method text, positions regclass, sequence regclass, max_row bigint) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_add_changes(name text, source regclass, key name[], columns name[], predicate text, old boolean, omit boolean, filters name[], max_row bigint, path name[]) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_alter(name text, tbl regclass, same_rows boolean, sequence regclass, positions regclass) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_as_owner(tbl regclass, query text, path text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_belong(what text) FROM PUBLIC;


GRANT SELECT ON TABLE replicad.stream_changes TO PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_change_detach(stream_number integer, tbl oid) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_change_function_ensure(stream_number integer) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_change_lines(c replicad.stream_changes, query text, place text, shape integer, ids bigint[], OUT count bigint, OUT last json) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_change_truncated() FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_changes_ensure(stream_number integer) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_changes_look() FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_changes_note(stream_number integer) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_changes_remove(stream_number integer) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_check(s replicad.stream) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_check_parts(s replicad.stream) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_check_row(tbl regclass, id_column name, row_sql text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_continue() FROM PUBLIC;


GRANT SELECT ON TABLE replicad.stream_generation TO PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_daemon_beat(id uuid, name text, pid integer, addresses text[], version text, age double precision, at timestamp with time zone) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_daemon_leave(id uuid) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_daemons(at timestamp with time zone) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_fork(stream_number integer, seen text, reason text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_generation_add(s replicad.stream, began_at bigint, writers integer[], positions bigint[], reason text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_give(signature text, owner oid) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_guard_attach(s replicad.stream) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_guard_build(s replicad.stream) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_guard_detach(number integer) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_keep(stream_number integer, in_generation text, lowest bigint, published bigint, trimmed bigint, OUT gone bigint, OUT back bigint) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_keep_rules(name text, keep_for interval, keep_rows bigint) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_keep_upto(s replicad.stream) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_kept_upto(s replicad.stream, g replicad.stream_generation, went_back boolean) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_mark_position(stream_number integer, new_position bigint, at timestamp with time zone) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_max_row(name text, bytes bigint) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_note(stream_number integer, in_generation text, linear_position bigint, writers integer[], positions bigint[], at timestamp with time zone) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_proof_key(number integer, holder text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_reader_ensure(tbl regclass) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_readers_ensure() FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_relay_channel() FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_relay_secret() FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_remove(name text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_rewind(stream_number integer, seen text, upto bigint, OUT begun text, OUT wait double precision) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_sequence_changed(name text, what text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_skip_id(name text, id bigint, reason text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_skip_undo(name text, id bigint) FROM PUBLIC;


GRANT SELECT(stream) ON TABLE replicad.stream_skip TO PUBLIC;


GRANT SELECT(id) ON TABLE replicad.stream_skip TO PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_snapshot_request(name text, condition text, anew boolean, member regclass, path name[]) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_snapshot_step(stream_number integer, size integer, patience interval, OUT number integer, OUT sent bigint, OUT finished boolean, OUT waits_for text[]) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_trim_kept(name text, batch integer, OUT partitions bigint, OUT removed bigint) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_trimmer_ensure(tbl regclass) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_trouble_write(daemon text, kinds text[], names text[], causes text[], codes text[], reasons text[], ages double precision[], at timestamp with time zone) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_troubles(at timestamp with time zone) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_writer_holder(s replicad.stream, names text[], OUT holder text, OUT remedy text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_writers_discover(s replicad.stream) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_writers_ensure(stream_number integer, names text[]) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_writers_idle(name text, since bigint, OUT writer text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_writers_last(s replicad.stream, after bigint) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_writers_retire(name text, names text[], quiet double precision, at timestamp with time zone) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.writer_changed(number smallint) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.writer_disable(stream text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.writer_enable(stream text, slots integer) FROM PUBLIC;


GRANT SELECT ON TABLE replicad.writer_sharding TO PUBLIC;


REVOKE ALL ON FUNCTION replicad.writer_lock(stream text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.writer_lock_slots(stream smallint, wanted integer[], patience interval) FROM PUBLIC;


REVOKE ALL ON FUNCTION tube.tube_truncate_trigger() FROM PUBLIC;


GRANT SELECT ON TABLE replicad.stream_position TO PUBLIC;


GRANT SELECT ON TABLE replicad.writer_member TO PUBLIC;


GRANT SELECT ON TABLE replicad.writer_slot TO PUBLIC;


--
-- PostgreSQL database dump complete
--


INSERT INTO replicad.cache_version VALUES (1, 1, '659466421378f7e6', '2026-11-26 14:10:58.197281+00');














INSERT INTO replicad.federation_version VALUES (1, 1, '17d85f7792b23fca', '2026-11-26 14:10:58.261609+00');














INSERT INTO replicad.presence_version VALUES (1, 1, '03fb7870995c0935', '2026-11-26 14:10:58.221655+00');




INSERT INTO replicad.redis_version VALUES (1, 1, '7c15297d81bed80d', '2026-11-26 14:10:58.232224+00');


INSERT INTO replicad.sharding_version VALUES (1, 1, 'fe90058702b8fed2', '2026-11-26 14:10:58.282595+00');




















INSERT INTO replicad.stream_relay_key VALUES (true, 'a9fecf31446340eda7f447c12a6d793db8f47c2aace94affbee90b9f6518c3d6');


INSERT INTO replicad.stream_reservation_key VALUES (true, '\x281caa236364691a1b367c84b616afb75ed754af9f4233c28eada97537027af7');










INSERT INTO replicad.stream_version VALUES (1, 1, '9ecb55681b4f63c4', '2026-11-26 14:10:58.074744+00');






































INSERT INTO tube.tube_version VALUES (1, 1, 'b66256fa6ff7052e', '2026-11-26 14:10:58.183025+00');




SELECT pg_catalog.setval('replicad.cache_invalidation_id_seq', 1, false);


SELECT pg_catalog.setval('replicad.federation_edu_id_seq', 1, false);


SELECT pg_catalog.setval('replicad.federation_parked_id_seq', 1, false);


SELECT pg_catalog.setval('replicad.presence_stream_id_seq', 1, false);


SELECT pg_catalog.setval('replicad.redis_beat_seq', 1, false);


SELECT pg_catalog.setval('replicad.writer_term_seq', 1, false);


SELECT pg_catalog.setval('tube.tube_parked_parked_seq', 1, false);


SELECT pg_catalog.setval('tube.tube_seq', 1, false);


SELECT pg_catalog.setval('tube.tube_term_seq', 1, false);


--
-- PostgreSQL database dump complete
--


