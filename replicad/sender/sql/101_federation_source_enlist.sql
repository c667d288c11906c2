-- federation_source_enlist(source, sender, senders, streams): this session becomes the one that runs as `sender`, one of
-- `senders` (sorted) of the source, until it ends. Where it cannot, `refusal` says in one sentence why, and `until` what
-- may change that: 'gone', the end of another sender, which leaves the place free; 'list', the end of senders that have
-- another list. Where the list of senders is a new one, destinations change hands: every
-- sender then goes on behind the lowest token that any has recorded, in the first of their generations: what that one
-- shares with the present, the others share too. Writes federation_sender, and for that all tables.
CREATE OR REPLACE FUNCTION federation_source_enlist(source text, sender text, senders text[], streams text[],
    OUT refusal text, OUT until text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    other record;
BEGIN
    IF NOT pg_try_advisory_lock(1380992595, federation_source_key(federation_source_enlist.source, sender)) THEN
        refusal := format('a sender named %s is running on this database already', sender);
        until := 'gone';
        RETURN;
    END IF;
    LOCK TABLE federation_sender IN SHARE ROW EXCLUSIVE MODE;  -- two that start look one after the other
    SELECT r.* INTO other FROM federation_source_running(federation_source_enlist.source) r
    WHERE r.name <> federation_source_enlist.sender AND r.senders <> federation_source_enlist.senders
    LIMIT 1;
    IF FOUND THEN
        refusal := format('sender %s is running and shares the destinations among %s, not among %s', other.name,
            array_to_string(other.senders, ', '), array_to_string(federation_source_enlist.senders, ', '));
        until := 'list';
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM federation_sender s
        WHERE s.source = federation_source_enlist.source AND s.senders <> federation_source_enlist.senders)
    THEN
        INSERT INTO federation_sender AS mine (source, name, stream, token, senders, epoch)
        SELECT federation_source_enlist.source, n, s.stream, min(s.token), federation_source_enlist.senders,
            (array_agg(s.epoch ORDER BY s.epoch IS NULL, g.number NULLS FIRST))[1]
        FROM federation_sender s
        LEFT JOIN stream x ON x.name = s.stream
        LEFT JOIN stream_generation g ON g.stream = x.number AND g.id = s.epoch
        CROSS JOIN unnest(federation_source_enlist.senders) n
        WHERE s.source = federation_source_enlist.source
        GROUP BY n, s.stream
        ON CONFLICT (source, name, stream)
            DO UPDATE SET token = excluded.token, senders = excluded.senders, epoch = excluded.epoch;
        DELETE FROM federation_sender s
        WHERE s.source = federation_source_enlist.source AND s.name <> ALL (federation_source_enlist.senders);
    END IF;
    INSERT INTO federation_sender (source, name, stream, senders)
    SELECT federation_source_enlist.source, n, t, federation_source_enlist.senders
    FROM unnest(federation_source_enlist.senders) n CROSS JOIN unnest(streams) t
    ON CONFLICT (source, name, stream) DO NOTHING;
END
$$;
