-- What commit 3a734cf installs; made by `python -m tests.schema.release 3a734cf 1`.
SET check_function_bodies = false;
SELECT pg_catalog.set_config('search_path', '', false);
CREATE SCHEMA replicad;


COMMENT ON SCHEMA replicad IS 'made by replicad';


CREATE SCHEMA tube;


COMMENT ON SCHEMA tube IS 'made by replicad';


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
    resets integer DEFAULT 0 NOT NULL,
    trimmed_upto bigint,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT stream_method_check CHECK ((method = ANY (ARRAY['lock_watch'::text, 'reservation'::text, 'positions_table'::text]))),
    CONSTRAINT stream_number_check CHECK (((number >= 1) AND (number <= 8191)))
);


COMMENT ON TABLE replicad.stream IS 'replicad: the registered streams; use stream_add() and stream_remove()';


CREATE TABLE replicad.stream_writer (
    stream smallint NOT NULL,
    number integer NOT NULL,
    name text NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
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


COMMENT ON FUNCTION replicad.cache_instance(session_name text) IS 'The writer as which a session invalidates; NULL: nobody is told';


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
    ELSIF session_name = 'replicad ack' THEN
        PERFORM stream_refuse('a session called "replicad ack" cannot invalidate caches: its transactions are not watched',
            'trim streams in transactions of their own');
    END IF;
    IF writer = 'master' AND current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
            AND session_name NOT IN ('', 'master') AND session_name NOT LIKE '%(caches)' THEN
        PERFORM set_config('application_name', left(session_name, 40) || ' (caches)', true);
    END IF;
    RETURN writer;
END
$$;


COMMENT ON FUNCTION replicad.cache_writer(func text) IS 'The writer as which this session invalidates the cache';


CREATE FUNCTION replicad.federation_begin(stream text, token bigint) RETURNS void
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    UPDATE federation_sender s SET token = federation_begin.token
    WHERE s.stream = federation_begin.stream AND s.token IS NULL
$$;


COMMENT ON FUNCTION replicad.federation_begin(stream text, token bigint) IS 'Where all senders begin with a stream';


CREATE FUNCTION replicad.federation_collapse(names text[]) RETURNS bigint
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
            WHERE h.destination = ANY (names) AND h.room IS NOT NULL
        ) r
        JOIN federation_destination d ON d.name = r.destination
        WHERE r.followed AND (d.txn_id IS NULL OR (r.stream_ordering, r.part) > (d.txn_stream_ordering, d.txn_part))
    ), gone AS (
        DELETE FROM federation_destination_room r USING superseded s
        WHERE r.destination = s.destination AND r.stream_ordering = s.stream_ordering AND r.part = s.part
        RETURNING 1
    )
    SELECT count(*) FROM gone
$$;


COMMENT ON FUNCTION replicad.federation_collapse(names text[]) IS 'Leaves only the latest fact of each room to destinations';


CREATE FUNCTION replicad.federation_edus(destination text, most integer) RETURNS TABLE(id bigint, body text)
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
    SELECT u.id, u.body::text
    FROM federation_edu u
    WHERE u.destination = federation_edus.destination
    ORDER BY u.id
    LIMIT federation_edus.most + 1
$$;


COMMENT ON FUNCTION replicad.federation_edus(destination text, most integer) IS 'The oldest updates that a destination has yet to take';


CREATE FUNCTION replicad.federation_enlist(sender text, senders text[], streams text[]) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    other record;
BEGIN
    IF NOT pg_try_advisory_lock(1380992595, federation_key(sender)) THEN
        RETURN format('a sender named %s is running on this database already', sender);
    END IF;
    LOCK TABLE federation_sender IN SHARE ROW EXCLUSIVE MODE;  -- two that start look one after the other
    SELECT s.name, s.senders INTO other
    FROM federation_sender s
    JOIN pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.classid = 1380992595 AND l.objid::bigint = (federation_key(s.name)::bigint & 4294967295)
    WHERE s.name <> federation_enlist.sender AND s.senders <> federation_enlist.senders
    LIMIT 1;
    IF FOUND THEN
        RETURN format('sender %s is running and shares the destinations among %s, not among %s', other.name,
            array_to_string(other.senders, ', '), array_to_string(senders, ', '));
    END IF;
    IF EXISTS (SELECT FROM federation_sender s WHERE s.senders <> federation_enlist.senders) THEN
        INSERT INTO federation_sender AS mine (name, stream, token, senders)
        SELECT n, s.stream, min(s.token), federation_enlist.senders
        FROM federation_sender s CROSS JOIN unnest(federation_enlist.senders) n
        GROUP BY n, s.stream
        ON CONFLICT (name, stream) DO UPDATE SET token = excluded.token, senders = excluded.senders;
        DELETE FROM federation_sender s WHERE s.name <> ALL (federation_enlist.senders);
    END IF;
    INSERT INTO federation_sender (name, stream, senders)
    SELECT n, t, federation_enlist.senders
    FROM unnest(federation_enlist.senders) n CROSS JOIN unnest(federation_enlist.streams) t
    ON CONFLICT (name, stream) DO NOTHING;
    RETURN NULL;
END
$$;


COMMENT ON FUNCTION replicad.federation_enlist(sender text, senders text[], streams text[]) IS 'Makes this session the one that runs as a sender';


CREATE FUNCTION replicad.federation_facts(destination text, most integer, most_bytes bigint) RETURNS TABLE(token bigint, part integer, room text, body text, more boolean)
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
                WHERE a.destination = federation_facts.destination
                ORDER BY a.stream_ordering, a.part
                LIMIT federation_facts.most + 1
            ) h
            WINDOW place AS (ORDER BY h.stream_ordering, h.part)
        ) r
        JOIN federation_fact f ON f.stream_ordering = r.stream_ordering AND f.part = r.part
        WHERE r.number <= federation_facts.most
    ) w
    WHERE coalesce(w.before, 0) < federation_facts.most_bytes
    ORDER BY w.stream_ordering, w.part
$$;


COMMENT ON FUNCTION replicad.federation_facts(destination text, most integer, most_bytes bigint) IS 'The oldest facts that a destination has yet to take';


CREATE FUNCTION replicad.federation_key(sender text) RETURNS integer
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT hashtext('federation_sender'::regclass::oid::text || ' ' || sender)
$$;


COMMENT ON FUNCTION replicad.federation_key(sender text) IS 'Advisory lock key of a running sender';


