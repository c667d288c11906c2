-- The server and this session, in one row. `daemons`: how many serve this database. Each has two sessions that read
-- positions, or one for a moment.
SELECT
    current_setting('server_version') AS version,
    pg_is_in_recovery() AS standby,
    current_setting('transaction_read_only') = 'on' AS read_only,
    current_user::text AS role,
    extract(epoch FROM clock_timestamp())::float8 AS now,
    pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS sees_sessions,
    (SELECT count(*) FROM pg_stat_get_activity(NULL) AS a WHERE a.client_port IS NOT NULL)::integer AS sessions,
    current_setting('max_connections')::integer AS max_sessions,
    (SELECT (count(*) + 1) / 2 FROM pg_stat_get_activity(NULL) AS a
        WHERE a.application_name = 'replicad positions'
            AND a.datid = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()))::integer AS daemons
