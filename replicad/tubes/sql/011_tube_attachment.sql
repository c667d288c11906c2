-- tube_attachment: one row per tube and table with the tube's triggers. The root of a partition or heir is the table
-- that was attached by name. Written by tube_table_ensure_attached and tube_table_ensure_detached.
CREATE TABLE IF NOT EXISTS tube_attachment (
    tube text NOT NULL REFERENCES tube_registry ON DELETE CASCADE,
    tbl regclass NOT NULL,
    root regclass NOT NULL,
    shard integer NOT NULL CHECK (shard >= 0),
    predicate text,                           -- on top of the tube's own
    routing text,                             -- SQL on a row that yields its shard; NULL: shard for every row
    path name[] NOT NULL,                     -- schemas in which names of predicate and routing are looked up
    PRIMARY KEY (tube, tbl)
);
COMMENT ON TABLE tube_attachment IS 'replicad: which tables touch which tubes; use tube_table_ensure_attached()';
