-- presence_user_ip: from where a user was seen last, by what USER_IP said. Tokens are only kept as their SHA-256. Written
-- by presence_user_ip_write, cut by presence_user_ip_sweep.
CREATE TABLE IF NOT EXISTS presence_user_ip (
    key bytea PRIMARY KEY,                    -- SHA-256 of user, ip, device and user agent: together too long for an index
    user_id text COLLATE "C" NOT NULL,
    ip text NOT NULL,
    device_id text,
    user_agent text NOT NULL,
    token_sha256 bytea,                       -- of the access token that was used last; NULL: there was none
    last_seen bigint NOT NULL,                -- as workers said, ms since 1970
    stored_at timestamptz NOT NULL            -- by this server's clock; what retention goes by
);
CREATE INDEX IF NOT EXISTS presence_user_ip_user ON presence_user_ip (user_id, last_seen);
CREATE INDEX IF NOT EXISTS presence_user_ip_stored ON presence_user_ip (stored_at);
COMMENT ON TABLE presence_user_ip IS 'replicad: from where users were seen last';
