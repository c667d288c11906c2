-- Rows that are trimmed, tokens that senders have acknowledged, and ids that an operator takes out of a stream.

-- stream_retained(number, after): true; raises RS004 where rows above `after` were trimmed away. STABLE: inside the
-- reading statement it sees what the statement sees, so that a trim cannot slip in between.
CREATE OR REPLACE FUNCTION stream_retained(stream_number integer, after bigint) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s stream;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = stream_number;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'RS001', MESSAGE = 'the stream was removed', HINT = 'load the streams again';
    ELSIF after < s.trimmed_upto THEN
        RAISE EXCEPTION USING ERRCODE = 'RS004',
            MESSAGE = format('stream %s is retained from %s on, and %s is older', s.name, s.trimmed_upto, after),
            HINT = 'rows in between are gone; start from EARLIEST or NOW and load what you keep anew';
    END IF;
    RETURN true;
END
$$;

-- stream_trim_note(number, upto, finished): notes the id up to which a stream is trimmed, for roles that may delete from
-- its table; they need no right on our tables. Raises insufficient_privilege, and RS002 above the published position:
-- readers would get the error that rows are gone which they have yet to get. Writes stream, and stream_mark when it is
-- finished.
CREATE OR REPLACE FUNCTION stream_trim_note(stream_number integer, upto bigint, finished boolean) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF NOT (SELECT has_table_privilege(session_user, s.relation, 'DELETE') FROM stream s WHERE s.number = stream_number) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('role %I may not delete from the table of the stream', session_user);
    END IF;
    IF (upto <= (SELECT p.position FROM stream_position p WHERE p.stream = stream_number AND p.writer = 0)) IS NOT TRUE THEN
        PERFORM stream_refuse(format('rows up to %s were not published yet', upto), 'use stream_trim');
    END IF;
    UPDATE stream x SET trimmed_upto = greatest(x.trimmed_upto, upto) WHERE x.number = stream_number;
    IF finished THEN
        DELETE FROM stream_mark m WHERE m.stream = stream_number AND m.position < upto
            AND m.at < (SELECT max(x.at) FROM stream_mark x WHERE x.stream = stream_number AND x.position <= upto);
    END IF;
END
$$;

