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

-- stream_keep_rules(name, keep_for, keep_rows): from now on daemons remove rows that were published longer ago than
-- `keep_for` and are not among the `keep_rows` newest; NULL: no such rule, and with two NULLs all rows stay. Raises RS001, RS007, and
-- RS002 where the table has code that a removal would run. Writes stream; makes the function of the table's owner.
CREATE OR REPLACE FUNCTION stream_keep_rules(name text, keep_for interval, keep_rows bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    IF keep_for <= '0' OR keep_rows <= 0 THEN
        PERFORM stream_refuse_argument('rows cannot be kept for no time, or none of them', 'give a time or a number above 0');
    END IF;
    IF keep_for IS NOT NULL OR keep_rows IS NOT NULL THEN
        PERFORM stream_trimmer_ensure(s.relation);
        PERFORM stream_refuse(stream_trim_fault(s.relation), format('let the owner of the table remove rows: replicad streams trim %s',
            stream_shell(s.name))) WHERE stream_trim_fault(s.relation) IS NOT NULL;
    END IF;
    UPDATE stream x SET keep_for = stream_keep_rules.keep_for, keep_rows = stream_keep_rules.keep_rows WHERE x.number = s.number;
END
$$;
COMMENT ON FUNCTION stream_keep_rules(text, interval, bigint) IS 'Sets how long, or how many of, the rows of a stream are kept';

-- stream_trim_fault(tbl): why a daemon does not remove rows of a table: code of the table's owner would run in its session. NULL: it may.
CREATE OR REPLACE FUNCTION stream_trim_fault(tbl regclass) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('removing rows of %s runs code that belongs to its owner: %s', tbl, what)
    FROM (
        SELECT format('trigger %I of %s', g.tgname, g.tgrelid::regclass) AS what
        FROM stream_tables(tbl) t JOIN pg_trigger g ON g.tgrelid = t
        WHERE NOT g.tgisinternal AND g.tgtype & 8 <> 0 AND g.tgenabled <> 'D'
        UNION ALL
        SELECT format('foreign key %I of %s', k.conname, k.conrelid::regclass)
        FROM stream_tables(tbl) t JOIN pg_constraint k ON k.confrelid = t
        WHERE k.contype = 'f' AND k.confdeltype IN ('c', 'n', 'd')
        UNION ALL
        SELECT format('rule %I of %s', r.rulename, r.ev_class::regclass)
        FROM stream_tables(tbl) t JOIN pg_rewrite r ON r.ev_class = t WHERE r.ev_type = '4'
    ) code
    ORDER BY 1 LIMIT 1
$$;

-- stream_trimmer(owner): the function that removes rows as this role, with its schema (stream_trimmer_ensure); NULL where there is none.
CREATE OR REPLACE FUNCTION stream_trimmer(owner oid) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('%I.%I', current_schema(), p.proname)
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname = current_schema() AND p.proowner = owner AND p.proname ~ '^trimmer_1_[0-9a-f]{32}$'
        AND has_function_privilege(p.oid, 'EXECUTE')
    LIMIT 1
$$;

-- stream_trimmer_ensure(tbl): makes the function that removes rows as the owner of this table, if it is needed and absent. It deletes
-- rows up to an id, or drops a partition, and does neither where code of the owner would run (stream_trim_fault): a deferred
-- trigger would run at the end of the transaction, as the session's role. Raises RS002 where the asking role may not make it.
CREATE OR REPLACE FUNCTION stream_trimmer_ensure(tbl regclass) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    owner oid := stream_runs_as(tbl);
    role name := pg_get_userbyid(owner);
    home name := current_schema();
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = home);
    signature text;
    granted boolean;
