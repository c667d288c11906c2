-- stream_trouble: what daemons report to be wrong at this moment, of streams, tubes and themselves. Each daemon replaces
-- its rows every few seconds; rows that were not refreshed for 15 s are of a daemon that is no longer running.
-- Written by stream_trouble_write, read by stream_troubles. UNLOGGED: after a crash the daemons write it anew.
CREATE UNLOGGED TABLE IF NOT EXISTS stream_trouble (
    daemon text NOT NULL,
    kind text NOT NULL,                       -- stream, tube, service, ...
    name text NOT NULL,                       -- of the stream, the tube, the service
    cause text NOT NULL,                      -- the work that fails: registry, copy, ...
    code text NOT NULL,
    reason text NOT NULL,
    since timestamptz NOT NULL,
    seen_at timestamptz NOT NULL,
    PRIMARY KEY (daemon, kind, name, cause)
);
COMMENT ON TABLE stream_trouble IS 'replicad: what running daemons report to be wrong';
