-- stream_troubles(at): what daemons that are running report to be wrong, the oldest first.
CREATE OR REPLACE FUNCTION stream_troubles(at timestamptz = clock_timestamp()) RETURNS SETOF stream_trouble
LANGUAGE sql STABLE AS $$
    SELECT * FROM stream_trouble t WHERE t.seen_at > stream_troubles.at - interval '15 seconds'
    ORDER BY t.since, t.kind, t.name, t.cause, t.daemon
$$;
COMMENT ON FUNCTION stream_troubles(timestamptz) IS 'What running daemons report to be wrong';
