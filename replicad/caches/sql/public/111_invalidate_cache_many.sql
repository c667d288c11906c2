-- invalidate_cache_many(func, many): as invalidate_cache, for every array of keys in the JSON array `many`, in one
-- statement. More than 10,000 of them, or one that is too long, empty the whole cache with one row: that says more, never
-- less. Returns how many rows it wrote. Raises RS002. Writes cache_invalidation.
CREATE OR REPLACE FUNCTION invalidate_cache_many(func text, many jsonb) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER AS $$
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
COMMENT ON FUNCTION invalidate_cache_many(text, jsonb) IS 'Makes every worker forget many entries of a cache';
