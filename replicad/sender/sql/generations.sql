-- Senders after a fork of the history of a stream: facts that they take back, and how they follow the new generation.

-- federation_source_rewind(source, sender, stream, token, names): the stream goes on behind `token`, which lies before the
-- recorded token: after a reset, or because an operator asked for it. The records of later facts are removed, also the
-- records that destinations have taken them: all facts that the stream has behind `token` are delivered to them. A
-- transaction under way is kept where federation_source_kept says so. A trial that is kept is an ordinary transaction from
-- then on: facts that were refused before it, and are not void, are outstanding. Only for the destinations in `names`.
-- Returns how many facts were outstanding. Writes federation_sender, federation_destination, federation_destination_room,
-- federation_fact.
CREATE OR REPLACE FUNCTION federation_source_rewind(source text, sender text, stream text, token bigint, names text[])
RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    dropped bigint;
BEGIN
    UPDATE federation_destination d SET  -- repeated with its id and bodies; it says nothing about facts above `token`
        txn_pdus = (SELECT t.pdus FROM federation_source_transaction(d.source, d.name) t),
        txn_part = CASE WHEN d.txn_aside IS NULL OR d.last_successful_stream_ordering > federation_source_rewind.token
            THEN 2147483647 ELSE d.last_successful_part END,
        txn_stream_ordering = CASE WHEN d.txn_aside IS NULL THEN federation_source_rewind.token
            ELSE least(d.last_successful_stream_ordering, federation_source_rewind.token) END,
        txn_aside = NULL
    WHERE d.source = federation_source_rewind.source AND d.name = ANY (names)
        AND d.txn_stream_ordering > federation_source_rewind.token
        AND federation_source_kept(d.source, d.name, federation_source_rewind.token);
    UPDATE federation_destination d SET
        last_successful_stream_ordering = least(d.last_successful_stream_ordering, federation_source_rewind.token),
        last_successful_part = CASE WHEN d.last_successful_stream_ordering > federation_source_rewind.token THEN 2147483647
            ELSE d.last_successful_part END
    WHERE d.source = federation_source_rewind.source AND d.name = ANY (names)
        AND d.last_successful_stream_ordering > federation_source_rewind.token;
    UPDATE federation_destination d SET
        txn_id = NULL, txn_ts = NULL, txn_stream_ordering = NULL, txn_part = NULL, txn_edus = NULL, txn_edu_ids = NULL,
        txn_pdus = NULL, txn_aside = NULL
    WHERE d.source = federation_source_rewind.source AND d.name = ANY (names)
        AND d.txn_stream_ordering > federation_source_rewind.token;
    DELETE FROM federation_destination_room r
    WHERE r.source = federation_source_rewind.source AND r.destination = ANY (names)
        AND r.stream_ordering > federation_source_rewind.token;
    GET DIAGNOSTICS dropped = ROW_COUNT;
    DELETE FROM federation_fact f
    WHERE f.source = federation_source_rewind.source AND f.stream_ordering > federation_source_rewind.token
        AND NOT EXISTS (SELECT FROM federation_destination_room r
                        WHERE r.source = f.source AND r.stream_ordering = f.stream_ordering AND r.part = f.part);
    UPDATE federation_sender s SET token = federation_source_rewind.token
    WHERE s.source = federation_source_rewind.source AND s.name = federation_source_rewind.sender
        AND s.stream = federation_source_rewind.stream;
    RETURN dropped;
END
$$;

-- federation_source_end_others(source, sender): ends the sessions of the other senders of the source that are running, and
-- waits until they have ended. They hold facts in memory that are void now, and would store and send them. Their next
-- sessions begin with the stored facts. The caller has locked federation_sender, so no session begins before. Raises 57014
-- where a session does not end. The senders of a source have one role of Postgres, or the role of this sender is a member
-- of their roles.
CREATE OR REPLACE FUNCTION federation_source_end_others(source text, sender text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    other record;
BEGIN
    FOR other IN
        SELECT DISTINCT s.name, l.pid
        FROM federation_sender s
        JOIN pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
            AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
            AND l.classid = 1380992595
            AND l.objid::bigint = (federation_source_key(s.source, s.name)::bigint & 4294967295)
        WHERE s.source = federation_source_end_others.source AND l.pid <> pg_backend_pid()
    LOOP
        IF NOT pg_terminate_backend(other.pid, 30000) AND EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = other.pid)
        THEN
            RAISE EXCEPTION 'the session of sender % (pid %) does not end', other.name, other.pid
                USING ERRCODE = '57014';
        END IF;
    END LOOP;
END
$$;