CREATE FUNCTION replicad.federation_record(sender text, stream text, upto bigint, tokens bigint[], parts integer[], rooms text[], bodies text[], numbers integer[], names text[], newcomers text[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO federation_fact AS held (stream_ordering, part, body)
    SELECT f.token, f.part, f.body::json FROM unnest(tokens, parts, bodies) AS f (token, part, body)
    ON CONFLICT (stream_ordering, part) DO UPDATE SET body = excluded.body
    WHERE held.body::text <> excluded.body::text;  -- after a reset the same id may be another fact
    INSERT INTO federation_destination (name) SELECT unnest(newcomers)
    ON CONFLICT DO NOTHING;
    INSERT INTO federation_destination_room (destination, stream_ordering, part, room)
    SELECT t.name, f.token, f.part, f.room
    FROM unnest(tokens, parts, rooms) WITH ORDINALITY AS f (token, part, room, number)
    JOIN unnest(numbers, names) AS t (number, name) ON t.number = f.number
    ON CONFLICT DO NOTHING;
    UPDATE federation_sender s SET token = upto
    WHERE s.name = federation_record.sender AND s.stream = federation_record.stream;
END
$$;


COMMENT ON FUNCTION replicad.federation_record(sender text, stream text, upto bigint, tokens bigint[], parts integer[], rooms text[], bodies text[], numbers integer[], names text[], newcomers text[]) IS 'Records facts and the destinations that are to take them';


CREATE FUNCTION replicad.federation_record_edus(sender text, stream text, upto bigint, names text[], keys text[], bodies text[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO federation_destination (name) SELECT DISTINCT n FROM unnest(names) n
    ON CONFLICT DO NOTHING;
    INSERT INTO federation_edu AS held (destination, key, body)
    SELECT u.name, u.key, u.body::json
    FROM (  -- only the last of a key: a statement cannot replace one row twice
        SELECT e.name, e.key, e.body, e.number,
            row_number() OVER (PARTITION BY e.name, e.key ORDER BY e.number DESC) AS age
        FROM unnest(names, keys, bodies) WITH ORDINALITY AS e (name, key, body, number)
    ) u
    WHERE u.key IS NULL OR u.age = 1
    ORDER BY u.number
    ON CONFLICT (destination, key) DO UPDATE SET id = DEFAULT, body = excluded.body;
    UPDATE federation_sender s SET token = upto
    WHERE s.name = federation_record_edus.sender AND s.stream = federation_record_edus.stream;
END
$$;


COMMENT ON FUNCTION replicad.federation_record_edus(sender text, stream text, upto bigint, names text[], keys text[], bodies text[]) IS 'Records updates that may not be dropped';


CREATE FUNCTION replicad.federation_rewind(sender text, stream text, token bigint, names text[]) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    dropped bigint;
BEGIN
    UPDATE federation_destination d SET
        last_successful_stream_ordering = least(d.last_successful_stream_ordering, federation_rewind.token),
        last_successful_part = CASE WHEN d.last_successful_stream_ordering > federation_rewind.token THEN 2147483647
            ELSE d.last_successful_part END,
        txn_id = NULL, txn_ts = NULL, txn_stream_ordering = NULL, txn_part = NULL, txn_edus = NULL, txn_edu_ids = NULL,
        txn_pdus = NULL
    WHERE d.name = ANY (names)
        AND greatest(d.last_successful_stream_ordering, d.txn_stream_ordering) > federation_rewind.token;
    DELETE FROM federation_destination_room r
    WHERE r.destination = ANY (names) AND r.stream_ordering > federation_rewind.token;
    GET DIAGNOSTICS dropped = ROW_COUNT;
    DELETE FROM federation_fact f
    WHERE f.stream_ordering > federation_rewind.token
        AND NOT EXISTS (SELECT FROM federation_destination_room r
                        WHERE r.stream_ordering = f.stream_ordering AND r.part = f.part);
    UPDATE federation_sender s SET token = federation_rewind.token
    WHERE s.name = federation_rewind.sender AND s.stream = federation_rewind.stream;
    RETURN dropped;
END
$$;


COMMENT ON FUNCTION replicad.federation_rewind(sender text, stream text, token bigint, names text[]) IS 'Begins a stream again behind a token';


CREATE FUNCTION replicad.federation_standing(after text, most integer) RETURNS TABLE(name text, token bigint, part integer, serial bigint, failures integer, retry_in double precision, catching_up boolean, outstanding boolean)
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
    SELECT d.name, d.last_successful_stream_ordering, d.last_successful_part, d.serial, d.failures,
        extract(epoch FROM d.retry_at - clock_timestamp())::double precision, d.catching_up,
        d.txn_id IS NOT NULL
            OR EXISTS (SELECT FROM federation_destination_room r WHERE r.destination = d.name)
            OR EXISTS (SELECT FROM federation_edu u WHERE u.destination = d.name)
    FROM federation_destination d
    WHERE federation_standing.after IS NULL OR d.name > federation_standing.after
    ORDER BY d.name
    LIMIT federation_standing.most
$$;


COMMENT ON FUNCTION replicad.federation_standing(after text, most integer) IS 'How destinations stand, page by page';


CREATE FUNCTION replicad.federation_sweep(stream text) RETURNS bigint
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    WITH gone AS (
        DELETE FROM federation_fact f
        WHERE f.stream_ordering <= (
                SELECT min(s.token) FROM federation_sender s WHERE s.stream = federation_sweep.stream)
            AND NOT EXISTS (SELECT FROM federation_destination_room r
                            WHERE r.stream_ordering = f.stream_ordering AND r.part = f.part)
        RETURNING 1
    )
    SELECT count(*) FROM gone
$$;


COMMENT ON FUNCTION replicad.federation_sweep(stream text) IS 'Removes facts that every destination has taken';


CREATE FUNCTION replicad.federation_transaction(destination text) RETURNS TABLE(id text, serial bigint, ts bigint, token bigint, part integer, edus text[], edu_ids bigint[], pdus text[], substituted boolean)
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
            JOIN federation_fact f ON f.stream_ordering = r.stream_ordering AND f.part = r.part
            WHERE r.destination = d.name AND (r.stream_ordering, r.part) <= (d.txn_stream_ordering, d.txn_part)
            ORDER BY r.stream_ordering, r.part
        )),
        d.txn_pdus IS NOT NULL
    FROM federation_destination d
    WHERE d.name = federation_transaction.destination AND d.txn_id IS NOT NULL
$$;


COMMENT ON FUNCTION replicad.federation_transaction(destination text) IS 'The transaction of a destination that is under way';


CREATE FUNCTION replicad.federation_write(entries json) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
BEGIN
    INSERT INTO federation_destination AS d (name, last_successful_stream_ordering, last_successful_part, serial,
        txn_id, txn_ts, txn_stream_ordering, txn_part, txn_edus, txn_edu_ids, txn_pdus,
        failures, failing_since, retry_at, last_error, catching_up)
    SELECT e.name, e.token, e.part, e.serial,
        e.txn_id, e.txn_ts, e.txn_token, e.txn_part, e.txn_edus, e.txn_edu_ids, e.txn_pdus,
        e.failures, CASE WHEN e.failures > 0 THEN clock_timestamp() END,
        clock_timestamp() + make_interval(secs => e.retry_in), e.last_error, e.catching_up
    FROM json_to_recordset(entries) AS e (name text, token bigint, part integer, serial bigint,
        txn_id text, txn_ts bigint, txn_token bigint, txn_part integer, txn_edus text[], txn_edu_ids bigint[],
        txn_pdus text[], failures integer, retry_in double precision, last_error text, catching_up boolean)
    ON CONFLICT (name) DO UPDATE SET
        last_successful_stream_ordering = excluded.last_successful_stream_ordering,
        last_successful_part = excluded.last_successful_part,
        serial = excluded.serial,
        txn_id = excluded.txn_id, txn_ts = excluded.txn_ts,
        txn_stream_ordering = excluded.txn_stream_ordering, txn_part = excluded.txn_part,
        txn_edus = excluded.txn_edus, txn_edu_ids = excluded.txn_edu_ids, txn_pdus = excluded.txn_pdus,
        failures = excluded.failures,
        failing_since = CASE WHEN excluded.failures > 0 THEN coalesce(d.failing_since, excluded.failing_since) END,
        retry_at = excluded.retry_at, last_error = excluded.last_error, catching_up = excluded.catching_up;
    DELETE FROM federation_destination_room r
    USING json_to_recordset(entries) AS e (name text, token bigint, part integer)
    WHERE r.destination = e.name AND (r.stream_ordering, r.part) <= (e.token, e.part);
    DELETE FROM federation_edu u
    USING json_to_recordset(entries) AS e (done_edus bigint[])
    WHERE u.id = ANY (e.done_edus);
END
$$;


COMMENT ON FUNCTION replicad.federation_write(entries json) IS 'Writes down how destinations stand';


CREATE FUNCTION replicad.invalidate_cache(func text, keys jsonb DEFAULT NULL::jsonb) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    writer text := cache_writer(func);
    entry jsonb := CASE WHEN keys = 'null' OR octet_length(keys::text) > 65536 THEN NULL ELSE keys END;
BEGIN
    IF jsonb_typeof(entry) <> 'array' THEN
        PERFORM stream_refuse(format('the keys of cache %s are %s, not an array', func, jsonb_typeof(entry)),
            'give all arguments of the entry in an array: jsonb_build_array(user_id)');
    END IF;
    IF writer IS NULL THEN
        RETURN 0;
    END IF;
    INSERT INTO cache_invalidation (instance, cache_func, keys) VALUES (writer, func, entry);
    RETURN 1;
END
$$;


COMMENT ON FUNCTION replicad.invalidate_cache(func text, keys jsonb) IS 'Have every worker forget an entry, or (NULL) all, of a cache';


CREATE FUNCTION replicad.invalidate_cache_many(func text, many jsonb) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    writer text := cache_writer(func);
    written integer := 0;
BEGIN
    IF jsonb_typeof(many) IS DISTINCT FROM 'array'
            OR EXISTS (SELECT FROM jsonb_array_elements(many) k WHERE jsonb_typeof(k) <> 'array') THEN
        PERFORM stream_refuse(format('the keys of cache %s are no array of arrays', func),
            'give an array of keys for every entry: jsonb_agg(jsonb_build_array(user_id))');
    END IF;
    IF writer IS NULL THEN
        RETURN 0;
    END IF;
    IF jsonb_array_length(many) > 10000
            OR EXISTS (SELECT FROM jsonb_array_elements(many) k WHERE octet_length(k::text) > 65536) THEN
        RETURN invalidate_cache(func);
    END IF;
    INSERT INTO cache_invalidation (instance, cache_func, keys)
    SELECT writer, func, k FROM jsonb_array_elements(many) k;
    GET DIAGNOSTICS written = ROW_COUNT;
    RETURN written;
END
$$;


COMMENT ON FUNCTION replicad.invalidate_cache_many(func text, many jsonb) IS 'Have every worker forget many entries of a cache';


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


COMMENT ON FUNCTION replicad.presence_apply(daemon uuid, users text[], online boolean[], syncs bigint[]) IS 'What a daemon sees of its users';


CREATE FUNCTION replicad.presence_beat(daemon uuid, beat bigint) RETURNS bigint
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    UPDATE presence_daemon d SET beat = d.beat + 1
    WHERE d.id = presence_beat.daemon AND NOT d.buried
        AND d.beat BETWEEN presence_beat.beat AND presence_beat.beat + 1
    RETURNING d.beat
$$;


COMMENT ON FUNCTION replicad.presence_beat(daemon uuid, beat bigint) IS 'A sign of life of a daemon';


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


COMMENT ON FUNCTION replicad.presence_bury(daemon uuid, beat bigint, batch integer) IS 'Clears the users of a daemon that is dead';


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


COMMENT ON FUNCTION replicad.presence_enlist(name text) IS 'A new id for a daemon that writes presence';


CREATE FUNCTION replicad.presence_fingerprint() RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT concat_ws(' ', stream_epoch(s), coalesce(s.trimmed_upto, 0),
        (SELECT coalesce(max(u.told), 0) FROM presence_user u) > (SELECT coalesce(max(p.id), 0) FROM presence_stream p))
    FROM stream s WHERE s.name = 'presence'
$$;


COMMENT ON FUNCTION replicad.presence_fingerprint() IS 'Changes when the stream presence may have lost what it told';


CREATE FUNCTION replicad.presence_look(OUT grace double precision, OUT lost_grace double precision, OUT ttl double precision, OUT ip_retention double precision, OUT fingerprint text) RETURNS SETOF record
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT extract(epoch FROM s.grace)::float8, extract(epoch FROM s.lost_grace)::float8,
        extract(epoch FROM s.ttl)::float8, extract(epoch FROM s.ip_retention)::float8, presence_fingerprint()
    FROM presence_setting s
    WHERE EXISTS (SELECT FROM stream x WHERE x.name = 'presence' AND x.relation = 'presence_stream'::regclass)
$$;


COMMENT ON FUNCTION replicad.presence_look(OUT grace double precision, OUT lost_grace double precision, OUT ttl double precision, OUT ip_retention double precision, OUT fingerprint text) IS 'The settings of presence while it is enabled';


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


COMMENT ON FUNCTION replicad.presence_retell(beyond text, batch integer) IS 'Tells anew of users who are online and whose rows are gone';


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


COMMENT ON FUNCTION replicad.presence_settle(users text[]) IS 'Tells of users whose state has changed';


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


COMMENT ON FUNCTION replicad.presence_user_ip_sweep(batch integer) IS 'Removes old addresses of users';


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


COMMENT ON FUNCTION replicad.presence_user_ip_write(keys bytea[], users text[], ips text[], devices text[], agents text[], tokens bytea[], seen bigint[]) IS 'Keeps from where users were seen';


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


CREATE FUNCTION replicad.stream_ack_note(names text[], resets integer[], instances text[], tokens bigint[]) RETURNS void
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    INSERT INTO stream_ack AS a (stream, instance, token, resets, acked_at)
    SELECT s.number, n.instance, n.token, s.resets, clock_timestamp()
    FROM unnest(names, resets, instances, tokens) AS n (name, resets, instance, token)
    JOIN stream s ON s.name = n.name AND s.resets = n.resets
    WHERE (SELECT count(*) FROM stream_ack o WHERE o.stream = s.number) < 1000
        OR EXISTS (SELECT FROM stream_ack o WHERE o.stream = s.number AND o.instance = n.instance)
    ORDER BY s.number, n.instance COLLATE "C"  -- in one order, so that two daemons do not wait for each other in a circle
    ON CONFLICT (stream, instance) DO UPDATE SET resets = excluded.resets, acked_at = excluded.acked_at,
        token = CASE WHEN a.resets = excluded.resets THEN greatest(a.token, excluded.token) ELSE excluded.token END
$$;


COMMENT ON FUNCTION replicad.stream_ack_note(names text[], resets integer[], instances text[], tokens bigint[]) IS 'Keeps what senders have acknowledged';


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
    SELECT n.instance, CASE WHEN a.resets = s.resets THEN a.token END, a.acked_at
    FROM (SELECT o.instance FROM stream_ack o WHERE o.stream = s.number UNION SELECT unnest(senders)) n (instance)
    LEFT JOIN stream_ack a ON a.stream = s.number AND a.instance = n.instance
    ORDER BY 2 NULLS FIRST, 1;
END
$_$;


COMMENT ON FUNCTION replicad.stream_acks(name text, OUT instance text, OUT token bigint, OUT acked_at timestamp with time zone) IS 'The senders of a stream, and what they have acknowledged';


CREATE FUNCTION replicad.stream_add(name text, tbl regclass, id_column name, instance_column name DEFAULT NULL::name, row_sql text DEFAULT NULL::text, method text DEFAULT 'lock_watch'::text, positions regclass DEFAULT NULL::regclass, sequence regclass DEFAULT NULL::regclass) RETURNS text[]
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
    s.resets := 0;
    s.created_at := clock_timestamp();
    s.row_type := stream_check(s);
    -- Numbers go up and come round, so that a lock left from a removed stream does not meet a new one.
    s.number := (
        SELECT n FROM generate_series(1, 8191) n WHERE NOT EXISTS (SELECT FROM stream x WHERE x.number = n)
        ORDER BY n <= (SELECT coalesce(max(x.number), 0) FROM stream x), n LIMIT 1);
    PERFORM stream_refuse('there are 8191 streams, which is all that there can be', 'remove those that nobody reads')
        WHERE s.number IS NULL;
    INSERT INTO stream SELECT s.*;
    PERFORM stream_writers_discover(s);
    IF method = 'reservation' THEN
        PERFORM stream_guard_attach(s);
    END IF;
    RETURN stream_notes(s);
END
$$;


COMMENT ON FUNCTION replicad.stream_add(name text, tbl regclass, id_column name, instance_column name, row_sql text, method text, positions regclass, sequence regclass) IS 'Makes a table a stream; returns notes worth reading';


CREATE FUNCTION replicad.stream_adopt(number integer, setting text, id bigint, writer text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    xid text := pg_current_xact_id()::text;
    me text := current_setting('application_name');
    bound bigint := id - 1;
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
        PERFORM pg_advisory_xact_lock_shared(stream_lock_key(number, bound));
        IF stream_certified(number, id - 1, writer) IS NOT NULL THEN
            PERFORM set_config(setting, xid || ':' || bound, true);
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


COMMENT ON FUNCTION replicad.stream_adopt(number integer, setting text, id bigint, writer text) IS 'Covers an id that another session reserved, or RS003';


CREATE FUNCTION replicad.stream_certified(number integer, upto bigint, writer text) RETURNS bigint
    LANGUAGE sql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    WITH held AS MATERIALIZED (  -- one look at the lock table, which is a consistent one
        SELECT l.pid, (l.classid::bigint << 32) | l.objid::bigint AS key
        FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.mode = 'ShareLock' AND l.granted AND l.pid IS NOT NULL
            AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    )
    SELECT max(lock.key & 281474976710655)
    FROM held lock JOIN held certificate ON certificate.pid = lock.pid
        AND certificate.key = stream_lock_key(number, lock.key & 281474976710655, true)
    WHERE lock.key BETWEEN stream_lock_key(number, 0) AND stream_lock_key(number, upto)
        AND stream_holds_back(number, (SELECT a.application_name FROM pg_stat_get_activity(lock.pid) a), writer)
$$;


COMMENT ON FUNCTION replicad.stream_certified(number integer, upto bigint, writer text) IS 'The highest bound by which others cover a writer''s ids';


CREATE FUNCTION replicad.stream_check(s replicad.stream) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    fault record;
BEGIN
    PERFORM stream_check_name(s.name);
    IF s.method IS NULL OR s.method NOT IN ('lock_watch', 'reservation', 'positions_table') THEN
        PERFORM stream_refuse(format('there is no method %L', s.method),
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
    IF s.method = 'positions_table' THEN
        PERFORM stream_check_positions(s.positions);
    ELSIF s.positions IS NOT NULL THEN
        PERFORM stream_refuse('a table of positions goes with the method positions_table only', 'leave it out');
    END IF;
    RETURN stream_check_row(s.relation, s.id_column, s.row_sql);
END
$$;


COMMENT ON FUNCTION replicad.stream_check(s replicad.stream) IS 'Refuses what cannot be a stream; returns the type of its rows';


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


COMMENT ON FUNCTION replicad.stream_check_count(n integer) IS 'Refuses a number of ids outside of 1 to 10000';


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


COMMENT ON FUNCTION replicad.stream_check_id(tbl regclass, id_column name) IS 'Refuses an id of a wrong type or without an index';


CREATE FUNCTION replicad.stream_check_name(name text) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    -- by code point, since what [:space:] and [:cntrl:] mean beyond ASCII depends on the database's locale
    unprintable text := E'[[:space:][:cntrl:]\\u0080-\\u00a0\\u2000-\\u200f\\u2028-\\u202f\\u205f\\u3000\\ufeff]';
BEGIN
    IF coalesce(name, '') = '' OR length(name) > 200 OR name ~ unprintable OR name LIKE 'tube:%' THEN
        PERFORM stream_refuse(format('%L is no name for a stream', left(name, 240)),
            '1 to 200 characters, none of them white space or unprintable, and not beginning with tube:');
    END IF;
    IF EXISTS (SELECT FROM stream s WHERE s.name = stream_check_name.name) THEN
        PERFORM stream_refuse(format('there is a stream %s already', name),
            format('take another name, or run: SELECT %I.stream_remove(%L)', current_schema(), name));
    END IF;
END
$$;


COMMENT ON FUNCTION replicad.stream_check_name(name text) IS 'Refuses a bad or taken name for a stream';


CREATE FUNCTION replicad.stream_check_positions(positions regclass) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    IF positions IS NULL THEN
        PERFORM stream_refuse('the method positions_table needs the table in which the writers publish',
            'name it; it has the columns stream_name, instance_name and stream_id');
    END IF;
    IF stream_column_type(positions, 'stream_name') IS NULL OR stream_column_type(positions, 'instance_name') IS NULL
        OR stream_column_type(positions, 'stream_id') NOT IN ('bigint'::regtype, 'integer'::regtype) THEN
        PERFORM stream_refuse(format('column stream_id of %s is not a bigint', positions),
            'it holds the id up to which the writer has finished');
    END IF;
END
$$;


COMMENT ON FUNCTION replicad.stream_check_positions(positions regclass) IS 'Refuses a table that is not one of published positions';


CREATE FUNCTION replicad.stream_check_row(tbl regclass, id_column name, row_sql text) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    kind text;
    probe text;
    failure text;
    target text := (SELECT format('%I.%I', n.nspname, c.relname)
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl);
    ours text := current_setting('search_path');
BEGIN
    IF row_sql IS NULL THEN
        RETURN 'json';
    END IF;
    PERFORM set_config('search_path', (SELECT reset_val FROM pg_settings WHERE name = 'search_path'), true);
    BEGIN
        EXECUTE format(E'SELECT pg_typeof((SELECT (%s\n) FROM %s AS t LIMIT 0))::text', row_sql, target) INTO kind;
        -- The id beside it and the coalesce refuse aggregates and functions that return sets, as reading would.
        FOR probe IN EXECUTE format(E'SELECT line FROM (SELECT t.%I, coalesce((%s\n)::text, ''null'') FROM %s AS t'
            ' ORDER BY 1 DESC LIMIT 100) q(id, line)', id_column, row_sql, target)
        LOOP
            PERFORM CASE WHEN kind NOT IN ('json', 'jsonb') THEN probe::json END;
        END LOOP;
    EXCEPTION WHEN OTHERS THEN
        failure := SQLERRM;
    END;
    PERFORM set_config('search_path', ours, true);
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


COMMENT ON FUNCTION replicad.stream_check_row(tbl regclass, id_column name, row_sql text) IS 'Tries a row expression; RS002 where it fails';


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
        ELSIF part.relkind NOT IN ('r', 'p') THEN
            PERFORM stream_refuse(format('%s is not an ordinary table', part.name),
                'writes on another server cannot be watched from here: register the table where it lives');
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


COMMENT ON FUNCTION replicad.stream_check_table(tbl regclass) IS 'Refuses views, foreign, temporary and unlogged tables';


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


COMMENT ON FUNCTION replicad.stream_column_type(tbl regclass, column_name name) IS 'The type of a column; RS002 where there is no such column';


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
    RETURN pg_advisory_unlock_shared(stream_lock_key(number, held));
END
$$;


COMMENT ON FUNCTION replicad.stream_complete(number integer, held bigint, next bigint) IS 'Ends the oldest reservation of this session';


CREATE FUNCTION replicad.stream_epoch(s replicad.stream) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT left(encode(sha256(convert_to(concat_ws(' ',
        (SELECT c.system_identifier FROM pg_control_system() c),
        CASE WHEN pg_is_in_recovery() THEN (SELECT c.timeline_id::text FROM pg_control_checkpoint() c)
            ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) END,
        (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()),
        s.number, extract(epoch FROM s.created_at), s.resets), 'UTF8')), 'hex'), 16)
$$;


COMMENT ON FUNCTION replicad.stream_epoch(s replicad.stream) IS 'What a token must have in common with the stream it was made for';


CREATE FUNCTION replicad.stream_fault(s replicad.stream) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    fault record;
    missing name;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = s.relation) THEN
        RETURN format('its table was dropped; run: SELECT %I.stream_remove(%L)', current_schema(), s.name);
    END IF;
    SELECT needed INTO missing FROM unnest(ARRAY[s.id_column, s.instance_column]) needed
    WHERE needed IS NOT NULL AND NOT EXISTS (
        SELECT FROM pg_attribute a WHERE a.attrelid = s.relation AND a.attname = needed AND NOT a.attisdropped);
    IF FOUND THEN
        RETURN format('table %s has no column %I any more; remove the stream and add it anew', s.relation, missing);
    END IF;
    IF s.positions IS NOT NULL AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = s.positions) THEN
        RETURN 'its table of positions was dropped; remove the stream and add it anew';
    END IF;
    SELECT * INTO fault FROM stream_sequence_fault(s.sequence, s.method);
    RETURN fault.problem || '; ' || fault.remedy;
END
$$;


COMMENT ON FUNCTION replicad.stream_fault(s replicad.stream) IS 'Why a registered stream can no longer be served; NULL where it can';


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


COMMENT ON FUNCTION replicad.stream_find(name text) IS 'The registered stream of that name; RS001 where there is none';


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


COMMENT ON FUNCTION replicad.stream_find_reserved(name text) IS 'The stream of that name, if its ids are reserved';


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
        EXECUTE format('CREATE TRIGGER replicad_guard_%s AFTER INSERT OR UPDATE OF %I ON %s FOR EACH ROW'
            ' EXECUTE FUNCTION stream_guard_%s()', s.number, s.id_column, member, s.number);
    END LOOP;
END
$$;


COMMENT ON FUNCTION replicad.stream_guard_attach(s replicad.stream) IS 'Creates the trigger that refuses ids which outlived their reservation';


CREATE FUNCTION replicad.stream_guard_build(s replicad.stream) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $_$
BEGIN
    EXECUTE format($template$
        CREATE OR REPLACE FUNCTION %1$I.stream_guard_%2$s() RETURNS trigger LANGUAGE plpgsql AS $guard$
        DECLARE
            held text := current_setting(%3$L, true);
        BEGIN
            IF split_part(held, ':', 1) = pg_current_xact_id()::text AND NEW.%4$I > split_part(held, ':', 2)::bigint THEN
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
END
$_$;


COMMENT ON FUNCTION replicad.stream_guard_build(s replicad.stream) IS 'Builds the function that guards a reserved stream';


CREATE FUNCTION replicad.stream_holds_back(number integer, session text, writer text) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
    SELECT session = writer OR NOT EXISTS (
        SELECT FROM stream_writer w WHERE w.stream = stream_holds_back.number AND w.name = session)
$$;


COMMENT ON FUNCTION replicad.stream_holds_back(number integer, session text, writer text) IS 'Whether a session of that name holds a writer back';


CREATE FUNCTION replicad.stream_instance(instance text) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
    SELECT coalesce(nullif(left(translate(instance,
        E'\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10'
        '\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f\x20\x7f',
        '_________________________________'), 200), ''), 'master')
$$;


COMMENT ON FUNCTION replicad.stream_instance(instance text) IS 'A writer''s name as one word: NULL is master, blanks become _';


CREATE FUNCTION replicad.stream_json(value text) RETURNS text
    LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
    AS $$
BEGIN
    RETURN value::json::text;
EXCEPTION WHEN data_exception OR statement_too_complex THEN
    RETURN to_json(value)::text;
END
$$;


COMMENT ON FUNCTION replicad.stream_json(value text) IS 'Text that is JSON as it is, other text as a JSON string';


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


COMMENT ON FUNCTION replicad.stream_last_value(sequence regclass) IS 'The last id that a sequence issued, as reservations need it';


CREATE FUNCTION replicad.stream_lock_key(number integer, bound bigint, certified boolean DEFAULT false) RETURNS bigint
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT ((CASE WHEN certified THEN 12800 ELSE 20992 END + number)::bigint << 48) | bound
$$;


COMMENT ON FUNCTION replicad.stream_lock_key(number integer, bound bigint, certified boolean) IS 'The advisory lock that carries a stream and a bound';


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


COMMENT ON FUNCTION replicad.stream_mark_position(stream_number integer, new_position bigint, at timestamp with time zone) IS 'Notes where a stream stands, for trimming by age';


CREATE FUNCTION replicad.stream_next(stream text) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream;
    xid text := pg_current_xact_id()::text;
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
        bound := pg_sequence_last_value(s.sequence);
        IF bound IS NULL OR bound >> 48 <> 0 THEN
            bound := stream_last_value(s.sequence);
        END IF;
        PERFORM pg_advisory_xact_lock_shared(stream_lock_key(s.number, bound)),
            set_config(s.setting, xid || ':' || bound, true);
    END IF;
    id := nextval(s.sequence);
    IF id <= bound THEN
        PERFORM stream_refuse_step(s.sequence, id, bound);
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
        SELECT 4, format('%s has row security: rows that the daemon''s role may not see are not sent', s.relation)
        FROM pg_class c WHERE c.oid = s.relation AND c.relrowsecurity
        UNION ALL
        SELECT 5, 'the row expression yields text, which is checked row by row; jsonb or json is faster'
        WHERE s.row_type = 'text'
        UNION ALL
        SELECT 6, format('the default of %I does not draw from %s: with lock_watch the INSERT itself must call nextval; '
            'for ids taken earlier use the method reservation', s.id_column, s.sequence)
        WHERE s.method = 'lock_watch' AND stream_sequence(s.relation, s.id_column) IS DISTINCT FROM s.sequence
        UNION ALL
        SELECT 7, format('writers take their ids from %I.stream_next(%L); an id that is not reserved is refused',
            current_schema(), s.name)
        WHERE s.method = 'reservation'
        UNION ALL
        SELECT 8, 'an UPDATE that moves a row to another partition inserts it there, so it needs a new id from stream_next'
        FROM pg_class c WHERE s.method = 'reservation' AND c.oid = s.relation AND c.relkind = 'p'
    ) notes
$$;


COMMENT ON FUNCTION replicad.stream_notes(s replicad.stream) IS 'Remarks about a stream, for the person who adds it';


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
        SELECT a.application_name AS holder, l.key & 281474976710655 AS bound
        FROM (SELECT p.pid, (p.classid::bigint << 32) | p.objid::bigint AS key FROM pg_locks p
              WHERE p.locktype = 'advisory' AND p.objsubid = 1 AND p.mode = 'ShareLock' AND p.granted
                AND p.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())) l
        LEFT JOIN pg_stat_activity a ON a.pid = l.pid  -- none: prepared
        WHERE l.key BETWEEN stream_lock_key(s.number, 0) AND stream_lock_key(s.number, 281474976710655)
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


