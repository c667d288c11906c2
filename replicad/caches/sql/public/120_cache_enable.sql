-- cache_enable(writers): makes cache_invalidation the stream `caches` where it is not one yet, and sessions of these
-- application_names writers of their own: an open transaction of one then holds back that one's invalidations only.
-- They stay writers as long as the stream exists. Returns whether the stream is new. Raises RS002.
-- Its lock waits for all transactions that have invalidated something: none goes on as master under a name that is a
-- writer's from now on. Writes stream, stream_writer.
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
