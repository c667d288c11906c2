-- stream_daemon_beat(id, name, pid, addresses, version, age): the sign of life of a daemon that began `age` seconds ago.
-- Removes the rows of daemons that were silent for an hour, and of those in whose place this one serves: silent for 15 s,
-- with its name, machine and addresses. Writes stream_daemon.
CREATE OR REPLACE FUNCTION stream_daemon_beat(
    id uuid, name text, pid integer, addresses text[], version text, age float8, at timestamptz = clock_timestamp()
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO stream_daemon AS d (id, name, pid, host, addresses, version, started_at, seen_at)
    VALUES (stream_daemon_beat.id, stream_daemon_beat.name, stream_daemon_beat.pid, inet_client_addr(),
        stream_daemon_beat.addresses, stream_daemon_beat.version,
        stream_daemon_beat.at - make_interval(secs => stream_daemon_beat.age), stream_daemon_beat.at)
    ON CONFLICT ON CONSTRAINT stream_daemon_pkey DO UPDATE SET seen_at = excluded.seen_at;
    DELETE FROM stream_daemon d
    WHERE d.seen_at < stream_daemon_beat.at - interval '1 hour'
        OR (d.seen_at < stream_daemon_beat.at - interval '15 seconds' AND d.id <> stream_daemon_beat.id
            AND d.name = stream_daemon_beat.name AND d.addresses = stream_daemon_beat.addresses
            AND d.host IS NOT DISTINCT FROM inet_client_addr());
END
$$;
