-- stream_reservation_key: one secret, from which the proofs of reservations are made (stream_prove). Read by that function,
-- which runs with its owner's rights, and by daemons. It must stay the same while ids are reserved: with another one the
-- daemons would not know the locks that are held. Written by the installation.
CREATE TABLE IF NOT EXISTS stream_reservation_key (
    single boolean PRIMARY KEY DEFAULT true CHECK (single),
    key bytea NOT NULL DEFAULT sha256(convert_to(gen_random_uuid()::text || gen_random_uuid()::text, 'UTF8'))
        CHECK (length(key) = 32)
);
COMMENT ON TABLE stream_reservation_key IS 'A secret of replicad: no role of a user may read it. Never change it';
REVOKE ALL ON stream_reservation_key FROM PUBLIC;
INSERT INTO stream_reservation_key DEFAULT VALUES ON CONFLICT DO NOTHING;
