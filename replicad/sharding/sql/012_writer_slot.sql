-- writer_slot: whose each slot is. Written by writer_move. A slot is nobody's where its owner is not a member, or became
-- one anew after the slot's term. Whoever writes keys of it holds its lock shared (writer_lock_key) until his
-- transaction ends; whoever changes the row holds that lock alone.
CREATE TABLE IF NOT EXISTS writer_slot (
    stream smallint NOT NULL REFERENCES writer_sharding ON DELETE CASCADE,
    slot integer NOT NULL CHECK (slot >= 0),
    owner text COLLATE "C",                   -- NULL: never owned
    term bigint NOT NULL,                     -- of this ownership
    moved_at timestamptz NOT NULL DEFAULT clock_timestamp(),  -- for people
    PRIMARY KEY (stream, slot)
) WITH (fillfactor = 50);
COMMENT ON TABLE writer_slot IS 'replicad: which writer owns which slot of a stream''s keys, fenced by the term';
