-- presence_daemon: one row for each life of a daemon. The id is never used again; the beat grows with every sign of life,
-- so that whoever sees it unchanged for long enough, by a clock of its own, knows that the daemon is dead or cut off.
-- Written by presence_enlist, presence_beat and presence_bury.
CREATE TABLE IF NOT EXISTS presence_daemon (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    name text NOT NULL,
    beat bigint NOT NULL DEFAULT 1,
    buried boolean NOT NULL DEFAULT false,    -- its users are being cleared: it may write nothing more
    enlisted_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
ALTER TABLE presence_daemon SET (fillfactor = 50);  -- updated in place, again and again
COMMENT ON TABLE presence_daemon IS 'replicad: the daemons that write presence, each with its beat';