-- federation_source_fork(source, sender, token): the history of the stream of facts `source` above `token` is void. This
-- holds for all senders of the source, whether they run or not: ids are given out again, and the destinations of a sender
-- that kept its records would get other facts under the same ids. The sender whose session this is has noticed first. Facts
-- that were parked stay, and a fact of the same id may be parked beside them. Facts that were to be sent again are parked
-- again, and wanted. Returns how many facts were outstanding. Writes all tables of the part but federation_edu.
CREATE OR REPLACE FUNCTION federation_source_fork(source text, sender text, token bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    here text := source;
    fork bigint := token;
    dropped bigint;
BEGIN
    LOCK TABLE federation_sender IN SHARE ROW EXCLUSIVE MODE;
    PERFORM federation_source_end_others(here, sender);
    UPDATE federation_parked p SET part = NULL WHERE p.source = here AND p.stream_ordering > fork;
    INSERT INTO federation_parked (source, destination, stream_ordering, room, body, reason, wanted)
    SELECT here, r.destination, r.stream_ordering, r.room, f.body, 'the history forked before it was sent again', true
    FROM federation_destination_room r
    JOIN federation_fact f ON f.source = r.source AND f.stream_ordering = r.stream_ordering AND f.part = r.part
    LEFT JOIN federation_destination d ON d.source = r.source AND d.name = r.destination AND d.txn_id IS NOT NULL
        AND d.txn_aside IS NULL AND (r.stream_ordering, r.part) <= (d.txn_stream_ordering, d.txn_part)
        AND federation_source_kept(d.source, d.name, fork)
    WHERE r.source = here AND r.stream_ordering > fork AND r.part < 0  -- federation_source_replay gives such places
        AND d.name IS NULL  -- else it is in a transaction that is repeated
    ORDER BY r.stream_ordering, r.part;
    dropped := federation_source_rewind(here, sender, here, fork,
        ARRAY(SELECT d.name FROM federation_destination d WHERE d.source = here));
    UPDATE federation_sender s SET token = fork WHERE s.source = here AND s.stream = here AND s.token > fork;
    RETURN dropped;
END
$$;

-- federation_source_known(stream, epoch): raises 55000 unless `epoch` is a generation of the stream here. A daemon that has not
-- noticed yet that the database was restored to an earlier time speaks of generations that are not in it.
CREATE OR REPLACE FUNCTION federation_source_known(stream text, epoch text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM stream_generation g JOIN stream x ON x.number = g.stream
        WHERE x.name = federation_source_known.stream AND g.id = federation_source_known.epoch)
    THEN
        RAISE EXCEPTION 'generation % of stream % is not in this database', epoch, federation_source_known.stream
            USING ERRCODE = '55000', HINT = 'the daemon leads to another database than the sender, or is about to notice that '
                'the database was restored to an earlier time';
    END IF;
END
$$;

-- federation_source_follow(source, sender, stream, epoch): all facts that this sender has recorded of a stream belong to
-- the generation `epoch`, too. The same holds for senders of which no generation is known. Raises 55000 where the database
-- does not know the generation. Writes federation_sender.
CREATE OR REPLACE FUNCTION federation_source_follow(source text, sender text, stream text, epoch text) RETURNS void
LANGUAGE sql AS $$
    SELECT federation_source_known(federation_source_follow.stream, federation_source_follow.epoch);
    UPDATE federation_sender s SET epoch = federation_source_follow.epoch
    WHERE s.source = federation_source_follow.source AND s.stream = federation_source_follow.stream
        AND (s.name = federation_source_follow.sender OR s.epoch IS NULL)
$$;

-- federation_source_enter(source, sender, epoch): this sender reads the first facts of the generation `epoch`. The records
-- of the source belong to that generation too, for all its senders at once: facts above the fork are void and are removed,
-- and the other senders' sessions end, since they may be about to record more of it. The tokens alone do not show whether
-- there are such facts: after a change of the list the lowest token counts, and destinations may have got further. Returns
-- true if facts were removed: then the facts that this sender has in memory are void as well. Raises 55000 where the
-- database does not know the generation. Writes federation_sender; after a fork what federation_source_fork writes.
CREATE OR REPLACE FUNCTION federation_source_enter(source text, sender text, epoch text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    here text := source;
    present text := epoch;
    fork bigint;
    void boolean := false;
BEGIN
    PERFORM federation_source_known(here, present);
    LOCK TABLE federation_sender IN SHARE ROW EXCLUSIVE MODE;
    IF EXISTS (SELECT FROM federation_sender s WHERE s.source = here AND s.stream = here AND s.epoch <> present) THEN
        PERFORM federation_source_end_others(here, sender);
        SELECT min(g.began_at) INTO fork
        FROM federation_sender s
        JOIN stream x ON x.name = s.stream
        JOIN stream_generation h ON h.stream = x.number AND h.id = s.epoch
        JOIN stream_generation p ON p.stream = x.number AND p.id = present
        JOIN stream_generation g ON g.stream = x.number AND g.number > h.number AND g.number <= p.number
        WHERE s.source = here AND s.stream = here;
        void := EXISTS (SELECT FROM federation_sender s WHERE s.source = here AND s.stream = here AND s.token > fork)
            OR EXISTS (SELECT FROM federation_destination d WHERE d.source = here
                AND greatest(d.last_successful_stream_ordering, d.txn_stream_ordering) > fork)
            OR EXISTS (SELECT FROM federation_destination_room r WHERE r.source = here AND r.stream_ordering > fork);
        IF void THEN
            PERFORM federation_source_fork(here, sender, fork);
        END IF;
    END IF;
    UPDATE federation_sender s SET epoch = present WHERE s.source = here AND s.stream = here;
    RETURN void;
END
$$;
