-- cache_invalidation: what is to be emptied of which cache; the table of the stream `caches`. Written by
-- invalidate_cache and invalidate_cache_many, trimmed as every stream is.
CREATE TABLE IF NOT EXISTS cache_invalidation (
    id bigserial PRIMARY KEY,
    instance text NOT NULL,                   -- by cache_instance(): whose open transactions hold it back
    cache_func text NOT NULL,                 -- a cache's name, or a special name that stands for several
    keys jsonb CHECK (jsonb_typeof(keys) = 'array'),  -- of one entry; NULL: the whole cache
    ts_ms bigint NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000)::bigint
);
COMMENT ON TABLE cache_invalidation IS 'replicad: cache entries that are no longer good; use invalidate_cache()';
