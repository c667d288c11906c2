-- stream_mark: where a stream stood at a time, at most once a minute for a day and once an hour before that. Turns an
-- age into an id for tables that have no column of time. Written by stream_note, cut by stream_trim.
CREATE TABLE IF NOT EXISTS stream_mark (
    stream smallint NOT NULL REFERENCES stream ON DELETE CASCADE,
    at timestamptz NOT NULL,
    position bigint NOT NULL,
    hourly boolean NOT NULL,                  -- the first of its hour: kept when the others go
    PRIMARY KEY (stream, at)
);
COMMENT ON TABLE stream_mark IS 'replicad: positions of the past, to trim by age';
