-- tube_parked: pods, or ids of pods, that failed too often. Written by tube_park, tube_parked_replay and _drop.
CREATE TABLE IF NOT EXISTS tube_parked (
    parked bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    tube text NOT NULL REFERENCES tube_registry ON DELETE CASCADE,
    seq bigint NOT NULL,                      -- the pod's when it was parked
    op character(1) NOT NULL,
    shard integer NOT NULL,
    ids bigint[] NOT NULL,
    payload jsonb,
    ts timestamptz NOT NULL,                  -- the pod's
    tries integer NOT NULL,
    error text NOT NULL,
    parked_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX IF NOT EXISTS tube_parked_tube ON tube_parked (tube, parked);
COMMENT ON TABLE tube_parked IS 'replicad: what failed too often; use tube_parked_list(), _replay() and _drop()';
