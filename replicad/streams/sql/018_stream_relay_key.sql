-- stream_relay_key: one secret, from which two things are made: the name of the channel on which daemons reach each other by
-- NOTIFY, and the key with which they sign what they send there. Any role may send on any channel, and the name of a channel is
-- shown to roles with pg_read_all_stats; the key is not. To change both: DELETE the row and INSERT a new one; the daemons
-- take it over within 10 s. Written by nobody else, read by stream_relay_channel and stream_relay_secret.
CREATE TABLE IF NOT EXISTS stream_relay_key (
    single boolean PRIMARY KEY DEFAULT true CHECK (single),
    key text NOT NULL DEFAULT replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', '') CHECK (length(key) >= 32)
);
COMMENT ON TABLE stream_relay_key IS 'A secret of the daemons: nobody else may read it';
REVOKE ALL ON stream_relay_key FROM PUBLIC;
INSERT INTO stream_relay_key DEFAULT VALUES ON CONFLICT DO NOTHING;
