-- tube_low: low-water marks. A partition has no pod of that kind at or below seq, and none can appear there, so every
-- read begins behind it. Otherwise a read from the start passes all index entries of pods that were acked and that
-- VACUUM may not remove yet, because some transaction holds an old snapshot. Written by tube_low_raise.
-- It is changed once in thousands of acks, since its own old rows stay as long as those of the pods. There is no foreign
-- key: an ack must not wait for who alters the tube.
CREATE TABLE IF NOT EXISTS tube_low (
    tube text NOT NULL,
    partitions integer NOT NULL,
    partition integer NOT NULL,
    backfill boolean NOT NULL,                -- the mark of backfill pods, or of regular ones
    seq bigint NOT NULL,
    PRIMARY KEY (tube, partitions, partition, backfill)
);
COMMENT ON TABLE tube_low IS 'replicad: below which seq a partition has no pods any more';
