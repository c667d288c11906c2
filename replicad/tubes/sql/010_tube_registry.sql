-- tube_seq: numbers the pods of all tubes of this schema. Positions depend on CACHE 1; never change it.
-- tube_registry: one row per tube. Written by tube_ensure_exists and tube_ensure_absent. Functions that change leases,
-- attachments or the number of partitions of a tube lock its row first.
CREATE SEQUENCE IF NOT EXISTS tube_seq;
COMMENT ON SEQUENCE tube_seq IS 'replicad: seq of the pods of all tubes; must keep CACHE 1';

CREATE TABLE IF NOT EXISTS tube_registry (
    tube text PRIMARY KEY,                    -- also the name of the table that holds the pods
    partitions integer NOT NULL CHECK (partitions BETWEEN 1 AND 32768),
    predicate text,                           -- SQL on a row of any attached table; NULL: every row
    path name[] NOT NULL,                     -- schemas in which names of the predicate are looked up
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE tube_registry IS 'replicad: the tubes; use tube_ensure_exists() and tube_ensure_absent()';
