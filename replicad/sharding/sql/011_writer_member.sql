-- writer_member: the writers that there are. Written by writer_join, _beat, _retire, _leave and _expel.
CREATE TABLE IF NOT EXISTS writer_member (
    stream smallint NOT NULL REFERENCES writer_sharding ON DELETE CASCADE,
    instance text COLLATE "C" NOT NULL,
    term bigint NOT NULL,                     -- of this membership; slots of an older one are nobody's
    beat bigint NOT NULL,                     -- changes with every sign of life
    ttl interval NOT NULL,                    -- unchanged for this long on the watcher's own clock: dead
    address text,                             -- where the application sends what belongs to this writer
    leaving boolean NOT NULL DEFAULT false,   -- gives back what it has and gets nothing more
    joined_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    beat_at timestamptz NOT NULL DEFAULT clock_timestamp(),  -- for people; nothing is decided by it
    PRIMARY KEY (stream, instance)
) WITH (fillfactor = 50);                     -- updated in place, again and again
COMMENT ON TABLE writer_member IS 'replicad: writers that share a stream, and their signs of life';
