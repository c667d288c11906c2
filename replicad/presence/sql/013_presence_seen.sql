-- presence_seen: which users sync at which daemon, or did so a grace period ago. A user is online while there is any.
-- Written by presence_apply and presence_bury.
CREATE TABLE IF NOT EXISTS presence_seen (
    user_id text COLLATE "C" NOT NULL,
    daemon uuid NOT NULL REFERENCES presence_daemon ON DELETE CASCADE,
    PRIMARY KEY (user_id, daemon)
);
CREATE INDEX IF NOT EXISTS presence_seen_daemon ON presence_seen (daemon, user_id);
COMMENT ON TABLE presence_seen IS 'replicad: which users sync at which daemon';
