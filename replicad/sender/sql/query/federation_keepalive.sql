-- Have Postgres notice within a minute that the other end of this session's connection is gone, so that what it locks is
-- free again. Of no effect on a Unix socket.
SELECT set_config('tcp_keepalives_idle', '30', false), set_config('tcp_keepalives_interval', '10', false),
    set_config('tcp_keepalives_count', '3', false)
