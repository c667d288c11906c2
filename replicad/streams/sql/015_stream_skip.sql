-- stream_skip: ids that an operator has taken out of a stream, because their rows cannot be read or are too long. Readers
-- are never sent them. Written by stream_skip_id, read with the registry.
CREATE TABLE IF NOT EXISTS stream_skip (
    stream smallint NOT NULL REFERENCES stream ON DELETE CASCADE,
    id bigint NOT NULL,
    reason text NOT NULL,                     -- what was wrong with the row, as far as it was known
    skipped_by text NOT NULL DEFAULT session_user,
    skipped_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (stream, id)
);
COMMENT ON TABLE stream_skip IS 'replicad: rows that an operator has taken out of a stream';
