-- writer_sharding: the streams whose writers share the keys among themselves. Written by writer_enable and
-- writer_disable; `version` by everything that changes who is a member or who has a slot.
-- writer_term_seq numbers terms, beats and versions alike: no number is ever seen twice, so that a changed beat proves a
-- living writer without any clock, and an old term fits nothing.
CREATE SEQUENCE IF NOT EXISTS writer_term_seq;
COMMENT ON SEQUENCE writer_term_seq IS 'replicad: terms and beats of writers that share a stream';

CREATE TABLE IF NOT EXISTS writer_sharding (
    stream smallint PRIMARY KEY REFERENCES stream ON DELETE CASCADE,
    slots integer NOT NULL CHECK (slots BETWEEN 1 AND 4096),  -- a key's slot depends on it: chosen once
    version bigint NOT NULL DEFAULT nextval('writer_term_seq')
);
COMMENT ON TABLE writer_sharding IS 'replicad: streams whose writers share the keys; use writer_enable()';
