-- invalidate_cache(func, keys): the entry `keys` (a JSON array, as the cache is keyed) of cache `func` is no longer good
-- once this transaction has committed; NULL, or JSON's null: the whole cache. Returns how many rows it wrote: 0 while
-- the stream is not enabled. Keys of more than 64 KiB stand for the whole cache. Raises RS002. Writes cache_invalidation.
-- Anybody may call it, with the rights of its owner: to say that a cache is old needs no right to say it as somebody.
CREATE OR REPLACE FUNCTION invalidate_cache(func text, keys jsonb = NULL) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER AS $$
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
COMMENT ON FUNCTION invalidate_cache(text, jsonb) IS 'Makes every worker forget an entry, or (NULL) all entries, of a cache';
