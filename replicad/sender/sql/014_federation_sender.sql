-- federation_sender: up to which token each sender has recorded a stream, and how the senders of a
-- source share the destinations.
CREATE TABLE IF NOT EXISTS federation_sender (
    source text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    stream text COLLATE "C" NOT NULL,
    token bigint,                             -- recorded for every destination of this sender; NULL: not begun
    senders text[] NOT NULL,                  -- sorted; the same for all
    epoch text,                               -- the generation of the stream in which `token` holds; NULL: not known
    PRIMARY KEY (source, name, stream)
);
ALTER TABLE federation_sender SET (fillfactor = 20);  -- updated with every batch
COMMENT ON TABLE federation_sender IS 'replicad sender: how far each sender has recorded each stream';
