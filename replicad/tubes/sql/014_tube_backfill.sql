-- tube_backfill: the latest backfill of each attached table. Written by tube_backfill_step3 and tube_backfill_chunk.
-- The row of a finished backfill stays until its control pods have left the tube; it shows to which table they belong.
CREATE TABLE IF NOT EXISTS tube_backfill (
    tube text NOT NULL REFERENCES tube_registry ON DELETE CASCADE,
    tbl regclass NOT NULL,
    shard integer NOT NULL,
    start_seq text NOT NULL,                  -- of tube_backfill_step1, as in the control pods
    order_col name NOT NULL,
    after_value text,                         -- order_col of the last id that is in the tube; NULL: none, or it is NULL
    after_id bigint,                          -- that id; NULL: none yet
    shards integer[] NOT NULL,                -- those with a backfill_start pod
    ids bigint NOT NULL DEFAULT 0,            -- how many are in the tube
    approx_ids bigint,                        -- how many there are, by the planner's statistics
    finished boolean NOT NULL DEFAULT false,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tube, tbl)
);
COMMENT ON TABLE tube_backfill IS 'replicad: progress of backfills';