CREATE FUNCTION replicad.stream_publish(stream_number integer, seen_resets integer, linear_position bigint, writers integer[], positions bigint[], at timestamp with time zone DEFAULT clock_timestamp()) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    PERFORM FROM stream s WHERE s.number = stream_number AND s.resets = seen_resets FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN false;
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


COMMENT ON FUNCTION replicad.stream_publish(stream_number integer, seen_resets integer, linear_position bigint, writers integer[], positions bigint[], at timestamp with time zone) IS 'Keeps the positions that a daemon has published';


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


COMMENT ON FUNCTION replicad.stream_refuse(problem text, remedy text) IS 'Raises RS002 with a reason and a remedy';


CREATE FUNCTION replicad.stream_refuse_step(sequence regclass, id bigint, bound bigint) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
BEGIN
    PERFORM stream_refuse(format('sequence %s issued %s after %s', sequence, id, bound),
        'the sequence of a stream has CACHE 1, and is never set back while writers are at work');
END
$$;


COMMENT ON FUNCTION replicad.stream_refuse_step(sequence regclass, id bigint, bound bigint) IS 'Refuses an id that went backwards';


CREATE FUNCTION replicad.stream_remove(name text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    s stream := stream_find(name);
    member regclass;
BEGIN
    FOR member IN SELECT t.tgrelid FROM pg_trigger t
        WHERE t.tgname = 'replicad_guard_' || s.number AND t.tgparentid = 0
            AND t.tgfoid = to_regprocedure(format('stream_guard_%s()', s.number))
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', 'replicad_guard_' || s.number, member);
    END LOOP;
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


CREATE FUNCTION replicad.stream_reset(stream_number integer, seen_resets integer, new_position bigint) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    now_at integer;
BEGIN
    UPDATE stream SET resets = resets + 1, trimmed_upto = least(trimmed_upto, new_position)
    WHERE number = stream_number AND resets = seen_resets
    RETURNING resets INTO now_at;
    IF FOUND THEN
        DELETE FROM stream_mark m WHERE m.stream = stream_number AND m.position > new_position;
        UPDATE stream_position p SET position = new_position, published_at = clock_timestamp()
        WHERE p.stream = stream_number AND p.position > new_position;
        RETURN now_at;
    END IF;
    SELECT s.resets INTO now_at FROM stream s WHERE s.number = stream_number;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'RS001', MESSAGE = 'the stream was removed', HINT = 'load the streams again';
    END IF;
    RETURN now_at;
END
$$;


COMMENT ON FUNCTION replicad.stream_reset(stream_number integer, seen_resets integer, new_position bigint) IS 'Announces that the ids of a stream have gone back';


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


COMMENT ON FUNCTION replicad.stream_retained(stream_number integer, after bigint) IS 'Raises RS004 for a position below which rows were trimmed';


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
        SELECT d.objid, 2
        FROM pg_depend d
        WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
            AND d.refobjid = a.attrelid AND d.refobjsubid = a.attnum
    ) found
    JOIN pg_class c ON c.oid = found.sequence AND c.relkind = 'S'
    WHERE a.attrelid = tbl AND a.attname = column_name AND NOT a.attisdropped
    ORDER BY found.preference LIMIT 1
$$;


COMMENT ON FUNCTION replicad.stream_sequence(tbl regclass, column_name name) IS 'The sequence that feeds a column, by default or by ownership';


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
        remedy := 'the ids of a stream grow: feed the column from a sequence that counts upwards';
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


COMMENT ON FUNCTION replicad.stream_sequence_fault(sequence regclass, method text, OUT problem text, OUT remedy text) IS 'Why a sequence cannot feed a stream, and what mends it';


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


COMMENT ON FUNCTION replicad.stream_tables(tbl regclass) IS 'A table with all its partitions and heirs';


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
    PERFORM set_config('application_name', 'replicad ack', true);
    EXECUTE format('SELECT max(id) FROM (SELECT t.%I FROM %s AS t WHERE t.%I <= $1 ORDER BY 1 LIMIT $2) oldest(id)',
        s.id_column, s.relation, s.id_column) INTO step USING upto, greatest(batch, 1);
    UPDATE stream x SET trimmed_upto = greatest(x.trimmed_upto, coalesce(step, upto)) WHERE x.number = s.number;
    IF step IS NULL THEN
        DELETE FROM stream_mark m WHERE m.stream = s.number AND m.position < upto
            AND m.at < (SELECT max(x.at) FROM stream_mark x WHERE x.stream = s.number AND x.position <= upto);
        RETURN 0;
    END IF;
    EXECUTE format('DELETE FROM %s AS t WHERE t.%I <= $1', s.relation, s.id_column) USING step;
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN deleted;
END
$_$;


COMMENT ON FUNCTION replicad.stream_trim(name text, upto bigint, batch integer) IS 'Deletes a batch of the oldest rows of a stream';


CREATE FUNCTION replicad.stream_writers_discover(s replicad.stream) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    names text[] := ARRAY['master'];
BEGIN
    IF s.instance_column IS NOT NULL THEN
        EXECUTE format('SELECT array_agg(DISTINCT instance) FROM ('
            'SELECT t.%I::text COLLATE "C" FROM %s AS t ORDER BY t.%I DESC LIMIT 100000) newest(instance)',
            s.instance_column, s.relation, s.id_column) INTO names;
    END IF;
    PERFORM stream_writers_ensure(s.number, names);
END
$$;


COMMENT ON FUNCTION replicad.stream_writers_discover(s replicad.stream) IS 'Numbers for the writers of the newest rows';


CREATE FUNCTION replicad.stream_writers_ensure(stream_number integer, names text[]) RETURNS TABLE(writer text, writer_number integer)
    LANGUAGE plpgsql
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    wanted text[] := ARRAY(SELECT DISTINCT stream_instance(n) FROM unnest(names) n);
BEGIN
    IF EXISTS (SELECT FROM unnest(wanted) n
               WHERE NOT EXISTS (SELECT FROM stream_writer w WHERE w.stream = stream_number AND w.name = n)) THEN
        PERFORM FROM stream s WHERE s.number = stream_number FOR NO KEY UPDATE;  -- one after another
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


COMMENT ON FUNCTION replicad.stream_writers_ensure(stream_number integer, names text[]) IS 'Numbers of writers, new ones included';


CREATE FUNCTION replicad.writer_beat(stream text, instance text, term bigint) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    w writer_sharding := writer_find(stream);
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


COMMENT ON FUNCTION replicad.writer_changed(number smallint) IS 'Gives the sharing of a stream a new version';


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
                format('stop them and run `replicad writers disable %s` first: a key''s slot depends on the number',
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


COMMENT ON FUNCTION replicad.writer_expelled(stream text, instance text, term bigint) IS 'Raises the error of an ended membership';


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
            format('run `replicad writers enable %s`, or: SELECT %I.writer_enable(%L)', stream, current_schema(), stream));
    END IF;
    RETURN found_sharding;
END
$$;


COMMENT ON FUNCTION replicad.writer_find(stream text) IS 'How the keys of a stream are shared; RS002 where they are not';


CREATE FUNCTION replicad.writer_give(stream text, instance text, given integer[], terms bigint[], receivers text[], patience interval DEFAULT '00:00:00'::interval) RETURNS TABLE(slot integer, term bigint)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    w writer_sharding := writer_find(stream);
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


COMMENT ON FUNCTION replicad.writer_join(stream text, instance text, ttl interval, address text, expired bigint[], OUT term bigint, OUT beat bigint) IS 'Becomes one of the writers of a stream';


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
    w writer_sharding := writer_find(stream);
BEGIN
    SELECT * INTO w FROM writer_sharding x WHERE x.stream = w.stream FOR UPDATE;
    IF NOT FOUND THEN
        RETURN writer_find(stream);  -- disabled while we waited: raises
    END IF;
    RETURN w;
END
$$;


COMMENT ON FUNCTION replicad.writer_lock(stream text) IS 'Locks what says how the keys of a stream are shared';


CREATE FUNCTION replicad.writer_lock_key(stream integer, slot integer) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
    SELECT stream * 65536 + slot
$$;


COMMENT ON FUNCTION replicad.writer_lock_key(stream integer, slot integer) IS 'Advisory lock key of a slot';


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


