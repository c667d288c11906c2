-- tube_shard: the shards of which pods have left a tube, so the shards of which a downstream may hold rows. A backfill
-- of a table with routing asks for their garbage, also if the table has no more row in a shard. Written by tube_remove,
-- tube_remove_range and tube_park, and not by the triggers: it costs writers nothing. An ack must not wait here while it
-- holds pods or its lease, and others wait for them. So there is no foreign key and no unique key: transactions that note
-- a shard at the same time leave two rows.
CREATE TABLE IF NOT EXISTS tube_shard (
    tube text NOT NULL,
    shard integer NOT NULL
);
CREATE INDEX IF NOT EXISTS tube_shard_noted ON tube_shard (tube, shard);
COMMENT ON TABLE tube_shard IS 'replicad: the shards of which a downstream may hold rows';
