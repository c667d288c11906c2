-- stream_position: how far each stream was published last. Written about once a second by every daemon that serves it,
-- read by a daemon that starts: what was published once is taken back only by a new generation, which begins here.
CREATE TABLE IF NOT EXISTS stream_position (
    stream smallint NOT NULL REFERENCES stream ON DELETE CASCADE,
    writer integer NOT NULL,                  -- a number of stream_writer; 0: all writers together (linear)
    position bigint NOT NULL,
    published_at timestamptz NOT NULL,
    PRIMARY KEY (stream, writer)
);
ALTER TABLE stream_position SET (fillfactor = 50);  -- updated in place, again and again
COMMENT ON TABLE stream_position IS 'replicad: last published position per stream and writer (0: linear)';
