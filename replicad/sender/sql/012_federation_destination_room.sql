-- federation_destination_room: which facts a destination has yet to take. Once it is catching up, only the latest of
-- each room (federation_source_collapse). A fact without a room stands for itself. Written by federation_source_record
-- and federation_source_write.
CREATE TABLE IF NOT EXISTS federation_destination_room (
    source text COLLATE "C" NOT NULL,
    destination text COLLATE "C" NOT NULL,
    stream_ordering bigint NOT NULL,
    part integer NOT NULL,
    room text COLLATE "C",
    PRIMARY KEY (source, destination, stream_ordering, part)
);
-- For federation_source_sweep alone. Others go by the destination: this index would lead them through the rows of all
-- destinations. The `+ 0` keeps the planner from it.
CREATE INDEX IF NOT EXISTS federation_destination_room_order
    ON federation_destination_room ((stream_ordering + 0), part, source);
ALTER TABLE federation_destination_room SET (autovacuum_vacuum_scale_factor = 0.05);  -- rows do not stay for long
COMMENT ON TABLE federation_destination_room IS 'replicad sender: the facts that each destination has yet to take';