BEGIN
    IF owner IS NULL OR stream_trimmer(owner) IS NOT NULL THEN
        RETURN;
    END IF;
    signature := format('%I.%I(oid, name, bigint, oid)', home, 'trimmer_1_' || md5(role));
    granted := has_schema_privilege(owner, home, 'CREATE');
    EXECUTE format('DROP FUNCTION IF EXISTS %s', signature);
    EXECUTE format('CREATE FUNCTION %I.%I(tbl oid, id_column name, upto bigint, part oid) RETURNS bigint'
        ' LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS %L', home, 'trimmer_1_' || md5(role), $body$
        DECLARE
            guarded boolean := false;
            removed bigint;
        BEGIN
            BEGIN
                PERFORM pg_catalog.set_config('role', 'none', true);
            EXCEPTION WHEN insufficient_privilege THEN
                guarded := true;
            END;
            IF NOT guarded OR current_user <> (SELECT pg_catalog.pg_get_userbyid(c.relowner) FROM pg_catalog.pg_class c
                    WHERE c.oid = tbl) THEN
                RAISE EXCEPTION USING ERRCODE = 'RS006', MESSAGE = 'the table changed its owner, or its trimmer was altered',
                    HINT = 'drop the function and set the rules anew';
            END IF;
            IF part IS NOT NULL THEN
                EXECUTE pg_catalog.format('DROP TABLE %s', part::pg_catalog.regclass);
                RETURN 0;
            END IF;
            EXECUTE pg_catalog.format('DELETE FROM %s AS t WHERE t.%I <= $1', tbl::pg_catalog.regclass, id_column) USING upto;
            GET DIAGNOSTICS removed = ROW_COUNT;
            RETURN removed;
        END
        $body$);
    EXECUTE format('COMMENT ON FUNCTION %s IS %L', signature, format('replicad: removes old rows of tables of %I as %1$I', role));
    EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', signature);
    IF NOT granted THEN
        EXECUTE format('GRANT CREATE ON SCHEMA %I TO %I', home, role);  -- no other session sees it
    END IF;
    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', signature, role);
    IF NOT granted THEN
        EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM %I', home, role);
    END IF;
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', signature, keeper);
EXCEPTION WHEN insufficient_privilege THEN
    PERFORM stream_refuse(SQLERRM, format('run: GRANT %I TO %I', role, keeper));
END
$$;

-- stream_keep_upto(s): the id up to which the rules of a stream let rows go; NULL where they let none go. A row goes only if each
-- rule lets it go, if it was published, and if each known sender has acknowledged it (stream_acks).
CREATE OR REPLACE FUNCTION stream_keep_upto(s stream) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    published bigint := (SELECT p.position FROM stream_position p WHERE p.stream = s.number AND p.writer = 0);
    upto bigint := published;
    beyond text;
BEGIN
    IF s.keep_for IS NOT NULL THEN
        upto := CASE WHEN upto IS NOT NULL THEN least(upto, stream_position_at(s.name, clock_timestamp() - s.keep_for)) END;
        IF stream_position_at(s.name, clock_timestamp() - s.keep_for) IS NULL THEN
            RETURN NULL;
        END IF;
    END IF;
    IF EXISTS (SELECT FROM stream_acks(s.name)) THEN
        IF (SELECT count(*) > count(a.token) FROM stream_acks(s.name) a) THEN
            RETURN NULL;
        END IF;
        upto := least(upto, (SELECT min(a.token) FROM stream_acks(s.name) a));
    END IF;
    IF s.keep_rows IS NOT NULL AND upto IS NOT NULL THEN
        SELECT r INTO beyond FROM stream_as_owner(s.relation, format('SELECT t.%1$I::text FROM %2$s AS t WHERE t.%1$I <= %3$s'
            ' ORDER BY t.%1$I DESC OFFSET %4$s LIMIT 1', s.id_column, stream_qualified(s.relation), published, s.keep_rows)) r;
        upto := CASE WHEN beyond IS NOT NULL THEN least(upto, beyond::bigint) END;
    END IF;
    RETURN upto;
END
$$;

-- stream_change_rest_trim(s, upto): empties change_N_rest, which takes changes that no partition is made for, if all its changes may go. Without
-- it they would stay for ever, since single rows are removed only before the first partition is full. Does nothing for other streams, and
-- where its lock is not free within 0.1 s. Writes that table, and by stream_trim_note stream.
CREATE OR REPLACE FUNCTION stream_change_rest_trim(s stream, upto bigint) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '100ms' AS $$
DECLARE
    rest text := format('change_%s_rest', s.number);
    last bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM stream_changes c WHERE c.stream = s.number) THEN
        RETURN;
    END IF;
    EXECUTE format('SELECT max(r.id) FROM %I r', rest) INTO last;
    IF last <= upto THEN
        EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', rest);
        EXECUTE format('SELECT max(r.id) FROM %I r', rest) INTO last;  -- a writer may have had the lock
        IF last <= upto THEN
            PERFORM stream_trim_note(s.number, last, false);
            EXECUTE format('TRUNCATE %I', rest);
        END IF;
    END IF;
