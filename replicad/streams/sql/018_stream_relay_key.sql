-- stream_relay_key: one secret, from which the name of the channel is made on which daemons reach each other by NOTIFY. Any
-- role may listen to any channel and send on it, so only the daemons may know the name. To change it: DELETE the row and
-- INSERT a new one; the daemons take it over within 10 s. Written by nobody else, read by stream_relay_channel.
CREATE TABLE IF NOT EXISTS stream_relay_key (
    single boolean PRIMARY KEY DEFAULT true CHECK (single),
    key text NOT NULL DEFAULT replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', '') CHECK (length(key) >= 32)
);
COMMENT ON TABLE stream_relay_key IS 'A secret of the daemons: nobody else may read it';
REVOKE ALL ON stream_relay_key FROM PUBLIC;
INSERT INTO stream_relay_key DEFAULT VALUES ON CONFLICT DO NOTHING;