-- stream_trim(name, upto, batch): deletes the oldest rows with ids up to `upto`, about `batch` of them; call it until it
-- returns 0. The trimmed ids are noted first, so that a token below them is refused. Refuses (RS002) to delete rows that
-- were not published yet. Until its transaction ends, the stream's position waits, as for any other writer. A DELETE runs
-- the triggers of the table's owner, as the asking role. So the owner calls it himself, with a connection of his own, or a
-- superuser for a superuser's table; other roles are refused. Writes the stream's table, and by stream_trim_note stream and
-- stream_mark.
CREATE OR REPLACE FUNCTION stream_trim(name text, upto bigint, batch integer = 10000) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
    published bigint := (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
    step bigint;
    deleted bigint;
BEGIN
    IF published IS NULL OR upto > published THEN
        PERFORM stream_refuse(format('stream %s is published up to %s, so rows up to %s cannot be trimmed', s.name,
            coalesce(published::text, 'nothing'), upto), 'rows that no reader was sent must stay');
    END IF;
    IF stream_runs_as(s.relation) IS NOT NULL THEN
        PERFORM stream_refuse(format('to trim stream %s runs code of role %I, which owns %s, with the rights of %I', s.name,
            pg_get_userbyid(stream_runs_as(s.relation)), s.relation, current_user),
            format('connect as role %I, and trim again', pg_get_userbyid(stream_runs_as(s.relation))));
    END IF;
    EXECUTE format('SELECT max(id) FROM (SELECT t.%I FROM %s AS t WHERE t.%I <= $1 ORDER BY 1 LIMIT $2) oldest(id)',
        s.id_column, s.relation, s.id_column) INTO step USING upto, greatest(batch, 1);
    PERFORM stream_trim_note(s.number, coalesce(step, upto), step IS NULL);
    IF step IS NULL THEN
        RETURN 0;
    END IF;
    EXECUTE format('DELETE FROM %s AS t WHERE t.%I <= $1', s.relation, s.id_column) USING step;
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN deleted;
END
$$;
COMMENT ON FUNCTION stream_trim(text, bigint, integer) IS 'Deletes a batch of the oldest rows of a stream';

-- stream_ack_note(names, generations, instances, tokens): notes the tokens that senders have acknowledged (arrays of one
-- length, no sender of a stream twice); within a generation tokens only grow. Acks of a generation that is not the present
-- one, or of a stream that was removed, are passed over; so are new senders where a stream has a thousand. Writes
-- stream_ack.
CREATE OR REPLACE FUNCTION stream_ack_note(names text[], generations text[], instances text[], tokens bigint[])
RETURNS void
LANGUAGE sql AS $$
    INSERT INTO stream_ack AS a (stream, instance, token, generation, acked_at)
    SELECT s.number, n.instance, n.token, n.generation, clock_timestamp()
    FROM unnest(names, generations, instances, tokens) AS n (name, generation, instance, token)
    JOIN stream s ON s.name = n.name AND stream_epoch(s) = n.generation
    WHERE (SELECT count(*) FROM stream_ack o WHERE o.stream = s.number) < 1000
        OR EXISTS (SELECT FROM stream_ack o WHERE o.stream = s.number AND o.instance = n.instance)
    ORDER BY s.number, n.instance COLLATE "C"  -- in one order, so that two daemons do not wait for each other in a circle
    ON CONFLICT (stream, instance) DO UPDATE SET generation = excluded.generation, acked_at = excluded.acked_at,
        token = CASE WHEN a.generation = excluded.generation THEN greatest(a.token, excluded.token) ELSE excluded.token END
$$;

-- stream_acks(name): the known senders of a stream, and the token that each has acknowledged: senders that ever
-- acknowledged one, and senders that run as `replicad sender` on this database. token is NULL for a sender without an ack
-- in this generation. Raises RS001.
CREATE OR REPLACE FUNCTION stream_acks(name text, OUT instance text, OUT token bigint, OUT acked_at timestamptz)
RETURNS SETOF record
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s stream := stream_find(name);
    senders text[] := '{}';
BEGIN
    IF to_regclass('federation_sender') IS NOT NULL THEN
        EXECUTE 'SELECT coalesce(array_agg(f.name), ''{}'') FROM federation_sender f WHERE f.stream = $1'
            INTO senders USING s.name;
    END IF;
    RETURN QUERY
    SELECT n.instance, CASE WHEN a.generation = stream_epoch(s) THEN a.token END, a.acked_at
    FROM (SELECT o.instance FROM stream_ack o WHERE o.stream = s.number UNION SELECT unnest(senders)) n (instance)
    LEFT JOIN stream_ack a ON a.stream = s.number AND a.instance = n.instance
    ORDER BY 2 NULLS FIRST, 1;
END
$$;
COMMENT ON FUNCTION stream_acks(text) IS 'The senders of a stream, and what they have acknowledged';

-- stream_acked(name): the token up to which every known sender has acknowledged a stream, and which was published; NULL
-- where a sender has acknowledged nothing, or no sender is known. Raises RS001.
CREATE OR REPLACE FUNCTION stream_acked(name text) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT least(min(a.token), (SELECT p.position FROM stream_position p JOIN stream s ON s.number = p.stream
        WHERE s.name = stream_acked.name AND p.writer = 0))
    FROM stream_acks(stream_acked.name) a HAVING count(*) = count(a.token) AND count(*) > 0
$$;
COMMENT ON FUNCTION stream_acked(text) IS 'Up to where all senders have acknowledged a stream';

-- stream_ack_forget(name, instance): a sender that will not come back holds nothing back any more. Returns whether it was
-- known by an ack. Raises RS001. Writes stream_ack.
CREATE OR REPLACE FUNCTION stream_ack_forget(name text, instance text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    DELETE FROM stream_ack a WHERE a.stream = s.number AND a.instance = stream_ack_forget.instance;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION stream_ack_forget(text, text) IS 'Forgets a sender that will not come back';

-- stream_skip_id(name, id, reason): takes the rows with that id out of the stream: no reader is sent them from now on.
-- The row itself stays. Returns the id up to which the stream was published (NULL: not yet), so that the caller can say
-- whether readers may have been sent the row already. Repeating it keeps the first entry. Raises RS001. Writes
-- stream_skip.
CREATE OR REPLACE FUNCTION stream_skip_id(name text, id bigint, reason text) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    PERFORM stream_refuse(format('%s rows of stream %s are skipped already', count(*), s.name),
        'so many are no accident of single rows: mend the row expression')
    FROM stream_skip k WHERE k.stream = s.number HAVING count(*) >= 10000;
    INSERT INTO stream_skip (stream, id, reason) VALUES (s.number, stream_skip_id.id, coalesce(stream_skip_id.reason, ''))
    ON CONFLICT DO NOTHING;
    RETURN (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
END
$$;
COMMENT ON FUNCTION stream_skip_id(text, bigint, text) IS 'Takes one id out of a stream';

-- stream_skip_undo(name, id): the rows with that id belong to the stream again; false where they were not skipped.
-- Readers that are past the id are not sent them. Raises RS001. Writes stream_skip.
CREATE OR REPLACE FUNCTION stream_skip_undo(name text, id bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    DELETE FROM stream_skip k WHERE k.stream = s.number AND k.id = stream_skip_undo.id;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION stream_skip_undo(text, bigint) IS 'Takes a skipped id back into a stream';

-- stream_skips(name): the ids that were taken out of a stream, ascending: by whom, when and why. Raises RS001.
CREATE OR REPLACE FUNCTION stream_skips(name text) RETURNS SETOF stream_skip
LANGUAGE sql STABLE AS $$
    SELECT k.* FROM stream_find(name) s JOIN stream_skip k ON k.stream = s.number ORDER BY k.id
$$;
COMMENT ON FUNCTION stream_skips(text) IS 'The ids that were taken out of a stream';