EXCEPTION WHEN lock_not_available THEN
    NULL;  -- the next call tries again
END
$$;

-- stream_trim_kept(name, batch): removes a bounded piece of what the rules of a stream let go: whole partitions, whose range of ids has
-- passed, or about `batch` rows. Of a stream of changes single rows go only where the partition may last for long. A partition waits
-- for its lock no longer than writers may wait; the next call tries again. Returns how many partitions and rows; 0 and 0 where nothing is left to do, or another session is at it.
-- The trimmed ids are noted first, so that a token below them is refused. Raises RS001, and RS002 where code of the owner would run.
-- Writes the stream's table, and by stream_trim_note stream and stream_mark.
CREATE OR REPLACE FUNCTION stream_trim_kept(name text, batch integer, OUT partitions bigint, OUT removed bigint)
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
    owner oid := stream_runs_as(s.relation);
    upto bigint;
    step text;
    part record;
    patience text := current_setting('lock_timeout');
BEGIN
    partitions := 0;
    removed := 0;
    IF (s.keep_for IS NULL AND s.keep_rows IS NULL) OR NOT pg_try_advisory_xact_lock(hashtext('replicad keep'), s.number) THEN
        RETURN;
    END IF;
    upto := stream_keep_upto(s);
    IF upto IS NULL THEN
        RETURN;
    END IF;
    EXECUTE format('LOCK TABLE %s IN ROW EXCLUSIVE MODE', stream_qualified(s.relation)) ;  -- from here on nobody adds a trigger
    PERFORM stream_refuse(stream_trim_fault(s.relation), format('let the owner of the table remove rows: replicad streams trim %s',
        stream_shell(s.name))) WHERE stream_trim_fault(s.relation) IS NOT NULL;
    PERFORM stream_trimmer_ensure(s.relation);  -- the table may have another owner since the rules were set
    FOR part IN
        SELECT c.oid, (regexp_match(pg_get_expr(c.relpartbound, c.oid), '^FOR VALUES FROM \(''?[^'',]*''?\) TO \(''?(-?[0-9]+)''?\)'))[1]::bigint - 1
            AS last
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_partitioned_table p ON p.partrelid = i.inhparent
        JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
        WHERE i.inhparent = s.relation AND p.partstrat = 'r' AND p.partnatts = 1 AND a.attname = s.id_column
        ORDER BY 2
    LOOP
        CONTINUE WHEN part.last IS NULL OR part.last > upto;
        BEGIN
            PERFORM set_config('lock_timeout', '100ms', true);
            PERFORM stream_trim_note(s.number, part.last, false);
            IF owner IS NULL THEN
                EXECUTE format('DROP TABLE %s', stream_qualified(part.oid));
            ELSE
                EXECUTE format('SELECT %s($1, $2, 0, $3)', stream_trimmer(owner)) USING s.relation::oid, s.id_column, part.oid;
            END IF;
            PERFORM set_config('lock_timeout', patience, true);
        EXCEPTION WHEN lock_not_available THEN
            RETURN;  -- the block is undone, its setting too
        END;
        partitions := partitions + 1;
    END LOOP;
    PERFORM stream_change_rest_trim(s, upto);
    IF partitions > 0 OR EXISTS (
            SELECT FROM stream_changes c JOIN stream_change_parts(c.stream) p ON p.last <= pg_sequence_last_value(s.sequence)
            WHERE c.stream = s.number) THEN
        RETURN;
    END IF;
    SELECT r INTO step FROM stream_as_owner(s.relation, format('SELECT max(id)::text FROM (SELECT t.%1$I FROM %2$s AS t'
        ' WHERE t.%1$I <= %3$s ORDER BY 1 LIMIT %4$s) oldest (id)', s.id_column, stream_qualified(s.relation), upto, greatest(batch, 1))) r;
    IF step IS NULL THEN
        RETURN;
    END IF;
    PERFORM stream_trim_note(s.number, step::bigint, true);
    IF owner IS NULL THEN
        EXECUTE format('DELETE FROM %s AS t WHERE t.%I <= $1', stream_qualified(s.relation), s.id_column) USING step::bigint;
        GET DIAGNOSTICS removed = ROW_COUNT;
    ELSE
        EXECUTE format('SELECT %s($1, $2, $3, NULL)', stream_trimmer(owner)) INTO removed
            USING s.relation::oid, s.id_column, step::bigint;
    END IF;
END
$$;

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
