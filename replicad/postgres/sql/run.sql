concat_ws('/', left(pg_walfile_name(pg_current_wal_lsn()), 8), extract(epoch FROM pg_postmaster_start_time()),
        extract(epoch FROM least((pg_stat_get_archiver()).stats_reset, pg_stat_get_bgwriter_stat_reset_time(),
            (pg_stat_get_wal()).stats_reset)))
