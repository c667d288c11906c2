-- cache_names(): which caches the newest 100,000 invalidations were about, those of the most first.
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
