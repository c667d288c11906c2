-- stream_kept: the lowest id that each stream's table had when a daemon looked last, and the highest position that was
-- published by then. Written by stream_keep about once a minute: where the lowest id has grown, rows were removed.
CREATE TABLE IF NOT EXISTS stream_kept (
    stream smallint PRIMARY KEY REFERENCES stream ON DELETE CASCADE,
    generation integer NOT NULL,              -- the number of the one in which it was noted
    lowest bigint,                            -- NULL: the table was empty
    published bigint NOT NULL
);
COMMENT ON TABLE stream_kept IS 'replicad: the oldest row of each stream, to notice that rows were removed';
