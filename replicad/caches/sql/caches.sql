-- Caches in processes: the stream of invalidated entries, and the functions that write to it (docs/caches.md).

-- The caches are a stream, in the schema of the streams.
DO $needs$
BEGIN
    IF to_regclass('stream_writer') IS NULL THEN
        RAISE EXCEPTION 'schema % has no streams, which the part cache stands on', current_schema()
            USING ERRCODE = '55000', HINT = 'install the part stream into the same schema first';
    END IF;
END
$needs$;

-- cache_invalidation: the cache entries that are no longer valid. It is the table of the stream `caches`. Written by
-- invalidate_cache and invalidate_cache_many, trimmed as every stream is.
CREATE TABLE IF NOT EXISTS cache_invalidation (
    id bigserial PRIMARY KEY,
    instance text NOT NULL,                   -- by cache_instance(): whose open transactions hold it back
    cache_func text NOT NULL,                 -- a cache's name, or a special name that stands for several
    keys jsonb CHECK (jsonb_typeof(keys) = 'array'),  -- of one entry; NULL: the whole cache
    ts_ms bigint NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000)::bigint
);
COMMENT ON TABLE cache_invalidation IS 'replicad: cache entries that are no longer good; use invalidate_cache()';

-- cache_instance(session_name): the name of the writer under which a session with that application_name invalidates: its
-- own name where it was made a writer (cache_enable), master otherwise. NULL where the stream is not enabled. It is never
-- the caller's choice: the lock-watch knows by application_name alone whose open transaction it sees, and would publish
-- past the rows of a session that writes as another one. Its body is parsed here, so the tables that it reads cannot be
-- dropped before it.
CREATE OR REPLACE FUNCTION cache_instance(session_name text) RETURNS text
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce((SELECT w.name FROM stream_writer w WHERE w.stream = s.number AND w.name = session_name), 'master')
    FROM stream s
    WHERE s.relation = 'cache_invalidation'::regclass
    ORDER BY s.number
    LIMIT 1;
END;

-- cache_writer(func): checks a cache's name and returns the name of the writer under which this session invalidates; NULL
-- where the stream is not enabled. Raises RS002. A snapshot of before this transaction's first write may not show that the
-- session was made a writer meanwhile. There the session takes a name that no writer has, for the rest of the transaction:
-- it then holds back all of them, which is always right.
CREATE OR REPLACE FUNCTION cache_writer(func text) RETURNS text
LANGUAGE plpgsql AS $$
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

-- cache_check_right(): raises 42501, with the GRANT, for a role that may not call cache_write. Writes nothing.
CREATE OR REPLACE FUNCTION cache_check_right() RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT has_function_privilege('cache_write(text, jsonb)', 'EXECUTE') THEN
        RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('role %I may not invalidate caches', current_user),
            HINT = format('run `replicad caches grant %1$s`, or: GRANT EXECUTE ON FUNCTION %2$I.cache_write(text, jsonb) TO '
                '%1$I', current_user, current_schema());
    END IF;
END
$$;

-- invalidate_cache(func, keys): the entry `keys` (a JSON array, as the cache is keyed) of cache `func` is no longer good
-- once this transaction has committed; NULL, or JSON's null: the whole cache. Returns how many rows it wrote: 0 while
-- the stream is not enabled. Keys of more than 64 KiB stand for the whole cache. Raises RS002, and 42501 for a role that may
-- not invalidate (`replicad caches grant`). Writes cache_invalidation, by cache_write.
CREATE OR REPLACE FUNCTION invalidate_cache(func text, keys jsonb = NULL) RETURNS integer
LANGUAGE plpgsql SECURITY INVOKER AS $$
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
COMMENT ON FUNCTION invalidate_cache(text, jsonb) IS 'Makes every worker forget an entry, or (NULL) all entries, of a cache';

-- invalidate_cache_many(func, many): as invalidate_cache, for every array of keys in the JSON array `many`, in one
-- statement. More than 10,000 arrays, or an array that is too long, empty the whole cache with one row: that invalidates
-- more, never less. Returns how many rows it wrote. Raises RS002 and 42501. Writes cache_invalidation, by cache_write.
CREATE OR REPLACE FUNCTION invalidate_cache_many(func text, many jsonb) RETURNS integer
LANGUAGE plpgsql SECURITY INVOKER AS $$
BEGIN
    PERFORM cache_check_right();
    RETURN cache_write(func, coalesce(many, 'null'));
