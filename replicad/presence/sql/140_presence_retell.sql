-- presence_retell(beyond, batch): looks at the next `batch` users that are online, by name, and tells anew of those of
-- whom the row that told of them is gone. Returns the last name, to go on with; NULL at the end. Writes presence_stream
-- and presence_user.
CREATE OR REPLACE FUNCTION presence_retell(beyond text, batch integer) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    now_ms bigint := extract(epoch FROM clock_timestamp()) * 1000;
    page text[];
BEGIN
    PERFORM FROM presence_setting FOR UPDATE;  -- one daemon at a time, each seeing what the one before it has told
    page := ARRAY(SELECT u.user_id FROM presence_user u WHERE u.user_id > beyond ORDER BY u.user_id LIMIT batch);
    PERFORM FROM presence_user u WHERE u.user_id = ANY (page) ORDER BY u.user_id FOR UPDATE;
    WITH again AS (
        INSERT INTO presence_stream (user_id, state, last_active_ts, last_federation_update_ts, last_user_sync_ts,
            currently_active)
        SELECT u.user_id, 'online', u.last_sync, now_ms, u.last_sync, true
        FROM presence_user u
        WHERE u.user_id = ANY (page) AND u.told IS NOT NULL
            AND NOT EXISTS (SELECT FROM presence_stream p WHERE p.id = u.told AND p.user_id = u.user_id)
        ORDER BY u.user_id
        RETURNING id, user_id
    )
    UPDATE presence_user u SET told = again.id FROM again WHERE u.user_id = again.user_id;
    RETURN page[cardinality(page)];
END
$$;
