-- tube_report: the last report of each reader of a tube. Written by tube_report_put.
CREATE TABLE IF NOT EXISTS tube_report (
    tube text NOT NULL REFERENCES tube_registry ON DELETE CASCADE,
    reporter text NOT NULL,                   -- who counts: a pipeline, say
    counts jsonb NOT NULL,
    reported_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tube, reporter)
);
COMMENT ON TABLE tube_report IS 'replicad: what readers of tubes have counted';
