-- The reports of running daemons about themselves and their troubles, and the secret of their relay.

-- stream_trouble_write(daemon, kinds, names, causes, codes, reasons, ages): replaces the troubles that the daemon has
-- written before by these (arrays of one length, ages in seconds). Removes the rows of daemons that have not written for an
-- hour. Writes stream_trouble.
CREATE OR REPLACE FUNCTION stream_trouble_write(
    daemon text, kinds text[], names text[], causes text[], codes text[], reasons text[], ages float8[],
    at timestamptz = clock_timestamp()
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM stream_trouble t
    WHERE t.daemon = stream_trouble_write.daemon OR t.seen_at < stream_trouble_write.at - interval '1 hour';
    INSERT INTO stream_trouble (daemon, kind, name, cause, code, reason, since, seen_at)
    SELECT stream_trouble_write.daemon, n.kind, n.name, n.cause, n.code, n.reason,
        stream_trouble_write.at - make_interval(secs => n.age), stream_trouble_write.at
    FROM unnest(kinds, names, causes, codes, reasons, ages) AS n (kind, name, cause, code, reason, age)
    ON CONFLICT ON CONSTRAINT stream_trouble_pkey DO NOTHING;  -- an error while a dump is restored, which brings rows
END
$$;

-- stream_troubles(at): the troubles that running daemons report, the oldest first.
CREATE OR REPLACE FUNCTION stream_troubles(at timestamptz = clock_timestamp()) RETURNS SETOF stream_trouble
LANGUAGE sql STABLE AS $$
    SELECT * FROM stream_trouble t WHERE t.seen_at > stream_troubles.at - interval '15 seconds'
    ORDER BY t.since, t.kind, t.name, t.cause, t.daemon
$$;
COMMENT ON FUNCTION stream_troubles(timestamptz) IS 'What running daemons report to be wrong';

-- stream_daemons(at): the daemons of this database, by name: where they serve clients, since when, and for how many seconds
-- each was silent. A beat comes every 5 s, so a daemon that is silent for 15 s was killed or cannot reach Postgres; after
-- an hour it is left out.
CREATE OR REPLACE FUNCTION stream_daemons(at timestamptz = clock_timestamp()) RETURNS TABLE (
    name text, pid integer, host inet, addresses text[], version text, started_at timestamptz, seen_at timestamptz,
    silent_s float8
)
LANGUAGE sql STABLE AS $$
    SELECT d.name, d.pid, d.host, d.addresses, d.version, d.started_at, d.seen_at,
        greatest(0, extract(epoch FROM stream_daemons.at - d.seen_at))::float8
    FROM stream_daemon d
    WHERE d.seen_at > stream_daemons.at - interval '1 hour'
    ORDER BY d.name, d.started_at, d.id
$$;
COMMENT ON FUNCTION stream_daemons(timestamptz) IS 'The daemons of this database, and for how long each was silent';

-- stream_daemon_beat(id, name, pid, addresses, version, age): the sign of life of a daemon that began `age` seconds ago.
-- Removes the rows of daemons that were silent for an hour, and of daemons that this daemon replaces: silent for 15 s, with
-- its name, machine and addresses. Writes stream_daemon.
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

-- stream_daemon_leave(id): the daemon stops, so it is not listed any more. Writes stream_daemon.
CREATE OR REPLACE FUNCTION stream_daemon_leave(id uuid) RETURNS void
LANGUAGE sql AS $$
    DELETE FROM stream_daemon d WHERE d.id = stream_daemon_leave.id
$$;

-- stream_relay_channel(): the name of the daemons' channel, which cannot be guessed. Raises an error of rights for every
-- role that may not read stream_relay_key.
CREATE OR REPLACE FUNCTION stream_relay_channel() RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT 'replicad.' || left(encode(sha256(convert_to('relay ' || k.key, 'UTF8')), 'hex'), 48) FROM stream_relay_key k
$$;

-- stream_relay_secret(): the key with which daemons sign what they send to each other, as hexadecimal digits. It cannot be found
-- from the name of the channel. Raises an error of rights for every role that may not read stream_relay_key.
CREATE OR REPLACE FUNCTION stream_relay_secret() RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT encode(sha256(convert_to('sign ' || k.key, 'UTF8')), 'hex') FROM stream_relay_key k
$$;
