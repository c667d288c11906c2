-- stream_daemons(at): the daemons of this database, by name: where they serve clients, since when, and for how many seconds
-- each was silent. A beat comes every 5 s, so one that is silent for 15 s was killed or cannot reach Postgres; after an
-- hour it is left out.
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
