-- cache_disable(): the stream `caches` is gone with its rows, and invalidations write nothing until it is enabled again.
-- Workers empty their caches and go without. Returns whether there was anything to do. Writes stream,
-- cache_invalidation.
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
