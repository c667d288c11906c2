-- presence_setting: what all daemons of this database go by; one row once presence was enabled. Written by
-- presence_enable; locked by presence_retell.
CREATE TABLE IF NOT EXISTS presence_setting (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    grace interval NOT NULL DEFAULT '30 s' CHECK (grace >= '0'),            -- after a user's last device has stopped
    lost_grace interval NOT NULL DEFAULT '30 s' CHECK (lost_grace >= '0'),  -- after a worker's connection has died
    ttl interval NOT NULL DEFAULT '15 s' CHECK (ttl >= '0.3 s'),            -- of a daemon that gives no sign of life
    ip_retention interval NOT NULL DEFAULT '28 days' CHECK (ip_retention > '0')
);
COMMENT ON TABLE presence_setting IS 'replicad: the settings of presence; use presence_enable()';
