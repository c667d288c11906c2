-- stream_daemon: one row for each daemon of this database. It sends a beat every few seconds and removes its row when it
-- stops; a row without a beat is of a daemon that was killed, or that cannot reach Postgres. Only Postgres' clock takes
-- part, and nothing but what operators are shown depends on it. `host` is where Postgres sees the daemon; NULL: a socket.
-- Written by stream_daemon_beat and stream_daemon_leave, read by stream_daemons. UNLOGGED: after a crash of Postgres the
-- daemons write it anew.
CREATE UNLOGGED TABLE IF NOT EXISTS stream_daemon (
    id uuid PRIMARY KEY,
    name text NOT NULL,                       -- --server-name
    pid integer NOT NULL,
    host inet,
    addresses text[] NOT NULL,                -- where clients connect
    version text NOT NULL,
    started_at timestamptz NOT NULL,
    seen_at timestamptz NOT NULL
) WITH (fillfactor = 50);
COMMENT ON TABLE stream_daemon IS 'replicad: the daemons of this database, each with its last beat';
