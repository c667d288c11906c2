-- presence_settle(users): tells of those of these users whose state is no longer what was told: who is seen by any
-- daemon is online. The caller holds the rows of presence_user. Writes presence_stream and presence_user.
CREATE OR REPLACE FUNCTION presence_settle(users text[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    now_ms bigint := extract(epoch FROM clock_timestamp()) * 1000;
BEGIN
    WITH come AS (
        INSERT INTO presence_stream (user_id, state, last_active_ts, last_federation_update_ts, last_user_sync_ts,
            currently_active)
        SELECT u.user_id, 'online', u.last_sync, now_ms, u.last_sync, true
        FROM presence_user u
        WHERE u.user_id = ANY (users) AND u.told IS NULL
            AND EXISTS (SELECT FROM presence_seen s WHERE s.user_id = u.user_id)
        ORDER BY u.user_id
        RETURNING id, user_id
    )
    UPDATE presence_user u SET told = come.id FROM come WHERE u.user_id = come.user_id;
    WITH gone AS (
        DELETE FROM presence_user u
        WHERE u.user_id = ANY (users) AND NOT EXISTS (SELECT FROM presence_seen s WHERE s.user_id = u.user_id)
        RETURNING u.user_id, u.told, u.last_sync
    )
    INSERT INTO presence_stream (user_id, state, last_active_ts, last_federation_update_ts, last_user_sync_ts,
        currently_active)
    SELECT g.user_id, 'offline', g.last_sync, now_ms, g.last_sync, false
    FROM gone g WHERE g.told IS NOT NULL ORDER BY g.user_id;
END
$$;
