-- stream_ack: up to which token each sender has acknowledged a stream by FEDERATION_ACK. Written by stream_ack_note.
CREATE TABLE IF NOT EXISTS stream_ack (
    stream smallint NOT NULL REFERENCES stream ON DELETE CASCADE,
    instance text COLLATE "C" NOT NULL,
    token bigint NOT NULL,
    generation text NOT NULL,                 -- in which the token holds
    acked_at timestamptz NOT NULL,
    PRIMARY KEY (stream, instance)
);
ALTER TABLE stream_ack SET (fillfactor = 50);  -- updated in place, again and again
COMMENT ON TABLE stream_ack IS 'replicad: what senders have acknowledged';
