-- stream_epoch(s): 16 hexadecimal digits that change whenever ids may begin to mean something else: another cluster or
-- database, another timeline (a restore, a failover), another stream of that name, an announced reset.
CREATE OR REPLACE FUNCTION stream_epoch(s stream) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT left(encode(sha256(convert_to(concat_ws(' ',
        (SELECT c.system_identifier FROM pg_control_system() c),
        CASE WHEN pg_is_in_recovery() THEN (SELECT c.timeline_id::text FROM pg_control_checkpoint() c)
            ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) END,
        (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()),
        s.number, extract(epoch FROM s.created_at), s.resets), 'UTF8')), 'hex'), 16)
$$;
COMMENT ON FUNCTION stream_epoch(stream) IS 'What a token must have in common with the stream it was made for';
