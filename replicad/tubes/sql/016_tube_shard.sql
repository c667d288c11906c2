-- tube_shard: the shards of which pods have left a tube, so the shards of which a downstream may hold rows. A backfill
-- of a table with routing asks for their garbage, also if the table has no more row in a shard. Written by tube_remove,
-- tube_remove_range and tube_park, and not by the triggers: it costs writers nothing. No foreign key: an ack locks its
-- lease first, the removal of a tube locks the registry first, and a key between the two would let them deadlock.
CREATE TABLE IF NOT EXISTS tube_shard (
    tube text NOT NULL,
    shard integer NOT NULL,
    PRIMARY KEY (tube, shard)
);
COMMENT ON TABLE tube_shard IS 'replicad: the shards of which a downstream may hold rows';
