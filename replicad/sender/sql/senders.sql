-- The senders of a source: their list, the senders that are running, and how far each sender has recorded a stream.

-- federation_source_key(source, sender): the second half of the advisory lock that a running sender of the source holds,
-- for its session. The first half is 1380992595. In the form of two integers it never meets the locks of streams.
CREATE OR REPLACE FUNCTION federation_source_key(source text, sender text) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT hashtext('federation_sender'::regclass::oid::text || ' '
        || source || ', ' || sender)  -- no name has a comma in it
$$;

-- federation_source_running(source): the senders of a source that are running, and how they share the destinations.
CREATE OR REPLACE FUNCTION federation_source_running(source text) RETURNS TABLE (name text, senders text[])
LANGUAGE sql STABLE AS $$
    SELECT DISTINCT s.name, s.senders
    FROM federation_sender s
    JOIN pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.classid = 1380992595
        AND l.objid::bigint = (federation_source_key(s.source, s.name)::bigint & 4294967295)
    WHERE s.source = federation_source_running.source
$$;

-- federation_source_enlist(source, sender, senders, streams): this session runs as `sender`, which is in the (sorted) list
-- `senders` of the source, until it ends. Where it cannot, `refusal` says in one sentence why, and `until` what may change
-- that: 'gone', the end of another sender, which leaves the place free; 'list', the end of senders that have another list.
-- Where the list of senders is a new one, destinations change hands: every sender then goes on behind the lowest token that
-- any sender has recorded, in the first of their generations: the history that this generation shares with the present, the
-- others share too. Writes federation_sender, and for that all tables.
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

-- federation_source_begin(source, stream, token): where nothing was recorded of a stream yet, all senders of the source
-- begin behind `token`; the token of the first sender counts. Writes federation_sender.
CREATE OR REPLACE FUNCTION federation_source_begin(source text, stream text, token bigint) RETURNS void
LANGUAGE sql AS $$
    UPDATE federation_sender s SET token = federation_source_begin.token
    WHERE s.source = federation_source_begin.source AND s.stream = federation_source_begin.stream
        AND s.token IS NULL
$$;

-- federation_source_recorded(sender, stream): the token up to which every sender of that name has recorded a stream,
-- whatever its source: several senders may read one stream of updates, and acknowledge it under their common name. NULL: no
-- sender has begun.
CREATE OR REPLACE FUNCTION federation_source_recorded(sender text, stream text) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT min(s.token) FROM federation_sender s
    WHERE s.name = federation_source_recorded.sender AND s.stream = federation_source_recorded.stream
$$;
