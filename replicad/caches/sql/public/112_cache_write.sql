-- cache_write(func, entries): what invalidate_cache and invalidate_cache_many do, with the rights of its owner: a row for
-- each array of keys in the JSON array `entries`, or one row for the whole cache where `entries` is NULL, has more than
-- 10,000 arrays, or one of more than 64 KiB. That says more, never less. Returns how many rows it wrote: 0 while the stream
-- is not enabled. Raises RS002. Writes cache_invalidation.
-- EXECUTE on this function is the right to invalidate; `replicad caches grant ROLE` gives it.
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
