-- stream_daemon_leave(id): the daemon stops, so it is not listed any more. Writes stream_daemon.
CREATE OR REPLACE FUNCTION stream_daemon_leave(id uuid) RETURNS void
LANGUAGE sql AS $$
    DELETE FROM stream_daemon d WHERE d.id = stream_daemon_leave.id
$$;
