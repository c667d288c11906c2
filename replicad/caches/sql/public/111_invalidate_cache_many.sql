-- invalidate_cache_many(func, many): as invalidate_cache, for every array of keys in the JSON array `many`, in one
-- statement. More than 10,000 of them, or one that is too long, empty the whole cache with one row: that says more, never
-- less. Returns how many rows it wrote. Raises RS002 and 42501. Writes cache_invalidation, by cache_write.
CREATE OR REPLACE FUNCTION invalidate_cache_many(func text, many jsonb) RETURNS integer
LANGUAGE plpgsql SECURITY INVOKER AS $$
BEGIN
    PERFORM cache_check_right();
    RETURN cache_write(func, coalesce(many, 'null'));
END
$$;
COMMENT ON FUNCTION invalidate_cache_many(text, jsonb) IS 'Makes every worker forget many entries of a cache';
