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
