-- presence_enable(grace, lost_grace, ttl, ip_retention): has daemons make the stream `presence` from now on, and changes
-- those settings that are given. Returns whether it was not so already. Raises RS002 where another table is the stream
-- of that name. Writes presence_setting and, by stream_add, stream.
CREATE OR REPLACE FUNCTION presence_enable(
    grace interval = NULL, lost_grace interval = NULL, ttl interval = NULL, ip_retention interval = NULL
) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    present regclass;
BEGIN
    INSERT INTO presence_setting DEFAULT VALUES ON CONFLICT DO NOTHING;
    UPDATE presence_setting s SET
        grace = coalesce(presence_enable.grace, s.grace),
        lost_grace = coalesce(presence_enable.lost_grace, s.lost_grace),
        ttl = coalesce(presence_enable.ttl, s.ttl),
        ip_retention = coalesce(presence_enable.ip_retention, s.ip_retention);
    SELECT s.relation INTO present FROM stream s WHERE s.name = 'presence';
    IF present IS NULL THEN
        PERFORM stream_add('presence', 'presence_stream', 'id', row_sql => 'json_build_array(t.user_id, t.state, '
            't.last_active_ts, t.last_federation_update_ts, t.last_user_sync_ts, t.status_msg, t.currently_active)');
        RETURN true;
    END IF;
    PERFORM stream_refuse(format('there is a stream presence already, of table %s', present),
        format('remove it: SELECT %I.stream_remove(''presence'')', current_schema()))
        WHERE present <> 'presence_stream'::regclass;
    RETURN false;
END
$$;
COMMENT ON FUNCTION presence_enable(interval, interval, interval, interval) IS 'Has daemons make the stream presence';
