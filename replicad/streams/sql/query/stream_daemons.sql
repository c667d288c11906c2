-- Whether a daemon is connected to this database: its sessions bear this name.
SELECT EXISTS (
    SELECT FROM pg_stat_get_activity(NULL) AS a
    WHERE a.application_name = 'replicad'
        AND a.datid = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
)
