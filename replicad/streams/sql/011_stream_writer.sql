-- stream_writer: the small persistent number of each writer of a stream, which vector tokens are made of.
CREATE TABLE IF NOT EXISTS stream_writer (
    stream smallint NOT NULL REFERENCES stream ON DELETE CASCADE,
    number integer NOT NULL CHECK (number BETWEEN 1 AND 999999999),
    name text NOT NULL,                       -- as stream_instance() writes it
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (stream, number),
    UNIQUE (stream, name),
    retired_at timestamptz                    -- an operator has said that it writes no more; its number stays taken
);
COMMENT ON TABLE stream_writer IS 'replicad: numbers of writers, stable for the life of the stream';
