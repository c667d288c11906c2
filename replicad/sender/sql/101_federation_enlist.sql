-- federation_enlist(sender, senders, streams): this session becomes the one that runs as `sender`, one of `senders`
-- (sorted), until it ends. Returns NULL, or in one sentence why not. Where the list of senders is a new one,
-- destinations change hands: every sender then goes on behind the lowest token that any has recorded, in the first of
-- their generations: what that one shares with the present, the others share too. Writes federation_sender.
CREATE OR REPLACE FUNCTION federation_enlist(sender text, senders text[], streams text[]) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    other record;
BEGIN
    IF NOT pg_try_advisory_lock(1380992595, federation_key(sender)) THEN
        RETURN format('a sender named %s is running on this database already', sender);
    END IF;
    LOCK TABLE federation_sender IN SHARE ROW EXCLUSIVE MODE;  -- two that start look one after the other
    SELECT s.name, s.senders INTO other
    FROM federation_sender s
    JOIN pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.classid = 1380992595 AND l.objid::bigint = (federation_key(s.name)::bigint & 4294967295)
    WHERE s.name <> federation_enlist.sender AND s.senders <> federation_enlist.senders
    LIMIT 1;
    IF FOUND THEN
        RETURN format('sender %s is running and shares the destinations among %s, not among %s', other.name,
            array_to_string(other.senders, ', '), array_to_string(senders, ', '));
    END IF;
    IF EXISTS (SELECT FROM federation_sender s WHERE s.senders <> federation_enlist.senders) THEN
        INSERT INTO federation_sender AS mine (name, stream, token, senders, epoch)
        SELECT n, s.stream, min(s.token), federation_enlist.senders,
            (array_agg(s.epoch ORDER BY s.epoch IS NULL, g.number NULLS FIRST))[1]
        FROM federation_sender s
        LEFT JOIN stream x ON x.name = s.stream
        LEFT JOIN stream_generation g ON g.stream = x.number AND g.id = s.epoch
        CROSS JOIN unnest(federation_enlist.senders) n
        GROUP BY n, s.stream
        ON CONFLICT (name, stream)
            DO UPDATE SET token = excluded.token, senders = excluded.senders, epoch = excluded.epoch;
        DELETE FROM federation_sender s WHERE s.name <> ALL (federation_enlist.senders);
    END IF;
    INSERT INTO federation_sender (name, stream, senders)
    SELECT n, t, federation_enlist.senders
    FROM unnest(federation_enlist.senders) n CROSS JOIN unnest(federation_enlist.streams) t
    ON CONFLICT (name, stream) DO NOTHING;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION federation_enlist(text, text[], text[]) IS 'Makes this session the one that runs as a sender';