END
$$;
COMMENT ON FUNCTION invalidate_cache_many(text, jsonb) IS 'Makes every worker forget many entries of a cache';

-- cache_write(func, entries): the work of invalidate_cache and invalidate_cache_many, with the rights of its owner: it
-- writes a row for each array of keys in the JSON array `entries`, or one row for the whole cache where `entries` is NULL,
-- has more than 10,000 arrays, or has an array of more than 64 KiB. That invalidates more, never less. Returns how many
-- rows it wrote: 0 while the stream is not enabled. Raises RS002. Writes cache_invalidation. EXECUTE on this function is
-- the right to invalidate; `replicad caches grant ROLE` gives it.
CREATE OR REPLACE FUNCTION cache_write(func text, entries jsonb) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER AS $$
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
COMMENT ON FUNCTION cache_write(text, jsonb) IS 'Writes invalidations; EXECUTE on it is the right to invalidate';

-- cache_enable(writers): makes cache_invalidation the stream `caches` where it is not one yet, and sessions of these
-- application_names writers of their own: an open transaction of such a session then holds back only the invalidations of
-- its own writer. They stay writers as long as the stream exists. Returns whether the stream is new. Raises RS002. Its lock
-- waits for all transactions that have invalidated something, so no transaction goes on as master under a name that belongs
-- to a writer from now on. Writes stream, stream_writer.
CREATE OR REPLACE FUNCTION cache_enable(writers text[] = '{}') RETURNS boolean
LANGUAGE plpgsql AS $$
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
COMMENT ON FUNCTION cache_enable(text[]) IS 'Makes the stream caches, and sessions writers of their own';

-- cache_disable(): removes the stream `caches` with its rows. Invalidations write nothing until it is enabled again.
-- Workers empty their caches and go without. Returns whether there was anything to do. Writes stream, cache_invalidation.
CREATE OR REPLACE FUNCTION cache_disable() RETURNS boolean
LANGUAGE plpgsql AS $$
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
COMMENT ON FUNCTION cache_disable() IS 'Removes the stream caches and its rows';

-- cache_names(): the names of the caches in the newest 100,000 invalidations; the cache with the most invalidations comes
-- first.
CREATE OR REPLACE FUNCTION cache_names()
RETURNS TABLE (cache_func text, invalidations bigint, whole bigint, last timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT n.cache_func, count(*), count(*) FILTER (WHERE n.keys IS NULL), to_timestamp(max(n.ts_ms) / 1000.0)
    FROM (SELECT i.cache_func, i.keys, i.ts_ms FROM cache_invalidation i ORDER BY i.id DESC LIMIT 100000) n
    GROUP BY n.cache_func
    ORDER BY count(*) DESC, n.cache_func
    LIMIT 1000
$$;
COMMENT ON FUNCTION cache_names() IS 'The caches that were invalidated lately';

-- The right to invalidate: roles with EXECUTE on cache_write have it. PUBLIC may call the functions in front of it, which
-- run with the caller's rights and name the GRANT that is missing. Only the owner may use the table, and enable or disable
-- the stream. Every function looks its neighbours up in this schema alone, whatever the caller's search_path.
DO $rights$
DECLARE
    f record;
BEGIN
    FOR f IN SELECT p.oid::regprocedure AS name, p.proname, p.proacl
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = current_schema()
            AND p.proname IN ('cache_writer', 'cache_write', 'cache_check_right', 'invalidate_cache',
                'invalidate_cache_many', 'cache_enable', 'cache_disable', 'cache_names')
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', f.name, current_schema());
        IF f.proname IN ('cache_enable', 'cache_disable', 'cache_names') THEN
            EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f.name);
        ELSIF f.proname = 'cache_write' AND f.proacl IS NULL THEN  -- made just now: later grants are the operator's
            EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f.name);
        END IF;
    END LOOP;
END
$rights$;