COMMENT ON FUNCTION replicad.writer_lock_slots(stream smallint, wanted integer[], patience interval) IS 'Keeps all writes out of slots, where it can';


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


COMMENT ON FUNCTION replicad.writer_not_owner(stream text, key text, instance text, term bigint) IS 'Raises the error of a key that is another''s';


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


COMMENT ON FUNCTION replicad.writer_refuse(code text, message text, hint text) IS 'Raises an error of ours with its remedy';


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


COMMENT ON FUNCTION replicad.writer_slot_of(key text, slots integer) IS 'The slot of a key; the same in every version and in Python';


CREATE FUNCTION replicad.writer_take(stream text, instance text, member bigint, wanted integer[], seen bigint[], patience interval DEFAULT '00:00:00'::interval) RETURNS TABLE(slot integer, term bigint)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'replicad', 'pg_temp'
    AS $$
DECLARE
    w writer_sharding := writer_find(stream);
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


CREATE FUNCTION tube.tube_ack(tube text, partitions integer, partition integer, term bigint, seqs bigint[]) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_lease_hold(tube, partitions, partition, term);
    RETURN tube_remove(tube, partitions, partition, seqs);
END
$$;


COMMENT ON FUNCTION tube.tube_ack(tube text, partitions integer, partition integer, term bigint, seqs bigint[]) IS 'Removes pods that the downstream has';


CREATE FUNCTION tube.tube_ack_upto(tube text, partitions integer, partition integer, term bigint, after_regular bigint, after_backfill bigint, upto_regular bigint, upto_backfill bigint) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_lease_hold(tube, partitions, partition, term);
    RETURN tube_remove_range(tube, partitions, partition, false, after_regular, upto_regular)
        + tube_remove_range(tube, partitions, partition, true, after_backfill, upto_backfill);
END
$$;


COMMENT ON FUNCTION tube.tube_ack_upto(tube text, partitions integer, partition integer, term bigint, after_regular bigint, after_backfill bigint, upto_regular bigint, upto_backfill bigint) IS 'Removes a range of pods that the downstream has';


CREATE TABLE tube.tube_attachment (
    tube text NOT NULL,
    tbl regclass NOT NULL,
    root regclass NOT NULL,
    shard integer NOT NULL,
    predicate text,
    routing text,
    path name[] NOT NULL,
    CONSTRAINT tube_attachment_shard_check CHECK ((shard >= 0))
);


COMMENT ON TABLE tube.tube_attachment IS 'replicad: which tables touch which tubes; use tube_table_ensure_attached()';


CREATE FUNCTION tube.tube_attached(tube text, tbl regclass, order_col text) RETURNS tube.tube_attachment
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    t tube_registry := tube_keep(tube);
    a tube_attachment;
BEGIN
    IF tube_qualified(tbl) IS NOT NULL THEN
        EXECUTE format('LOCK TABLE %s IN ACCESS SHARE MODE', tube_qualified(tbl));
    END IF;
    SELECT * INTO a FROM tube_attachment x WHERE x.tube = t.tube AND x.tbl = tube_attached.tbl AND x.root = x.tbl
        FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM tube_refuse('RT005', format('table %s is not attached to tube %L', tbl, tube), 'attach it first');
    END IF;
    IF NOT EXISTS (SELECT FROM pg_attribute c
            WHERE c.attrelid = a.tbl AND c.attname = order_col AND c.attnum > 0 AND NOT c.attisdropped) THEN
        PERFORM tube_refuse('RT005', format('table %s has no column %L to order its backfill by', tbl, order_col),
            'name a column of the table, id for example');
    END IF;
    RETURN a;
END
$$;


COMMENT ON FUNCTION tube.tube_attached(tube text, tbl regclass, order_col text) IS 'The attachment that a backfill is of';


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


COMMENT ON FUNCTION tube.tube_backfill_begin(a tube.tube_attachment, start_seq text, order_col text, shard integer, shards integer[]) IS 'Marks the beginning of a backfill';


