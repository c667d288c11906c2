-- presence_apply(daemon, users, online, syncs): what a daemon sees of these users (arrays of one length, no user twice):
-- whether they sync there, and their last sync in ms. Tells of those who came online by it, or went offline. To repeat
-- it changes nothing. Returns false, and writes nothing, where the daemon's users were cleared: it begins anew then.
-- Writes presence_seen, presence_user and presence_stream.
CREATE OR REPLACE FUNCTION presence_apply(daemon uuid, users text[], online boolean[], syncs bigint[]) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM presence_daemon d WHERE d.id = presence_apply.daemon AND NOT d.buried FOR SHARE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO presence_user AS u (user_id, last_sync)  -- which locks the row, also where it is being deleted just now
    SELECT c.user_id, c.last_sync FROM unnest(users, syncs) AS c (user_id, last_sync) ORDER BY c.user_id COLLATE "C"
    ON CONFLICT (user_id) DO UPDATE SET last_sync = greatest(u.last_sync, excluded.last_sync);
    INSERT INTO presence_seen (user_id, daemon)
    SELECT c.user_id, presence_apply.daemon FROM unnest(users, online) AS c (user_id, online) WHERE c.online
    ON CONFLICT DO NOTHING;
    DELETE FROM presence_seen s USING unnest(users, online) AS c (user_id, online)
    WHERE s.user_id = c.user_id AND s.daemon = presence_apply.daemon AND NOT c.online;
    PERFORM presence_settle(users);
    RETURN true;
END
$$;
