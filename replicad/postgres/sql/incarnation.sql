    SELECT CASE WHEN pg_is_in_recovery() THEN 'standby' ELSE concat_ws('/',
        (SELECT c.system_identifier FROM pg_control_system() c),
        left(pg_walfile_name(pg_current_wal_lsn()), 8),
        (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()),
        extract(epoch FROM pg_postmaster_start_time()),
        extract(epoch FROM least((SELECT a.stats_reset FROM pg_stat_get_archiver() a),
            pg_stat_get_bgwriter_stat_reset_time(), (SELECT w.stats_reset FROM pg_stat_get_wal() w)))) END
