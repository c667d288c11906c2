-- stream_incarnation(): which run of which server this is, and which database: the system identifier, the timeline, the
-- oid of the database, when the server was started, and when it has last begun to count anew (`pg_stat_*.stats_reset`).
-- After a crash of any of its processes Postgres starts again by itself: the postmaster and its start stay, and all its
-- statistics are discarded, so that the earliest of these times is a new one. It changes without a crash only where
-- somebody resets the statistics of all three kinds. The history of a table can only have forked where this differs, or
-- where the table or its sequence is another one. `standby` on a standby.
CREATE OR REPLACE FUNCTION stream_incarnation() RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN pg_is_in_recovery() THEN 'standby' ELSE concat_ws('/',
        (SELECT c.system_identifier FROM pg_control_system() c),
        left(pg_walfile_name(pg_current_wal_lsn()), 8),
        (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()),
        extract(epoch FROM pg_postmaster_start_time()),
        extract(epoch FROM least((SELECT a.stats_reset FROM pg_stat_get_archiver() a),
            pg_stat_get_bgwriter_stat_reset_time(), (SELECT w.stats_reset FROM pg_stat_get_wal() w)))) END
$$;
