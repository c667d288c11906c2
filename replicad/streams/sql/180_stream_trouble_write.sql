-- stream_trouble_write(daemon, kinds, names, causes, codes, reasons, ages): puts these troubles (arrays of one length,
-- ages in seconds) in the place of those that the daemon has written before. Removes the rows of daemons that have not
-- written for an hour. Writes stream_trouble.
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
    ON CONFLICT DO NOTHING;
END
$$;
