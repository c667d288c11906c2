-- presence_bury(daemon, beat, batch): clears up to `batch` users of a daemon that has given no sign of life since this
-- beat. From then on it may write nothing under that id. Returns how many they were, 0 when it is over; NULL where the
-- daemon lives, or is gone already. Writes presence_daemon, presence_seen, presence_user and presence_stream.
CREATE OR REPLACE FUNCTION presence_bury(daemon uuid, beat bigint, batch integer) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    users text[];
BEGIN
    UPDATE presence_daemon d SET buried = true
    WHERE d.id = presence_bury.daemon AND (d.buried OR d.beat = presence_bury.beat);
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    users := ARRAY(SELECT s.user_id FROM presence_seen s WHERE s.daemon = presence_bury.daemon
        ORDER BY s.user_id LIMIT batch);
    IF users = '{}' THEN
        DELETE FROM presence_daemon d WHERE d.id = presence_bury.daemon;
        RETURN 0;
    END IF;
    PERFORM FROM presence_user u WHERE u.user_id = ANY (users) ORDER BY u.user_id FOR UPDATE;
    DELETE FROM presence_seen s WHERE s.daemon = presence_bury.daemon AND s.user_id = ANY (users);
    PERFORM presence_settle(users);
    RETURN cardinality(users);
END
$$;