CREATE FUNCTION tube.tube_backfill_chunk(step1 text, tube text, tbl regclass, order_col text, shard integer DEFAULT NULL::integer, max_ids integer DEFAULT 100000, insert_chunk_size integer DEFAULT 250, OUT ids bigint, OUT finished boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    SET row_security TO 'off'
    SET "DateStyle" TO 'ISO, YMD'
    AS $$
DECLARE
    a tube_attachment := tube_attached(tube, tbl, order_col);
    b tube_backfill;
    home integer := coalesce(shard, a.shard);
    page record;
BEGIN
    PERFORM tube_check_touch(home, 'B', insert_chunk_size);
    SELECT * INTO b FROM tube_backfill x WHERE x.tube = a.tube AND x.tbl = a.tbl AND NOT x.finished;
    IF NOT FOUND THEN
        IF NOT tube_backfill_begin(a, step1, order_col, home,
                CASE WHEN a.routing IS NULL THEN ARRAY[home] ELSE '{}' END) THEN
            finished := true;
            RETURN;
        END IF;
        SELECT * INTO b FROM tube_backfill x WHERE x.tube = a.tube AND x.tbl = a.tbl;
    END IF;
    SELECT * INTO page FROM tube_backfill_page(a, b, greatest(max_ids, 1));
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


COMMENT ON FUNCTION tube.tube_backfill_chunk(step1 text, tube text, tbl regclass, order_col text, shard integer, max_ids integer, insert_chunk_size integer, OUT ids bigint, OUT finished boolean) IS 'Third step of a backfill, the next piece of it';


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


COMMENT ON FUNCTION tube.tube_backfill_control(tube text, type text, start_seq text, shards integer[]) IS 'Puts control pods of a backfill into a tube';


CREATE TABLE tube.tube_backfill (
    tube text NOT NULL,
    tbl regclass NOT NULL,
    shard integer NOT NULL,
    start_seq text NOT NULL,
    order_col name NOT NULL,
    after_value text,
    after_id bigint,
    shards integer[] NOT NULL,
    ids bigint DEFAULT 0 NOT NULL,
    approx_ids bigint,
    finished boolean DEFAULT false NOT NULL,
    started_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    updated_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE tube.tube_backfill IS 'replicad: progress of backfills';


CREATE FUNCTION tube.tube_backfill_page(a tube.tube_attachment, b tube.tube_backfill, max_ids integer, OUT ids bigint[], OUT shards integer[], OUT last_value text) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    kind text := (SELECT format_type(c.atttypid, c.atttypmod) FROM pg_attribute c
        WHERE c.attrelid = a.tbl AND c.attname = b.order_col);
    path text := tube_path_text((tube_find(a.tube)).path || a.path);
    source text := tube_backfill_source(a, b.order_col, b.shard);
    with_key text := format('SELECT * FROM (%s) AS stored WHERE sort_key IS NOT NULL%s ORDER BY sort_key, id LIMIT %s',
        source, CASE WHEN b.after_value IS NOT NULL THEN format(' AND (sort_key, id) > ($1::%s, $2)', kind) END,
        max_ids);
    without_key text := format('SELECT * FROM (%s) AS stored WHERE sort_key IS NULL%s ORDER BY id LIMIT %s',
        source, CASE WHEN b.after_value IS NULL AND b.after_id IS NOT NULL THEN ' AND id > $2' END, max_ids);
BEGIN
    PERFORM set_config('search_path', path, true);
    EXECUTE format('WITH page AS MATERIALIZED ('
        'SELECT shard, id, sort_key, row_number() OVER (ORDER BY sort_key IS NULL, sort_key, id) AS n'
        ' FROM (%s) AS found'
        ' ORDER BY n LIMIT %s'
        ') SELECT coalesce(array_agg(id ORDER BY n), ''{}''), array_agg(shard ORDER BY n),'
        ' (SELECT sort_key::text FROM page ORDER BY n DESC LIMIT 1) FROM page',
        CASE WHEN b.after_value IS NULL AND b.after_id IS NOT NULL THEN without_key
            ELSE format('(%s) UNION ALL (%s)', with_key, without_key) END, max_ids)
        INTO ids, shards, last_value USING b.after_value, b.after_id;
END
$_$;


COMMENT ON FUNCTION tube.tube_backfill_page(a tube.tube_attachment, b tube.tube_backfill, max_ids integer, OUT ids bigint[], OUT shards integer[], OUT last_value text) IS 'The next ids of a backfill';


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
    END IF;
END
$$;


COMMENT ON FUNCTION tube.tube_backfill_progress(a tube.tube_attachment, more bigint, finished boolean) IS 'Notes how far a backfill has got';


CREATE FUNCTION tube.tube_backfill_put(b tube.tube_backfill, ids bigint[], shards integer[], chunk integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
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
$_$;


COMMENT ON FUNCTION tube.tube_backfill_put(b tube.tube_backfill, ids bigint[], shards integer[], chunk integer) IS 'Puts ids of a backfill into the tube';


CREATE FUNCTION tube.tube_backfill_schedule(tube text, order_col text, shard_from integer, shard_to integer) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    t tube_registry := tube_lock(tube);
    a tube_attachment;
    scheduled integer := 0;
    more integer;
BEGIN
    FOR a IN SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl
        WHERE x.tube = t.tube AND x.tbl = x.root AND x.shard BETWEEN shard_from AND shard_to
        ORDER BY x.shard, x.tbl::oid
    LOOP
        PERFORM tube_attached(a.tube, a.tbl, order_col);
        CONTINUE WHEN tube_backfilling(a.tube, a.tbl, a.shard);
        EXECUTE format('INSERT INTO %1$I (op, shard, ids, payload) SELECT ''B'', $1, ''{}'', $2 WHERE NOT EXISTS ('
            'SELECT FROM %1$I p WHERE cardinality(p.ids) = 0 AND p.shard = $1'
            ' AND p.payload ->> ''type'' = $2 ->> ''type'''
            ' AND p.payload ->> ''tbl'' = $2 ->> ''tbl'')', t.tube)
            USING a.shard, jsonb_build_object(
                'type', 'backfill_schedule', 'tbl', tube_qualified(a.tbl), 'order_col', order_col);
        GET DIAGNOSTICS more = ROW_COUNT;
        scheduled := scheduled + more;
    END LOOP;
    RETURN scheduled;
END
$_$;


COMMENT ON FUNCTION tube.tube_backfill_schedule(tube text, order_col text, shard_from integer, shard_to integer) IS 'Asks for backfills of a range of shards';


CREATE FUNCTION tube.tube_backfill_shards(source text, path text) RETURNS integer[]
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    shards integer[];
BEGIN
    PERFORM set_config('search_path', path, true);
    EXECUTE format('SELECT coalesce(array_agg(DISTINCT shard), ''{}'') FROM (%s) AS stored', source) INTO shards;
    RETURN shards;
END
$$;


COMMENT ON FUNCTION tube.tube_backfill_shards(source text, path text) IS 'The shards that occur in a backfill';


CREATE FUNCTION tube.tube_backfill_source(a tube.tube_attachment, order_col text, home integer) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT format('SELECT %s AS shard, id::bigint AS id, %I AS sort_key FROM %s AS tube_row WHERE id IS NOT NULL%s',
        coalesce(E'coalesce((\n' || a.routing || format(E'\n)::integer, %s) & 2147483647', home), home::text),
        order_col, tube_qualified(a.tbl), tube_where((tube_find(a.tube)).predicate, a.predicate))
$$;


COMMENT ON FUNCTION tube.tube_backfill_source(a tube.tube_attachment, order_col text, home integer) IS 'The query of the rows that a backfill is of';


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
    AS $$
DECLARE
    t tube_registry := tube_find(tube);
    a tube_attachment := tube_attached(tube, tbl, order_col);
    home integer := coalesce(shard, a.shard);
    path text := tube_path_text(t.path || a.path);
    source text := tube_backfill_source(a, order_col, home);
    shards integer[] := ARRAY[home];
    inserted bigint;
BEGIN
    PERFORM tube_check_touch(home, 'B', insert_chunk_size);
    IF a.routing IS NOT NULL THEN
        shards := tube_backfill_shards(source, path);
    END IF;
    IF NOT tube_backfill_begin(a, step1, order_col, home, shards) THEN
        RETURN NULL;
    END IF;
    inserted := tube_insert_numbered(ARRAY[a.tube],
        format('SELECT stored.shard, stored.id, row_number() OVER (%s ORDER BY stored.sort_key) - 1 AS n'
            ' FROM (%s) AS stored',
            CASE WHEN a.routing IS NOT NULL THEN 'PARTITION BY stored.shard' END, source),
        path, CASE WHEN a.routing IS NULL THEN home END, 'B',
        (SELECT b.approx_ids FROM tube_backfill b WHERE b.tube = a.tube AND b.tbl = a.tbl),
        greatest(fetch_chunk_size, 1), insert_chunk_size);
    PERFORM tube_backfill_progress(a, inserted, true);
    RETURN inserted;
END
$$;


COMMENT ON FUNCTION tube.tube_backfill_step3(step1 text, tube text, tbl regclass, order_col text, shard integer, fetch_chunk_size integer, insert_chunk_size integer) IS 'Third step of a backfill: all ids of a table';


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


COMMENT ON FUNCTION tube.tube_backfilling(tube text, tbl regclass, shard integer) IS 'Whether a table''s shard is being backfilled';


CREATE FUNCTION tube.tube_check_expression(tbl regclass, what text, expression text, path name[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    own_path text := current_setting('search_path');
    their_path text := tube_path_text(path);
    -- WHERE allows neither aggregates nor sets, and a number no OR behind a bracket that the expression closes. The
    -- alias is the one that the triggers use.
    trial text := format(
        E'SELECT FROM %s AS tube_row WHERE num_nulls(\n%s\n) = 2 LIMIT 0', tube_qualified(tbl), expression);
    typing text := format(E'SELECT pg_typeof((SELECT (\n%s\n) FROM %s AS tube_row LIMIT 0))',
        expression, tube_qualified(tbl));
    remedy text := format('write SQL on the columns of %s alone; names were looked up along %s', tbl, their_path);
    kind regtype;
    refusal text;
BEGIN
    IF expression IS NULL THEN
        RETURN;
    ELSIF btrim(expression) = '' THEN
        PERFORM tube_refuse('RT005', format('the %s for table %s is empty', what, tbl), 'leave it out, or say NULL');
    END IF;
    BEGIN
        PERFORM set_config('search_path', their_path, true);
        EXECUTE trial;
        EXECUTE typing INTO kind;
    EXCEPTION WHEN OTHERS THEN
        refusal := SQLERRM;
    END;
    PERFORM set_config('search_path', own_path, true);
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


COMMENT ON FUNCTION tube.tube_check_expression(tbl regclass, what text, expression text, path name[]) IS 'Refuses predicates and routings that fail on a table';


CREATE FUNCTION tube.tube_check_name(tube text) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    taken name;
BEGIN
    IF tube IS NULL OR tube = '' OR octet_length(tube) > 50 OR tube ~ '[[:space:][:cntrl:]]' THEN
        PERFORM tube_refuse('RT005',
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


COMMENT ON FUNCTION tube.tube_check_name(tube text) IS 'Refuses names that a tube cannot have';


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


COMMENT ON FUNCTION tube.tube_check_partition(partitions integer, partition integer) IS 'Refuses partitions that cannot be';


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


COMMENT ON FUNCTION tube.tube_check_partitions(tube text, partitions integer) IS 'Refuses a number of partitions that is not the tube''s';


CREATE FUNCTION tube.tube_check_table(tube text, tbl regclass) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    fault text;
BEGIN
    SELECT CASE
            WHEN c.relnamespace = quote_ident(current_schema())::regnamespace THEN 'it lies in the schema of the tubes'
            WHEN c.relpersistence = 't' THEN 'it is temporary'
            WHEN c.relkind NOT IN ('r', 'p') THEN 'it is no ordinary or partitioned table'
            WHEN i.atttypid IS NULL THEN 'it has no column called id'
            WHEN i.atttypid NOT IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype) THEN
                format('its id is %s and not bigint', format_type(i.atttypid, i.atttypmod))
            WHEN c.oid <> tube_check_table.tbl AND a.root = a.tbl THEN 'it is attached by itself'
            WHEN a.root <> tube_check_table.tbl THEN format('it is attached through %s', a.root)
            WHEN NOT has_table_privilege(f.proowner, c.oid, 'SELECT') THEN
                format('%s, who owns these functions, may not read it', f.proowner::regrole)
        END || CASE WHEN c.oid <> tube_check_table.tbl THEN format(' (partition %s)', c.oid::regclass) ELSE '' END
        INTO fault
        FROM tube_members(tbl) m JOIN pg_class c ON c.oid = m
            JOIN pg_proc f ON f.oid = to_regprocedure('tube_truncate_trigger()')
            LEFT JOIN pg_attribute i ON i.attrelid = c.oid AND i.attname = 'id' AND NOT i.attisdropped
            LEFT JOIN tube_attachment a ON a.tube = tube_check_table.tube AND a.tbl = c.oid
        ORDER BY 1 LIMIT 1;
    IF fault IS NOT NULL THEN
        PERFORM tube_refuse('RT005', format('table %s cannot be attached to tube %L: %s', tbl, tube, fault),
            'a table of a tube is ordinary or partitioned, has an id of type bigint, integer or smallint, may be read'
            ' by the owner of the tubes, and is attached to a tube once');
    END IF;
END
$$;


COMMENT ON FUNCTION tube.tube_check_table(tube text, tbl regclass) IS 'Refuses tables that cannot be attached';


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


COMMENT ON FUNCTION tube.tube_check_touch(shard integer, op character, chunk_size integer) IS 'Refuses touches that make no pod';


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
    IF payload THEN
        columns := columns || ', string_agg(int4send(coalesce(octet_length(body), -1)), '''') AS sizes,'
            ' string_agg(body, '''') AS bodies';
        source := 'SELECT * FROM (SELECT texts.*, sum(12 * cardinality(ids) + coalesce(octet_length(body), 0))'
            ' OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before'
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


COMMENT ON FUNCTION tube.tube_columns_sql(tube text, partitions integer, partition integer, term bigint, backfill boolean, after bigint, upto bigint, payload boolean) IS 'The statement that yields a piece of a range of pods as columns';


CREATE TABLE tube.tube_registry (
    tube text NOT NULL,
    partitions integer NOT NULL,
    predicate text,
    path name[] NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT tube_registry_partitions_check CHECK (((partitions >= 1) AND (partitions <= 32768)))
);


COMMENT ON TABLE tube.tube_registry IS 'replicad: the tubes; use tube_ensure_exists() and tube_ensure_absent()';


CREATE FUNCTION tube.tube_count(t tube.tube_registry, partition integer, backfill boolean, exact integer, OUT pods bigint, OUT ids bigint, OUT min_seq bigint, OUT max_seq bigint, OUT min_ts timestamp with time zone, OUT max_ts timestamp with time zone, OUT estimated boolean) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    condition text := format(
        '(shard %% %s) = %s AND (op = ''B'')::integer = %s', t.partitions, partition, backfill::integer);
    pages bigint := pg_relation_size(tube_relation(t.tube)) / current_setting('block_size')::integer;
    share numeric := least(100, 100 * 200 / greatest(pages, 1)::numeric);  -- in per cent: about 200 pages
BEGIN
    EXECUTE format('SELECT count(*), coalesce(sum(cardinality(ids)), 0), count(*) > $1 FROM (%s) AS oldest',
        tube_range_sql(t, t.partitions, partition, backfill, pods => exact + 1)) INTO pods, ids, estimated USING exact;
    EXECUTE format('SELECT seq, ts FROM (%s) AS oldest',
        tube_range_sql(t, t.partitions, partition, backfill, pods => 1)) INTO min_seq, min_ts;
    EXECUTE format(
        'SELECT seq, ts FROM %I WHERE %s AND seq > 0 AND seq <= 9223372036854775807 ORDER BY seq DESC LIMIT 1',
        t.tube, condition) INTO max_seq, max_ts;
    IF estimated THEN
        EXECUTE format('SELECT greatest($1, count(*) * 100 / %1$s), greatest($2, sum(cardinality(ids)) * 100 / %1$s)'
            ' FROM %2$I TABLESAMPLE SYSTEM (%1$s) WHERE %3$s', share, t.tube, condition) INTO pods, ids USING pods, ids;
    END IF;
END
$_$;


COMMENT ON FUNCTION tube.tube_count(t tube.tube_registry, partition integer, backfill boolean, exact integer, OUT pods bigint, OUT ids bigint, OUT min_seq bigint, OUT max_seq bigint, OUT min_ts timestamp with time zone, OUT max_ts timestamp with time zone, OUT estimated boolean) IS 'Counts or estimates one kind of pods in one partition';


CREATE FUNCTION tube.tube_count_control(tube text, partitions integer, partition integer) RETURNS bigint
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    pods bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM %I WHERE cardinality(ids) = 0 AND shard %% $1 = $2', tube)
        INTO pods USING partitions, partition;
    RETURN pods;
END
$_$;


COMMENT ON FUNCTION tube.tube_count_control(tube text, partitions integer, partition integer) IS 'How many control pods a partition has';


CREATE FUNCTION tube.tube_ensure_absent(tube text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    root regclass;
BEGIN
    PERFORM FROM tube_registry r WHERE r.tube = tube_ensure_absent.tube FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    FOR root IN SELECT a.tbl FROM tube_attachment a WHERE a.tube = tube_ensure_absent.tube AND a.tbl = a.root
        ORDER BY a.tbl::oid
    LOOP
        PERFORM tube_table_ensure_detached(tube, root);
    END LOOP;
    PERFORM tube_trigger_sweep(tube);  -- those of tables that were dropped
    DELETE FROM tube_registry r WHERE r.tube = tube_ensure_absent.tube;
    EXECUTE format('DROP FUNCTION IF EXISTS %I()', tube_object_name(tube, '_trigger'));
    EXECUTE format('DROP FUNCTION IF EXISTS %I(integer, bigint[], character, jsonb, integer)',
        tube_object_name(tube, '_touch'));
    EXECUTE format('DROP TABLE IF EXISTS %I', tube);
END
$$;


COMMENT ON FUNCTION tube.tube_ensure_absent(tube text) IS 'Detaches all tables of a tube and drops it';


CREATE FUNCTION tube.tube_ensure_exists(tube text, partitions integer DEFAULT 1, predicate text DEFAULT NULL::text, path name[] DEFAULT current_schemas(false)) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    safe name[] := CASE WHEN predicate IS NULL THEN '{}' ELSE tube_safe_path(path) END;
    a tube_attachment;
BEGIN
    PERFORM tube_check_name(tube);
    IF partitions IS NULL OR partitions NOT BETWEEN 1 AND 32768 THEN
        PERFORM tube_refuse('RT005',
            format('tube %L cannot have %s partitions', tube, coalesce(partitions::text, 'NULL')),
            'a tube has 1 to 32768 partitions');
    END IF;
    INSERT INTO tube_registry VALUES (tube, partitions, predicate, safe) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        PERFORM tube_table_ensure(tube);
    ELSE
        PERFORM tube_lock(tube);
        UPDATE tube_registry r
            SET partitions = tube_ensure_exists.partitions, predicate = tube_ensure_exists.predicate, path = safe
            WHERE r.tube = tube_ensure_exists.tube AND (r.partitions, r.predicate, r.path)
                IS DISTINCT FROM (tube_ensure_exists.partitions, tube_ensure_exists.predicate, safe);
    END IF;
    FOR a IN SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl
        WHERE x.tube = tube_ensure_exists.tube AND x.tbl = x.root
    LOOP
        PERFORM tube_check_expression(a.tbl, 'predicate', predicate, safe);
        PERFORM tube_trigger_ensure(tube, a.predicate, a.routing, a.path);
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


COMMENT ON FUNCTION tube.tube_ensure_exists(tube text, partitions integer, predicate text, path name[]) IS 'Creates a tube, or alters it to be as asked';


CREATE FUNCTION tube.tube_few_sql(tube text, op text, rows text, rows_before text) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT format($sql$
        INSERT INTO %1$s (op, shard, ids)
        SELECT %2$s, TG_ARGV[0]::integer, few.ids
        FROM (SELECT ARRAY(%3$s LIMIT 251) AS ids%4$s OFFSET 0) AS few
        WHERE cardinality(few.ids) BETWEEN 1 AND 250%5$s;
        IF FOUND THEN
            RETURN NULL;
        END IF;
    $sql$, tube_relation(tube), op, rows,
        ', ARRAY(' || rows_before || ' LIMIT 251) AS ids_before',
        CASE WHEN rows_before IS NOT NULL THEN ' AND few.ids = few.ids_before' END)
$_$;


COMMENT ON FUNCTION tube.tube_few_sql(tube text, op text, rows text, rows_before text) IS 'The statement that turns a few rows into one pod';


CREATE FUNCTION tube.tube_find(tube text) RETURNS tube.tube_registry
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    found_tube tube_registry;
BEGIN
    SELECT * INTO found_tube FROM tube_registry r WHERE r.tube = tube_find.tube;
    IF NOT FOUND THEN
        PERFORM tube_refuse('RT001', format('there is no tube %L', tube),
            'SELECT * FROM tube_list() shows those there are');
    END IF;
    RETURN found_tube;
END
$$;


COMMENT ON FUNCTION tube.tube_find(tube text) IS 'A tube''s row in the registry';


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


COMMENT ON FUNCTION tube.tube_index_ensure(tube text, partitions integer) IS 'Makes the index for a number of partitions';


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


COMMENT ON FUNCTION tube.tube_infer_shard(tbl regclass) IS 'The number that ends the name of a table''s schema';


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


COMMENT ON FUNCTION tube.tube_insert_numbered(tubes text[], query text, path text, shard integer, op character, total bigint, every integer, chunk integer) IS 'Puts the ids of a numbered query into tubes';


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


COMMENT ON FUNCTION tube.tube_insert_sql(tube text, op text, shard text, rows text, chunk text, routed boolean) IS 'The statement that turns rows into pods';


CREATE FUNCTION tube.tube_keep(tube text) RETURNS tube.tube_registry
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM FROM tube_registry r WHERE r.tube = tube_keep.tube FOR KEY SHARE;
    RETURN tube_find(tube);
END
$$;


COMMENT ON FUNCTION tube.tube_keep(tube text) IS 'A tube''s row in the registry, kept from being dropped';


CREATE FUNCTION tube.tube_lease_check(tube text, partitions integer, partition integer, term bigint) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM FROM tube_lease l
        WHERE l.tube = tube_lease_check.tube AND l.term = tube_lease_check.term
            AND tube_lease_check.partitions % l.partitions = 0
            AND tube_lease_check.partition % l.partitions = l.partition;
    IF NOT FOUND THEN
        PERFORM tube_lease_lost(tube, partitions, partition, term);
    END IF;
    RETURN true;
END
$$;


COMMENT ON FUNCTION tube.tube_lease_check(tube text, partitions integer, partition integer, term bigint) IS 'Whether a term holds a partition; fences reads';


CREATE FUNCTION tube.tube_lease_claim(tube text, partitions integer, partition integer, holder text, ttl interval, expired bigint[], OUT term bigint, OUT beat bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    t tube_registry := tube_lock(tube);
    other tube_lease;
BEGIN
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
    INSERT INTO tube_lease AS l (tube, partitions, partition, holder, term, beat, ttl)
        VALUES (t.tube, partitions, partition, holder, nextval('tube_term_seq'), nextval('tube_term_seq'), ttl)
        ON CONFLICT ON CONSTRAINT tube_lease_pkey DO UPDATE SET beat = excluded.beat, ttl = excluded.ttl
        RETURNING l.term, l.beat INTO term, beat;
END
$$;


COMMENT ON FUNCTION tube.tube_lease_claim(tube text, partitions integer, partition integer, holder text, ttl interval, expired bigint[], OUT term bigint, OUT beat bigint) IS 'Claims the lease of a partition';


CREATE FUNCTION tube.tube_lease_hold(tube text, partitions integer, partition integer, term bigint) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM FROM tube_lease l
        WHERE l.tube = tube_lease_hold.tube AND l.term = tube_lease_hold.term
            AND tube_lease_hold.partitions % l.partitions = 0
            AND tube_lease_hold.partition % l.partitions = l.partition
        FOR KEY SHARE;
    IF NOT FOUND THEN
        PERFORM tube_lease_lost(tube, partitions, partition, term);
    END IF;
END
$$;


COMMENT ON FUNCTION tube.tube_lease_hold(tube text, partitions integer, partition integer, term bigint) IS 'Locks a lease for the rest of a transaction; fences acks';


CREATE FUNCTION tube.tube_lease_lost(tube text, partitions integer, partition integer, term bigint) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    holder text;
BEGIN
    SELECT string_agg(DISTINCT l.holder, ', ') INTO holder FROM tube_lease l
        WHERE l.tube = tube_lease_lost.tube AND l.partition % gcd(l.partitions, tube_lease_lost.partitions)
            = tube_lease_lost.partition % gcd(l.partitions, tube_lease_lost.partitions);
    PERFORM tube_refuse('RT002',
        format('term %s does not hold partition %s/%s of tube %L%s', term, partition, partitions, tube,
            coalesce(': it is held by ' || holder, '')), 'nothing was read or acked; claim the partition anew');
END
$$;


COMMENT ON FUNCTION tube.tube_lease_lost(tube text, partitions integer, partition integer, term bigint) IS 'Raises the error of a lost lease';


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


COMMENT ON FUNCTION tube.tube_lease_release(tube text, partitions integer, partition integer, term bigint) IS 'Gives a lease back';


CREATE FUNCTION tube.tube_lease_renew(tube text, partitions integer, partition integer, term bigint) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    new_beat bigint;
BEGIN
    UPDATE tube_lease l SET beat = nextval('tube_term_seq')
        WHERE l.tube = tube_lease_renew.tube AND l.partitions = tube_lease_renew.partitions
            AND l.partition = tube_lease_renew.partition AND l.term = tube_lease_renew.term
        RETURNING l.beat INTO new_beat;
    IF NOT FOUND THEN
        PERFORM tube_lease_lost(tube, partitions, partition, term);
    END IF;
    RETURN new_beat;
END
$$;


COMMENT ON FUNCTION tube.tube_lease_renew(tube text, partitions integer, partition integer, term bigint) IS 'A sign of life of a lease''s holder';


CREATE FUNCTION tube.tube_lines_sql(tube text, partitions integer, partition integer, term bigint, after_regular bigint, after_backfill bigint, upto_regular bigint, upto_backfill bigint) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    t tube_registry := tube_find(tube);
    fence text := format('%I.tube_lease_check(%L, %s, %s, %s)', current_schema(), tube, partitions, partition, term);
    statement text;
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    SELECT string_agg(format($sql$SELECT concat(%L, seq, ' {"seq":', seq, ',"op":"', op, '","shard":', shard,
        ',"ids":', array_to_json(ids),
        ',"ts":"', to_char(ts AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'), '+00:00"',
        ',"payload":' || payload::text, '}') AS line FROM (%s) AS half WHERE %s$sql$,
            format('RDATA tube:%s %s/%s ', tube, partition, partitions),
            tube_range_sql(t, partitions, partition, halves.backfill, halves.after, halves.upto, NULL, true), fence),
            ' UNION ALL ' ORDER BY halves.backfill)
        INTO statement
        FROM (VALUES (false, after_regular, upto_regular), (true, after_backfill, upto_backfill))
            AS halves (backfill, after, upto)
        WHERE halves.after < halves.upto;
    RETURN coalesce(statement,
        format('SELECT NULL::text AS line FROM (SELECT %s AS held OFFSET 0) AS fence WHERE NOT held', fence));
END
$_$;


COMMENT ON FUNCTION tube.tube_lines_sql(tube text, partitions integer, partition integer, term bigint, after_regular bigint, after_backfill bigint, upto_regular bigint, upto_backfill bigint) IS 'The statement that yields finished lines for a range of pods';


CREATE FUNCTION tube.tube_list(tbl regclass DEFAULT NULL::regclass) RETURNS TABLE(tube text, predicate text, partitions integer, tbl regclass, shard integer, table_predicate text, routing text, unattached regclass[])
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT r.tube, r.predicate, r.partitions, a.tbl, a.shard, a.predicate, a.routing,
        CASE WHEN a.tbl IS NOT NULL THEN ARRAY(
            SELECT m FROM tube_members(a.tbl) m WHERE NOT EXISTS (
                SELECT FROM tube_attachment x WHERE x.tube = a.tube AND x.tbl = m)) END
    FROM tube_registry r LEFT JOIN (
        SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl WHERE x.tbl = x.root
    ) AS a ON a.tube = r.tube
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


COMMENT ON FUNCTION tube.tube_lock(tube text) IS 'A tube''s row in the registry, locked';


CREATE FUNCTION tube.tube_lock_table(tbl regclass) RETURNS void
    LANGUAGE sql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT pg_advisory_xact_lock(
        hashtext('replicad tube ' || current_schema()), (tbl::oid::bigint - 2147483648)::integer)
$$;


COMMENT ON FUNCTION tube.tube_lock_table(tbl regclass) IS 'Serialises attaching and detaching of a table';


CREATE FUNCTION tube.tube_member_detach(tube text, tbl regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    trigger_name name;
BEGIN
    FOR trigger_name IN SELECT g.tgname FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
        WHERE g.tgrelid = tbl AND p.pronamespace = quote_ident(current_schema())::regnamespace
            AND (obj_description(p.oid, 'pg_proc') = 'replicad: touches tube ' || tube
                OR p.proname = 'tube_truncate_trigger'
                    AND g.tgargs = convert_to(tube, getdatabaseencoding()) || decode('00', 'hex'))
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', trigger_name, tube_qualified(tbl));
    END LOOP;
    DELETE FROM tube_attachment a WHERE a.tube = tube_member_detach.tube AND a.tbl = tube_member_detach.tbl;
END
$$;


COMMENT ON FUNCTION tube.tube_member_detach(tube text, tbl regclass) IS 'Takes a tube''s triggers off one table';


CREATE FUNCTION tube.tube_members(tbl regclass) RETURNS SETOF regclass
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    WITH RECURSIVE tree(member, depth) AS (
        SELECT tbl::oid, 0
        UNION
        SELECT i.inhrelid, tree.depth + 1 FROM tree JOIN pg_inherits i ON i.inhparent = tree.member
    )
    SELECT member::regclass FROM tree GROUP BY member ORDER BY min(depth), member
$$;


COMMENT ON FUNCTION tube.tube_members(tbl regclass) IS 'A table with all its partitions and heirs';


CREATE FUNCTION tube.tube_object_name(base text, suffix text) RETURNS name
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    hash text := '_' || left(md5(base || suffix), 8);
    kept text := base;
BEGIN
    IF octet_length(base || suffix) <= 63 THEN
        RETURN base || suffix;
    END IF;
    WHILE octet_length(kept || hash || suffix) > 63 LOOP
        kept := left(kept, -1);
    END LOOP;
    RETURN kept || hash || suffix;
END
$$;


COMMENT ON FUNCTION tube.tube_object_name(base text, suffix text) IS 'A name of at most 63 bytes, unique to its parts';


CREATE FUNCTION tube.tube_op_sql(op text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT format(
        'CASE WHEN strpos(current_setting(''application_name''), ''backfill'') > 0 THEN ''B'' ELSE %s END', op)
$$;


COMMENT ON FUNCTION tube.tube_op_sql(op text) IS 'SQL for an operation, B in a session that backfills';


CREATE FUNCTION tube.tube_park(tube text, partitions integer, partition integer, term bigint, seq bigint, ids bigint[], tries integer, error text) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    pod record;
    bad bigint[];
    good bigint[] := '{}';
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM tube_keep(tube);
    PERFORM tube_lease_hold(tube, partitions, partition, term);
    EXECUTE format('LOCK TABLE %I IN ROW EXCLUSIVE MODE', tube);  -- before it is read: see tube_backfill_begin
    EXECUTE format('SELECT * FROM %I WHERE seq = $1 AND shard %% $2 = $3 FOR UPDATE', tube)
        INTO pod USING seq, partitions, partition;
    bad := pod.ids;
    IF pod.ids = '{}' AND cardinality(ids) > 0 THEN
        INSERT INTO tube_parked (tube, seq, op, shard, ids, ts, tries, error)
            VALUES (tube, pod.seq, 'T', pod.shard, ids, pod.ts,
                coalesce(tries, 1), coalesce(error, 'no error was given'));
        RETURN cardinality(ids);
    ELSIF coalesce(cardinality(ids), 0) > 0 THEN
        bad := ARRAY(SELECT u FROM unnest(pod.ids) u WHERE u = ANY (tube_park.ids));
        good := ARRAY(SELECT u FROM unnest(pod.ids) u WHERE u <> ALL (tube_park.ids));
    END IF;
    IF pod.seq IS NULL OR (bad = '{}' AND good <> '{}') THEN
        RETURN 0;
    END IF;
    INSERT INTO tube_parked (tube, seq, op, shard, ids, payload, ts, tries, error)
        VALUES (tube, pod.seq, pod.op, pod.shard, bad, pod.payload, pod.ts,
            coalesce(tries, 1), coalesce(error, 'no error was given'));
    IF good = '{}' THEN
        EXECUTE format('DELETE FROM %I WHERE seq = $1', tube) USING seq;
    ELSE
        EXECUTE format('UPDATE %I SET ids = $2 WHERE seq = $1', tube) USING seq, good;
    END IF;
    RETURN greatest(cardinality(bad), 1);
END
$_$;


COMMENT ON FUNCTION tube.tube_park(tube text, partitions integer, partition integer, term bigint, seq bigint, ids bigint[], tries integer, error text) IS 'Puts ids that keep failing aside';


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
    parked_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE tube.tube_parked IS 'replicad: what failed too often; use tube_parked_list(), _replay() and _drop()';


CREATE FUNCTION tube.tube_parked_list(tube text DEFAULT NULL::text) RETURNS SETOF tube.tube_parked
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT p.* FROM tube_parked p WHERE $1 IS NULL OR p.tube = $1 ORDER BY p.parked
$_$;


COMMENT ON FUNCTION tube.tube_parked_list(tube text) IS 'What failed too often';


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
        INSERT INTO %I (op, shard, ids, payload) SELECT g.op, g.shard, g.ids, g.payload FROM gone g ORDER BY g.parked
    $sql$, t.tube) USING tube, parked_ids;
    GET DIAGNOSTICS replayed = ROW_COUNT;
    RETURN replayed;
END
$_$;


COMMENT ON FUNCTION tube.tube_parked_replay(tube text, parked_ids bigint[]) IS 'Puts what failed too often back into its tube';


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


COMMENT ON FUNCTION tube.tube_path_text(path name[]) IS 'The search_path under which predicates and routings run';


CREATE FUNCTION tube.tube_plan(tube text, partitions integer, partition integer, term bigint, after_regular bigint, after_backfill bigint, upto bigint, max_pods integer, max_ids bigint DEFAULT NULL::bigint, max_backfill integer DEFAULT NULL::integer, OUT regular bigint, OUT backfill bigint, OUT pods integer, OUT ids bigint) RETURNS record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
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


COMMENT ON FUNCTION tube.tube_plan(tube text, partitions integer, partition integer, term bigint, after_regular bigint, after_backfill bigint, upto bigint, max_pods integer, max_ids bigint, max_backfill integer, OUT regular bigint, OUT backfill bigint, OUT pods integer, OUT ids bigint) IS 'How far the reader of a partition gets with its next pods';


CREATE FUNCTION tube.tube_plan_half(range text, max_ids bigint, at_least integer, OUT last bigint, OUT pods integer, OUT ids bigint, OUT cut boolean) RETURNS record
    LANGUAGE plpgsql STABLE
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


COMMENT ON FUNCTION tube.tube_plan_half(range text, max_ids bigint, at_least integer, OUT last bigint, OUT pods integer, OUT ids bigint, OUT cut boolean) IS 'How far a reader gets among pods of one priority';


CREATE FUNCTION tube.tube_pods_delete(tube text, partitions integer, partition integer, seqs bigint[]) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    PERFORM tube_check_partition(partitions, partition);
    PERFORM FROM tube_registry r WHERE r.tube = tube_pods_delete.tube FOR SHARE;
    PERFORM tube_check_partitions(tube, partitions);
    RETURN tube_remove(tube, partitions, partition, seqs);
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
    numbered text := format(
        E'SELECT ids.id, row_number() OVER (ORDER BY ids.row_number) - 1 AS n'
        ' FROM (SELECT given.id::bigint AS id, given.row_number FROM (\n%s\n) AS given) AS ids'
        ' WHERE ids.id IS NOT NULL', query);
BEGIN
    PERFORM tube_check_touch(shard, op, insert_chunk_size);
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


COMMENT ON FUNCTION tube.tube_progress(first bigint, last bigint, every integer, total bigint) IS 'Tells how far a long insert has got';


CREATE FUNCTION tube.tube_qualified(tbl regclass) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT format('%I.%I', n.nspname, c.relname)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl
$$;


COMMENT ON FUNCTION tube.tube_qualified(tbl regclass) IS 'A table''s quoted name with its schema; NULL for a dropped table';


CREATE FUNCTION tube.tube_range_sql(t tube.tube_registry, partitions integer, partition integer, backfill boolean, after bigint DEFAULT 0, upto bigint DEFAULT '9223372036854775807'::bigint, pods bigint DEFAULT NULL::bigint, served boolean DEFAULT false) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT CASE WHEN count(*) = 1 THEN min(part.query)
        ELSE format('SELECT * FROM (%s) AS pods ORDER BY seq%s',
            string_agg(format('(%s)', part.query), ' UNION ALL ' ORDER BY part.p), ' LIMIT ' || pods) END
    FROM (
        SELECT numbered.p, format(
            'SELECT * FROM %s WHERE (shard %% %s) = %s AND (op = ''B'')::integer = %s'
            ' AND seq > %s AND seq <= %s%s ORDER BY seq%s',
            tube_relation(t.tube), numbered.n, numbered.p, backfill::integer, after, upto,
            CASE WHEN served AND backfill THEN ' AND ' || tube_served_sql() END, ' LIMIT ' || pods) AS query
        FROM (
            SELECT t.partitions AS n, p
            FROM generate_series(partition, t.partitions - 1, partitions) AS p
            WHERE t.partitions % partitions = 0 AND t.partitions / partitions <= 64
            UNION ALL
            SELECT partitions, partition WHERE t.partitions % partitions <> 0 OR t.partitions / partitions > 64
        ) AS numbered
    ) AS part
$$;


COMMENT ON FUNCTION tube.tube_range_sql(t tube.tube_registry, partitions integer, partition integer, backfill boolean, after bigint, upto bigint, pods bigint, served boolean) IS 'The query of a partition''s pods of one priority';


CREATE FUNCTION tube.tube_refuse(code text, message text, hint text) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint;
END
$$;


COMMENT ON FUNCTION tube.tube_refuse(code text, message text, hint text) IS 'Raises an error of ours with its remedy';


CREATE FUNCTION tube.tube_relation(tube text) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT format('%I.%I', current_schema(), tube)
$$;


COMMENT ON FUNCTION tube.tube_relation(tube text) IS 'The quoted name of the table that holds a tube''s pods';


CREATE FUNCTION tube.tube_remove(tube text, partitions integer, partition integer, seqs bigint[]) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    removed bigint;
BEGIN
    EXECUTE format('DELETE FROM %I WHERE seq = ANY ($1) AND (shard %% %s) = %s', tube, partitions, partition)
        USING seqs;
    GET DIAGNOSTICS removed = ROW_COUNT;
    RETURN removed;
END
$_$;


COMMENT ON FUNCTION tube.tube_remove(tube text, partitions integer, partition integer, seqs bigint[]) IS 'Deletes pods without asking for a lease';


CREATE FUNCTION tube.tube_remove_range(tube text, partitions integer, partition integer, backfill boolean, after bigint, upto bigint) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    removed bigint := 0;
BEGIN
    IF after < upto THEN
        EXECUTE format('DELETE FROM %I WHERE (shard %% %s) = %s AND (op = ''B'')::integer = %s'
            ' AND seq > %s AND seq <= %s AND %s',
            tube, partitions, partition, backfill::integer, after, upto, tube_served_sql());
        GET DIAGNOSTICS removed = ROW_COUNT;
    END IF;
    RETURN removed;
END
$$;


COMMENT ON FUNCTION tube.tube_remove_range(tube text, partitions integer, partition integer, backfill boolean, after bigint, upto bigint) IS 'Deletes a range of pods without asking for a lease';


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


COMMENT ON FUNCTION tube.tube_report_put(tube text, reporter text, counts jsonb) IS 'Keeps what a reader of a tube has counted';


CREATE FUNCTION tube.tube_rows_sql(source text, predicate text, routing text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT format('SELECT %sid::bigint AS id FROM %s AS tube_row WHERE id IS NOT NULL%s',
        E'(\n' || routing || E'\n)::integer AS tube_shard, ', source, predicate)
$$;


COMMENT ON FUNCTION tube.tube_rows_sql(source text, predicate text, routing text) IS 'The query of the ids and shards of rows that pass the predicates';


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
            RAISE NOTICE 'predicates and routings cannot see into schema %, where everybody may create objects: '
                'put the schema before the names that they need', folder;
        ELSIF folder !~ '^pg_' THEN
            safe := safe || folder;
        END IF;
    END LOOP;
    RETURN safe;
END
$$;


COMMENT ON FUNCTION tube.tube_safe_path(path name[]) IS 'The schemas in which predicates and routings may look names up';


CREATE FUNCTION tube.tube_served_sql() RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT '(cardinality(ids) > 0 OR payload ->> ''type'' IS DISTINCT FROM ''backfill_schedule'')'
$$;


COMMENT ON FUNCTION tube.tube_served_sql() IS 'The condition on pods that are handed to readers';


CREATE FUNCTION tube.tube_split(tube_or_tubes text) RETURNS text[]
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT array_agg((tube_find(name)).tube ORDER BY n)
    FROM unnest(CASE WHEN EXISTS (SELECT FROM tube_registry r WHERE r.tube = tube_or_tubes) THEN ARRAY[tube_or_tubes]
        ELSE regexp_split_to_array(btrim(tube_or_tubes, ' {}'), ' *, *') END) WITH ORDINALITY AS g(name, n)
$$;


COMMENT ON FUNCTION tube.tube_split(tube_or_tubes text) IS 'The tubes that a name or a list of names means';


CREATE FUNCTION tube.tube_stats(exact integer DEFAULT 10000) RETURNS TABLE(tube text, predicate text, partition integer, shards integer[], inc_count bigint, inc_min_seq bigint, inc_max_seq bigint, inc_min_ts timestamp with time zone, inc_max_ts timestamp with time zone, backfill_count bigint, backfill_min_seq bigint, backfill_max_seq bigint, backfill_min_ts timestamp with time zone, backfill_max_ts timestamp with time zone, control_count bigint, inc_ids bigint, backfill_ids bigint, estimated boolean)
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT r.tube, r.predicate, p, ARRAY(
            SELECT DISTINCT a.shard FROM tube_attachment a
            WHERE a.tube = r.tube AND a.shard % r.partitions = p ORDER BY 1),
        inc.pods, inc.min_seq, inc.max_seq, inc.min_ts, inc.max_ts,
        bf.pods, bf.min_seq, bf.max_seq, bf.min_ts, bf.max_ts,
        tube_count_control(r.tube, r.partitions, p), inc.ids, bf.ids, inc.estimated OR bf.estimated
    FROM tube_registry r, generate_series(0, r.partitions - 1) AS p,
        tube_count(r, p, false, exact) AS inc, tube_count(r, p, true, exact) AS bf
    ORDER BY r.tube, p
$$;


COMMENT ON FUNCTION tube.tube_stats(exact integer) IS 'What is in each partition of each tube';


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
    EXECUTE format('CREATE INDEX %I ON %I (shard, seq) WHERE cardinality(ids) = 0', tube || '_control', tube);
    EXECUTE format('COMMENT ON TABLE %I IS %L', tube,
        'replicad: the pods of a tube; use tube_ensure_absent() to drop it');
EXCEPTION WHEN duplicate_table THEN
    PERFORM tube_refuse('RT005', format('tube %L needs the name of something that exists: %s', tube, SQLERRM),
        'choose another name for the tube, or rename what has it');
END
$_$;


COMMENT ON FUNCTION tube.tube_table_ensure(tube text) IS 'Makes the table of a new tube';


CREATE FUNCTION tube.tube_table_ensure_attached(tube text, tbl regclass, shard integer DEFAULT NULL::integer, predicate text DEFAULT NULL::text, routing text DEFAULT NULL::text, path name[] DEFAULT current_schemas(false)) RETURNS void
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
    SELECT * INTO before FROM tube_attachment a WHERE a.tube = t.tube AND a.tbl = tube_table_ensure_attached.tbl;
    wanted := (t.tube, tbl, tbl,
        coalesce(shard, tube_infer_shard(tbl), before.shard, CASE WHEN routing IS NOT NULL THEN 0 END),
        predicate, routing,
        CASE WHEN predicate IS NULL AND routing IS NULL THEN '{}' ELSE tube_safe_path(path) END);
    IF wanted.shard IS NULL OR wanted.shard < 0 THEN
        PERFORM tube_refuse('RT005',
            CASE WHEN shard IS NULL
                THEN format('no number ends the name of the schema of %s, so its shard is unknown', tbl)
                ELSE format('shard %s: a shard is a whole number from 0 up', shard) END,
            'give the shard as the third argument');
    END IF;
    PERFORM tube_check_expression(tbl, 'predicate', t.predicate, t.path);
    PERFORM tube_check_expression(tbl, 'predicate', predicate, t.path || wanted.path);
    PERFORM tube_check_expression(tbl, 'routing', routing, t.path || wanted.path);
    function := tube_trigger_ensure(t.tube, predicate, routing, wanted.path);
    FOR member IN SELECT m FROM tube_members(tbl) m LOOP
        PERFORM tube_triggers_ensure(t.tube, member, function, wanted.shard);
        wanted.tbl := member;
        INSERT INTO tube_attachment SELECT wanted.* ON CONFLICT ON CONSTRAINT tube_attachment_pkey DO UPDATE
            SET shard = excluded.shard, predicate = excluded.predicate, routing = excluded.routing,
                path = excluded.path;
    END LOOP;
    FOR member IN SELECT a.tbl FROM tube_attachment a
        WHERE a.tube = t.tube AND a.root = tube_table_ensure_attached.tbl AND a.tbl NOT IN (SELECT tube_members(a.root))
    LOOP
        PERFORM tube_member_detach(t.tube, member);
    END LOOP;
    PERFORM tube_trigger_sweep(t.tube);
    PERFORM tube_table_touch_sweep();
    PERFORM tube_table_touch_ensure(tbl);
END
$$;


COMMENT ON FUNCTION tube.tube_table_ensure_attached(tube text, tbl regclass, shard integer, predicate text, routing text, path name[]) IS 'Attaches a table to a tube, or alters the attachment to be as asked';


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
        DELETE FROM tube_backfill b WHERE b.tube = a.tube AND b.tbl = a.tbl;
        PERFORM tube_trigger_sweep(a.tube);
    END LOOP;
    PERFORM tube_table_touch_sweep();
    IF EXISTS (SELECT FROM tube_attachment x WHERE x.tbl = tube_table_ensure_detached.tbl AND x.root = x.tbl) THEN
        PERFORM tube_table_touch_ensure(tbl);
    END IF;
END
$$;


COMMENT ON FUNCTION tube.tube_table_ensure_detached(tube text, tbl regclass) IS 'Detaches a table from a tube, or from all (tube NULL)';


CREATE FUNCTION tube.tube_table_touch_call(a tube.tube_attachment) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
    SELECT CASE WHEN a.routing IS NULL THEN format($sql$
    pods := pods + %1$s(%2$s, $1, $2, $3, $4);$sql$, touch, a.shard)
    ELSE format($sql$
    IF coalesce(cardinality($1), 0) = 0 THEN
        pods := pods + %1$s(%2$s, $1, $2, $3, $4);
    ELSE
        pods := pods + (
            SELECT coalesce(sum(%1$s(placed.shard, placed.ids, $2, $3, $4)), 0)
            FROM (
                SELECT coalesce(stored.tube_shard, %2$s) & 2147483647 AS shard,
                    array_agg(given.id ORDER BY given.n) AS ids
                FROM unnest($1) WITH ORDINALITY AS given(id, n) LEFT JOIN (%3$s) AS stored ON stored.id = given.id
                WHERE given.id IS NOT NULL GROUP BY 1 ORDER BY 1
            ) AS placed);
    END IF;$sql$, touch, a.shard, tube_rows_sql(tube_qualified(a.tbl), ' AND id = ANY ($1)', a.routing))
    END
    FROM format('%I.%I', current_schema(), tube_object_name(a.tube, '_touch')) AS touch
$_$;


COMMENT ON FUNCTION tube.tube_table_touch_call(a tube.tube_attachment) IS 'The part of {table}_touch that serves one tube';


CREATE FUNCTION tube.tube_table_touch_ensure(tbl regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    marker text := format('-- replicad: touches the tubes of schema %I', current_schema());
    full_name text;
    calls text;
    path name[];
    present text;
    body text;
BEGIN
    SELECT format('%I.%I', n.nspname, tube_object_name(c.relname, '_touch')) INTO full_name
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl;
    SELECT string_agg(tube_table_touch_call(a), '' ORDER BY a.tube) INTO calls
        FROM tube_attachment a WHERE a.tbl = tube_table_touch_ensure.tbl AND a.tbl = a.root;
    SELECT array_agg(s) INTO path
        FROM tube_attachment a, unnest(a.path) s
        WHERE a.tbl = tube_table_touch_ensure.tbl AND a.tbl = a.root AND a.routing IS NOT NULL;
    body := format(
        E'\n%s\n#variable_conflict use_column\nDECLARE\n    pods bigint := 0;\nBEGIN%s\n    RETURN pods;\nEND\n',
        marker, calls);
    SELECT p.prosrc INTO present FROM pg_proc p
        WHERE p.oid = to_regprocedure(full_name || '(bigint[], character, jsonb, integer)');
    IF strpos(present, marker) = 0 THEN
        PERFORM tube_refuse('RT005', format('function %s exists and is not ours', full_name),
            'rename it, or rename the table: attached tables have a function of that name');
    ELSIF present IS DISTINCT FROM body THEN
        EXECUTE format('CREATE OR REPLACE FUNCTION %s(ids bigint[], op character = ''T'', payload jsonb = NULL,'
            ' chunk_size integer = 250) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = %s'
            ' SET row_security = off AS %L', full_name, tube_path_text(path), body);
        EXECUTE format('COMMENT ON FUNCTION %s(bigint[], character, jsonb, integer) IS %L', full_name,
            'replicad: touches ids in the tubes that the table is attached to');
    END IF;
END
$$;


COMMENT ON FUNCTION tube.tube_table_touch_ensure(tbl regclass) IS 'Makes the function that touches ids of a table by hand';


CREATE FUNCTION tube.tube_table_touch_sweep() RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    marker text := format('-- replicad: touches the tubes of schema %I', current_schema());
    stale regprocedure;
BEGIN
    DELETE FROM tube_attachment a WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = a.tbl);
    DELETE FROM tube_backfill b WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = b.tbl);
    FOR stale IN SELECT p.oid FROM pg_proc p
        WHERE strpos(p.prosrc, E'\n' || marker || E'\n') = 1 AND NOT EXISTS (
            SELECT FROM tube_attachment a JOIN pg_class c ON c.oid = a.tbl
            WHERE a.tbl = a.root AND c.relnamespace = p.pronamespace
                AND tube_object_name(c.relname, '_touch') = p.proname)
    LOOP
        EXECUTE format('DROP FUNCTION %s', stale);
    END LOOP;
END
$$;


COMMENT ON FUNCTION tube.tube_table_touch_sweep() IS 'Drops {table}_touch functions whose table is not attached';


CREATE FUNCTION tube.tube_touch_ensure(tube text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    name text := tube_object_name(tube, '_touch');
    body text := format($body$
DECLARE
    touched bigint[] := ARRAY(SELECT u FROM unnest(ids) u WHERE u IS NOT NULL);
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
$body$, tube_relation(tube), current_schema(), tube_op_sql('$3'));
BEGIN
    IF NOT EXISTS (SELECT FROM pg_proc p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname = name
            AND p.prosrc = body) THEN
        EXECUTE format('CREATE OR REPLACE FUNCTION %I(shard integer, ids bigint[], op character, payload jsonb = NULL,'
            ' chunk_size integer = 250) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_temp'
            ' AS %L', name, body);
        EXECUTE format('COMMENT ON FUNCTION %I(integer, bigint[], character, jsonb, integer) IS %L',
            name, 'replicad: puts ids or a control pod into tube ' || tube);
    END IF;
END
$_$;


COMMENT ON FUNCTION tube.tube_touch_ensure(tube text) IS 'Makes the function that touches a tube by hand';


CREATE FUNCTION tube.tube_trigger_body(tube text, predicate text, routing text) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $_$
DECLARE
    rows_now text := tube_rows_sql('tube_new_rows', predicate, routing);
    rows_before text := tube_rows_sql('tube_old_rows', predicate, routing);
    rows_either text := format('(%1$s) UNION ALL ((%2$s) EXCEPT (%1$s))', rows_now, rows_before);
    event record;
    body text := '';
BEGIN
    FOR event IN SELECT * FROM (VALUES
        ('INSERT', 'I', rows_now, rows_now, NULL),
        ('UPDATE', 'U', rows_now, rows_either, rows_before),
        ('DELETE', 'D', rows_before, rows_before, NULL)
    ) AS e (name, op, few, rows, few_before) LOOP
        body := body || format(E'    IF TG_OP = %L THEN%s%s;\n        RETURN NULL;\n    END IF;\n',
            event.name,
            CASE WHEN routing IS NULL THEN
                tube_few_sql(tube, tube_op_sql(quote_literal(event.op)), event.few, event.few_before) END,
            tube_insert_sql(tube, tube_op_sql(quote_literal(event.op)), 'TG_ARGV[0]::integer', event.rows,
                routed => routing IS NOT NULL));
    END LOOP;
    RETURN format(E'\n#variable_conflict use_column\nBEGIN\n%s    RETURN NULL;\nEND\n', body);
END
$_$;


COMMENT ON FUNCTION tube.tube_trigger_body(tube text, predicate text, routing text) IS 'The source of a tube''s trigger function';


CREATE FUNCTION tube.tube_trigger_ensure(tube text, predicate text, routing text, path name[]) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    t tube_registry := tube_find(tube);
    own boolean := predicate IS NOT NULL OR routing IS NOT NULL;
    hash text := left(md5(concat_ws(E'\n', coalesce(predicate, '-'), coalesce(routing, '-'), path::text)), 12);
    name text := tube_object_name(tube, CASE WHEN own THEN '_trigger_' || hash ELSE '_trigger' END);
    body text := tube_trigger_body(tube, tube_where(t.predicate, predicate), routing);
    setting text := tube_path_text(CASE WHEN own THEN t.path || path ELSE t.path END);
BEGIN
    IF NOT EXISTS (SELECT FROM pg_proc p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname = name
            AND p.prosrc = body AND p.proconfig = ARRAY['search_path=' || setting]) THEN
        EXECUTE format('CREATE OR REPLACE FUNCTION %I() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER'
            ' SET search_path = %s AS %L', name, setting, body);
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %I() FROM PUBLIC', name);
        EXECUTE format('COMMENT ON FUNCTION %I() IS %L', name, 'replicad: touches tube ' || tube);
    END IF;
    RETURN format('%I.%I', current_schema(), name);
END
$$;


COMMENT ON FUNCTION tube.tube_trigger_ensure(tube text, predicate text, routing text, path name[]) IS 'Makes the trigger function of a kind of attachment';


CREATE FUNCTION tube.tube_trigger_name(tbl regclass, tube text, moment text) RETURNS name
    LANGUAGE sql STABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT tube_object_name(format('%s_%s', c.relname, tube), format('_%s_trigger', moment))
    FROM pg_class c WHERE c.oid = tbl
$$;


COMMENT ON FUNCTION tube.tube_trigger_name(tbl regclass, tube text, moment text) IS 'The name of a tube''s trigger on a table';


CREATE FUNCTION tube.tube_trigger_sweep(tube text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    stale regprocedure;
BEGIN
    FOR stale IN SELECT p.oid FROM pg_proc p
        WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
            AND p.proname <> tube_object_name(tube, '_trigger')
            AND obj_description(p.oid, 'pg_proc') = 'replicad: touches tube ' || tube
            AND NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgfoid = p.oid)
    LOOP
        EXECUTE format('DROP FUNCTION %s', stale);
    END LOOP;
END
$$;


COMMENT ON FUNCTION tube.tube_trigger_sweep(tube text) IS 'Drops trigger functions of a tube that no trigger uses';


CREATE FUNCTION tube.tube_triggers_ensure(tube text, tbl regclass, function text, shard integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
DECLARE
    wanted record;
    present text[];
BEGIN
    SELECT array_agg(format('%s|%s|%s', g.tgname, g.tgfoid, encode(g.tgargs, 'hex'))) INTO present
        FROM pg_trigger g WHERE g.tgrelid = tbl;
    FOR wanted IN
        SELECT tube_trigger_name(tbl, tube, w.moment) AS name, w.*
        FROM (VALUES
            ('after_insert', 'AFTER INSERT', 'REFERENCING NEW TABLE AS tube_new_rows', function, shard::text),
            ('after_update', 'AFTER UPDATE', 'REFERENCING NEW TABLE AS tube_new_rows OLD TABLE AS tube_old_rows',
                function, shard::text),
            ('after_delete', 'AFTER DELETE', 'REFERENCING OLD TABLE AS tube_old_rows', function, shard::text),
            ('before_truncate', 'BEFORE TRUNCATE', '', format('%I.tube_truncate_trigger', current_schema()), tube)
        ) AS w (moment, event, transitions, function, argument)
    LOOP
        CONTINUE WHEN format('%s|%s|%s', wanted.name, to_regprocedure(wanted.function || '()')::oid,
            encode(convert_to(wanted.argument, getdatabaseencoding()) || decode('00', 'hex'), 'hex')) = ANY (present);
        EXECUTE format('CREATE OR REPLACE TRIGGER %I %s ON %s %s FOR EACH STATEMENT EXECUTE FUNCTION %s(%L)',
            wanted.name, wanted.event, tube_qualified(tbl), wanted.transitions, wanted.function, wanted.argument);
    END LOOP;
END
$$;


COMMENT ON FUNCTION tube.tube_triggers_ensure(tube text, tbl regclass, function text, shard integer) IS 'Makes a tube''s triggers on one table';


CREATE FUNCTION tube.tube_truncate_trigger() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'tube', 'pg_temp'
    SET row_security TO 'off'
    AS $$
DECLARE
    a tube_attachment;
    t tube_registry;
    source text;
    touch text;
BEGIN
    SELECT * INTO a FROM tube_attachment x WHERE x.tube = TG_ARGV[0] AND x.tbl = TG_RELID;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    t := tube_find(a.tube);
    SELECT format('(SELECT * FROM %s WHERE tableoid = ANY (%L::oid[]))', tube_qualified(TG_RELID), array_agg(m::oid))
        INTO source
        FROM tube_members(TG_RELID) m
        WHERE m = TG_RELID OR NOT EXISTS (SELECT FROM tube_attachment x WHERE x.tube = a.tube AND x.tbl = m);
    touch := tube_insert_sql(a.tube, tube_op_sql('''D'''), a.shard::text,
        tube_rows_sql(source, tube_where(t.predicate, a.predicate), a.routing), routed => a.routing IS NOT NULL);
    PERFORM set_config('search_path', tube_path_text(t.path || a.path), true);
    EXECUTE touch;
    RETURN NULL;
END
$$;


COMMENT ON FUNCTION tube.tube_truncate_trigger() IS 'Touches every id of a table that is about to be truncated';


CREATE FUNCTION tube.tube_where(VARIADIC predicates text[]) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT coalesce(string_agg(E' AND (\n' || p || E'\n)', '' ORDER BY n), '')
    FROM unnest(predicates) WITH ORDINALITY AS given(p, n) WHERE p IS NOT NULL
$$;


COMMENT ON FUNCTION tube.tube_where(VARIADIC predicates text[]) IS 'Predicates as the end of a WHERE clause';


CREATE FUNCTION tube.tube_writers() RETURNS TABLE(virtualtransaction text, pid integer)
    LANGUAGE sql
    SET search_path TO 'tube', 'pg_temp'
    AS $$
    SELECT DISTINCT l.virtualtransaction, l.pid
    FROM pg_locks l
    WHERE l.locktype = 'relation' AND l.granted AND l.mode = 'RowExclusiveLock'
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.relation IN (SELECT to_regclass(format('%I.%I', current_schema(), r.tube)) FROM tube_registry r)
        AND l.pid IS DISTINCT FROM pg_backend_pid()
$$;


COMMENT ON FUNCTION tube.tube_writers() IS 'The transactions that are writing pods';


CREATE SEQUENCE replicad.cache_invalidation_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


ALTER SEQUENCE replicad.cache_invalidation_id_seq OWNED BY replicad.cache_invalidation.id;


CREATE TABLE replicad.cache_version (
    version integer NOT NULL,
    digest text NOT NULL,
    installed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE replicad.cache_version IS 'replicad: what is installed in this schema';


CREATE TABLE replicad.federation_destination (
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
    catching_up boolean DEFAULT false NOT NULL
)
WITH (fillfactor='60');


COMMENT ON TABLE replicad.federation_destination IS 'replicad sender: destinations, how far each has got, and their back-off';


CREATE TABLE replicad.federation_destination_room (
    destination text NOT NULL COLLATE pg_catalog."C",
    stream_ordering bigint NOT NULL,
    part integer NOT NULL,
    room text COLLATE pg_catalog."C"
)
WITH (autovacuum_vacuum_scale_factor='0.05');


COMMENT ON TABLE replicad.federation_destination_room IS 'replicad sender: the facts that each destination has yet to take';


CREATE TABLE replicad.federation_edu (
    id bigint NOT NULL,
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
    stream_ordering bigint NOT NULL,
    part integer NOT NULL,
    body json NOT NULL
);


COMMENT ON TABLE replicad.federation_fact IS 'replicad sender: facts that some destination has yet to take';


CREATE TABLE replicad.federation_sender (
    name text NOT NULL COLLATE pg_catalog."C",
    stream text NOT NULL COLLATE pg_catalog."C",
    token bigint,
    senders text[] NOT NULL
)
WITH (fillfactor='20');


COMMENT ON TABLE replicad.federation_sender IS 'replicad sender: how far each sender has recorded each stream';


CREATE TABLE replicad.federation_version (
    version integer NOT NULL,
    digest text NOT NULL,
    installed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE replicad.federation_version IS 'replicad: what is installed in this schema';


CREATE TABLE replicad.ownership_version (
    version integer NOT NULL,
    digest text NOT NULL,
    installed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE replicad.ownership_version IS 'replicad: what is installed in this schema';


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
    digest text NOT NULL,
    installed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE replicad.presence_version IS 'replicad: what is installed in this schema';


CREATE TABLE replicad.stream_ack (
    stream smallint NOT NULL,
    instance text NOT NULL COLLATE pg_catalog."C",
    token bigint NOT NULL,
    resets integer NOT NULL,
    acked_at timestamp with time zone NOT NULL
)
WITH (fillfactor='50');


COMMENT ON TABLE replicad.stream_ack IS 'replicad: what senders have acknowledged';


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


CREATE TABLE replicad.stream_version (
    version integer NOT NULL,
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


CREATE TABLE tube.tube_lease (
    tube text NOT NULL,
    partitions integer NOT NULL,
    partition integer NOT NULL,
    holder text NOT NULL,
    term bigint NOT NULL,
    beat bigint NOT NULL,
    ttl interval NOT NULL,
    CONSTRAINT tube_lease_check CHECK (((partition >= 0) AND (partition <= (partitions - 1))))
);


COMMENT ON TABLE tube.tube_lease IS 'replicad: leases of partitions, fenced by their term';


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


CREATE SEQUENCE tube.tube_term_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


COMMENT ON SEQUENCE tube.tube_term_seq IS 'replicad: terms and beats of all leases';


CREATE TABLE tube.tube_version (
    version integer NOT NULL,
    digest text NOT NULL,
    installed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);


COMMENT ON TABLE tube.tube_version IS 'replicad: what is installed in this schema';


ALTER TABLE ONLY replicad.cache_invalidation ALTER COLUMN id SET DEFAULT nextval('replicad.cache_invalidation_id_seq'::regclass);


ALTER TABLE ONLY replicad.cache_invalidation
    ADD CONSTRAINT cache_invalidation_pkey PRIMARY KEY (id);


ALTER TABLE ONLY replicad.federation_destination
    ADD CONSTRAINT federation_destination_pkey PRIMARY KEY (name);


ALTER TABLE ONLY replicad.federation_destination_room
    ADD CONSTRAINT federation_destination_room_pkey PRIMARY KEY (destination, stream_ordering, part);


ALTER TABLE ONLY replicad.federation_edu
    ADD CONSTRAINT federation_edu_destination_key_key UNIQUE (destination, key);


ALTER TABLE ONLY replicad.federation_edu
    ADD CONSTRAINT federation_edu_pkey PRIMARY KEY (id);


ALTER TABLE ONLY replicad.federation_fact
    ADD CONSTRAINT federation_fact_pkey PRIMARY KEY (stream_ordering, part);


ALTER TABLE ONLY replicad.federation_sender
    ADD CONSTRAINT federation_sender_pkey PRIMARY KEY (name, stream);


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


ALTER TABLE ONLY replicad.stream_ack
    ADD CONSTRAINT stream_ack_pkey PRIMARY KEY (stream, instance);


ALTER TABLE ONLY replicad.stream_mark
    ADD CONSTRAINT stream_mark_pkey PRIMARY KEY (stream, at);


ALTER TABLE ONLY replicad.stream
    ADD CONSTRAINT stream_name_key UNIQUE (name);


ALTER TABLE ONLY replicad.stream
    ADD CONSTRAINT stream_pkey PRIMARY KEY (number);


ALTER TABLE ONLY replicad.stream_position
    ADD CONSTRAINT stream_position_pkey PRIMARY KEY (stream, writer);


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


ALTER TABLE ONLY tube.tube_backfill
    ADD CONSTRAINT tube_backfill_pkey PRIMARY KEY (tube, tbl);


ALTER TABLE ONLY tube.tube_lease
    ADD CONSTRAINT tube_lease_pkey PRIMARY KEY (tube, partitions, partition);


ALTER TABLE ONLY tube.tube_parked
    ADD CONSTRAINT tube_parked_pkey PRIMARY KEY (parked);


ALTER TABLE ONLY tube.tube_registry
    ADD CONSTRAINT tube_registry_pkey PRIMARY KEY (tube);


ALTER TABLE ONLY tube.tube_report
    ADD CONSTRAINT tube_report_pkey PRIMARY KEY (tube, reporter);


CREATE INDEX federation_edu_destination_id ON replicad.federation_edu USING btree (destination, id);


CREATE INDEX presence_seen_daemon ON replicad.presence_seen USING btree (daemon, user_id);


CREATE INDEX presence_stream_user ON replicad.presence_stream USING btree (user_id, id);


CREATE INDEX presence_user_ip_stored ON replicad.presence_user_ip USING btree (stored_at);


CREATE INDEX presence_user_ip_user ON replicad.presence_user_ip USING btree (user_id, last_seen);


CREATE INDEX presence_user_told ON replicad.presence_user USING btree (told);


CREATE INDEX tube_parked_tube ON tube.tube_parked USING btree (tube, parked);


ALTER TABLE ONLY replicad.presence_seen
    ADD CONSTRAINT presence_seen_daemon_fkey FOREIGN KEY (daemon) REFERENCES replicad.presence_daemon(id) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_ack
    ADD CONSTRAINT stream_ack_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream(number) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_mark
    ADD CONSTRAINT stream_mark_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream(number) ON DELETE CASCADE;


ALTER TABLE ONLY replicad.stream_position
    ADD CONSTRAINT stream_position_stream_fkey FOREIGN KEY (stream) REFERENCES replicad.stream(number) ON DELETE CASCADE;


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


ALTER TABLE ONLY tube.tube_backfill
    ADD CONSTRAINT tube_backfill_tube_fkey FOREIGN KEY (tube) REFERENCES tube.tube_registry(tube) ON DELETE CASCADE;


ALTER TABLE ONLY tube.tube_lease
    ADD CONSTRAINT tube_lease_tube_fkey FOREIGN KEY (tube) REFERENCES tube.tube_registry(tube) ON DELETE CASCADE;


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


REVOKE ALL ON FUNCTION replicad.stream_add(name text, tbl regclass, id_column name, instance_column name, row_sql text, method text, positions regclass, sequence regclass) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_check(s replicad.stream) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_check_row(tbl regclass, id_column name, row_sql text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_guard_attach(s replicad.stream) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_guard_build(s replicad.stream) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_mark_position(stream_number integer, new_position bigint, at timestamp with time zone) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_publish(stream_number integer, seen_resets integer, linear_position bigint, writers integer[], positions bigint[], at timestamp with time zone) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_remove(name text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_reset(stream_number integer, seen_resets integer, new_position bigint) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_trim(name text, upto bigint, batch integer) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_writers_discover(s replicad.stream) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.stream_writers_ensure(stream_number integer, names text[]) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.writer_changed(number smallint) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.writer_disable(stream text) FROM PUBLIC;


REVOKE ALL ON FUNCTION replicad.writer_enable(stream text, slots integer) FROM PUBLIC;


GRANT SELECT ON TABLE replicad.writer_sharding TO PUBLIC;


REVOKE ALL ON FUNCTION replicad.writer_lock(stream text) FROM PUBLIC;


REVOKE ALL ON FUNCTION tube.tube_truncate_trigger() FROM PUBLIC;


GRANT SELECT ON TABLE replicad.stream_position TO PUBLIC;


GRANT SELECT ON TABLE replicad.writer_member TO PUBLIC;


GRANT SELECT ON TABLE replicad.writer_slot TO PUBLIC;


--
-- PostgreSQL database dump complete
--


INSERT INTO replicad.cache_version VALUES (1, 'ac4f639a35900beb', '2026-11-22 02:17:40.490373+00');


INSERT INTO replicad.federation_version VALUES (1, '198aaa76534fa99b', '2026-11-22 02:17:40.473788+00');


INSERT INTO replicad.ownership_version VALUES (1, 'efa1e7a180f422f6', '2026-11-22 02:17:40.540483+00');


INSERT INTO replicad.presence_version VALUES (1, 'dcf0aa55a9a14854', '2026-11-22 02:17:40.597064+00');


INSERT INTO replicad.stream_version VALUES (1, '40a91dc9c25d73c7', '2026-11-22 02:17:40.361345+00');


INSERT INTO tube.tube_version VALUES (1, 'ecdbadcadfc6d5f9', '2026-11-22 02:17:40.438996+00');


--
-- PostgreSQL database dump complete
--


