-- stream_incarnation(): which run of which server this is, and which database: the system identifier, the timeline, the
-- oid of the database, and when the server was started. The history of a table can only have forked where this differs,
-- or where the table or its sequence is another one. `standby` on a standby.
CREATE OR REPLACE FUNCTION stream_incarnation() RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN pg_is_in_recovery() THEN 'standby' ELSE concat_ws('/',
        (SELECT c.system_identifier FROM pg_control_system() c),
        left(pg_walfile_name(pg_current_wal_lsn()), 8),
        (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()),
        extract(epoch FROM pg_postmaster_start_time())) END
$$;
COMMENT ON FUNCTION stream_incarnation() IS 'Which run of which server and database this is';
