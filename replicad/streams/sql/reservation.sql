-- Reserved ids: how writers take them, and the guard that lets no other id into the table.

-- stream_guard_build(s): the trigger function that guards one reserved stream: an id that is inserted, or written by an
-- UPDATE, must be above the bound that its transaction holds. One function per stream, since only then can the id be
-- read without a detour; the condition is in here, for a WHEN clause would be prepared anew for every statement. Writes
-- stream_guard_N(). The installation builds them all anew, so that they follow this template. So the function belongs to
-- the owner of this schema, whoever adds the stream.
CREATE OR REPLACE FUNCTION stream_guard_build(s stream) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    keeper name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n WHERE n.nspname = current_schema());
BEGIN
    EXECUTE format($template$
        CREATE OR REPLACE FUNCTION %1$I.stream_guard_%2$s() RETURNS trigger LANGUAGE plpgsql AS $guard$
        DECLARE
            held text := current_setting(%3$L, true);
        BEGIN
            IF split_part(held, ':', 1) = 'p' || pg_current_xact_id()::text AND NEW.%4$I > split_part(held, ':', 2)::bigint THEN
                RETURN NULL;
            END IF;
            IF TG_OP = 'INSERT' OR NEW.%4$I IS DISTINCT FROM OLD.%4$I THEN
                PERFORM %1$I.stream_adopt(%2$s, %3$L, NEW.%4$I, %5$s);
            END IF;
            RETURN NULL;
        END
        $guard$
        $template$, current_schema(), s.number, s.setting, s.id_column,
        CASE WHEN s.instance_column IS NULL THEN '''master'''
            ELSE format('%I.stream_instance(NEW.%I::text)', current_schema(), s.instance_column) END);
    IF keeper !~ '^pg_' AND pg_has_role(keeper, 'MEMBER') THEN
        EXECUTE format('ALTER FUNCTION stream_guard_%s() OWNER TO %I', s.number, keeper);
    END IF;
END
$$;

-- stream_guard_attach(s): puts the guard of a reserved stream on its table. AFTER, because it then sees the id as it is
-- stored and leaves bulk COPY fast. Writes triggers: partitions get theirs from Postgres, heirs from here.
CREATE OR REPLACE FUNCTION stream_guard_attach(s stream) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    member regclass;
BEGIN
    PERFORM stream_guard_build(s);
    FOR member IN SELECT t FROM stream_tables(s.relation) t JOIN pg_class c ON c.oid = t
        WHERE NOT c.relispartition OR t = s.relation
    LOOP
        EXECUTE format('CREATE OR REPLACE TRIGGER replicad_guard_%s AFTER INSERT OR UPDATE OF %I ON %s FOR EACH ROW'
            ' EXECUTE FUNCTION stream_guard_%s()', s.number, s.id_column, member, s.number);
    END LOOP;
END
$$;

-- stream_guard_detach(number): drops these triggers, on whichever tables they are.
CREATE OR REPLACE FUNCTION stream_guard_detach(number integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    member regclass;
BEGIN
    FOR member IN SELECT t.tgrelid FROM pg_trigger t
        WHERE t.tgname = 'replicad_guard_' || number AND t.tgparentid = 0
            AND t.tgfoid = to_regprocedure(format('stream_guard_%s()', number))
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', 'replicad_guard_' || number, member);
    END LOOP;
END
$$;

-- stream_check_count(n): refuses a number of ids that is not between 1 and 10,000: an array is kept in memory.
CREATE OR REPLACE FUNCTION stream_check_count(n integer) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF n IS NULL OR n NOT BETWEEN 1 AND 10000 THEN
        PERFORM stream_refuse(format('cannot reserve %s ids at once', n), 'ask for 1 to 10000');
    END IF;
END
$$;

-- stream_find_reserved(name): the registry's row of a stream whose ids are reserved. Raises RS001, RS002.
CREATE OR REPLACE FUNCTION stream_find_reserved(name text) RETURNS stream
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    IF s.method <> 'reservation' THEN
        PERFORM stream_refuse(format('the ids of stream %s are not reserved (its method is %s)', s.name, s.method),
            'insert with the default of the id column, or add the stream anew with the method reservation');
    END IF;
    RETURN s;
END
$$;

-- stream_next(stream): reserves an id until this transaction ends, and returns it. Any statement of the transaction may
-- insert it; an id that is not used does no harm. Raises RS001, RS002, and 42501 without a right to write.
--
-- The transaction holds a proof (stream_prove) and a bound first and takes ids afterwards. They are remembered in a
-- transaction-local setting, as `p` with the transaction's id, a colon, and a number: that reverts with a savepoint, as the
-- locks do, and a stray SET does not pass for it. The number is the first id less one, not the bound of the lock: while
-- this session waited between reading that bound and taking the lock, ids above it can have been taken by others and
-- published (specs/Reservation.tla). All in one function and few expressions, since every writer pays for it.
CREATE OR REPLACE FUNCTION stream_next(stream text) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s stream;
    xid text := 'p' || pg_current_xact_id()::text;
    held text;
    bound bigint;
    id bigint;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.name = stream_next.stream;
    IF s.method IS DISTINCT FROM 'reservation' THEN
        PERFORM stream_find_reserved(stream);  -- raises
    END IF;
    held := current_setting(s.setting, true);
    IF split_part(held, ':', 1) = xid THEN
        bound := split_part(held, ':', 2);
    ELSE
        IF NOT stream_prove(s.number) THEN
            PERFORM stream_prove_or_refuse(s);
        END IF;
        bound := pg_sequence_last_value(s.sequence);
        IF bound IS NULL OR bound >> 48 <> 0 THEN
            bound := stream_last_value(s.sequence);
        END IF;
        PERFORM pg_advisory_xact_lock_shared(stream_lock_key(s.number, bound));
        held := NULL;
    END IF;
    id := nextval(s.sequence);
    IF id <= bound THEN
        PERFORM stream_refuse_step(s.sequence, id, bound);
    END IF;
    IF held IS NULL THEN
        PERFORM set_config(s.setting, xid || ':' || id - 1, true);
    END IF;
    RETURN id;
END
$$;
COMMENT ON FUNCTION stream_next(text) IS 'Reserves the next id of a stream for this transaction';

-- stream_next_mult(stream, n): as stream_next, n ids at once, ascending; 1 to 10,000. Raises RS001, RS002.
CREATE OR REPLACE FUNCTION stream_next_mult(stream text, n integer) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s stream := stream_find_reserved(stream);
BEGIN
    PERFORM stream_check_count(n);
    RETURN stream_next(stream) || ARRAY(SELECT nextval(s.sequence) FROM generate_series(2, n));
END
$$;
COMMENT ON FUNCTION stream_next_mult(text, integer) IS 'Reserves the next n ids of a stream for this transaction';

-- stream_reserve(stream, n, held): reserves n ids for this *session*, until stream_complete. For writers that keep a
-- connection for it; their rows may be inserted by any transaction of any session (stream_adopt) before that. `held` is
-- the bound that the session holds for this stream already, NULL where it holds none; one bound, the lowest, covers all
-- that is in flight. Returns the bound of these ids, which is the one held where `held` was NULL.
--
-- The bound that is kept is a certified one: no position above it was ever published while it is held. A bound that is read
-- and then locked may be stale when the lock is there, so it is locked hand over hand: lock the bound that was read, read
-- again, lock the new bound, release the first lock. The proof (stream_prove) is there before. Raises RS001, RS002, 42501;
-- a session in which it failed must be closed or reset.
CREATE OR REPLACE FUNCTION stream_reserve(
    stream text, n integer, held bigint = NULL, OUT number integer, OUT bound bigint, OUT ids bigint[]
)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s stream := stream_find_reserved(stream);
    first bigint := stream_last_value(s.sequence);
BEGIN
    PERFORM stream_check_count(n);
    number := s.number;
    bound := first;
    IF held IS NULL THEN
        PERFORM stream_prove_or_refuse(s, true);
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, first));
        bound := stream_last_value(s.sequence);
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, bound));
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, bound, true));
        PERFORM pg_advisory_unlock_shared(stream_lock_key(number, first));
    END IF;
    ids := ARRAY(SELECT nextval(s.sequence) FROM generate_series(1, n));
    IF ids[1] <= bound THEN
        PERFORM stream_refuse_step(s.sequence, ids[1], bound);
    END IF;
END
$$;
COMMENT ON FUNCTION stream_reserve(text, integer, bigint) IS 'Reserves ids for this session until stream_complete';

-- stream_adopt(number, setting, id, writer): makes this transaction responsible for an id that another session reserved, so
-- that it stays covered until the transaction ends even if that session ends before. Takes a bound below the id first and
-- looks for a certified one afterwards: while such a bound is held, no position above it was published; from then on the
-- lock of this transaction counts. Both must hold back the writer of the row. Called by the guard; a row without an id is
-- never sent and needs no cover. Raises 42501, and RS003 where the id is not covered, or would not be by this session.
CREATE OR REPLACE FUNCTION stream_adopt(number integer, setting text, id bigint, writer text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    xid text := 'p' || pg_current_xact_id()::text;
    me text := current_setting('application_name');
    bound bigint := id - 1;
    covered bigint;
    problem text := 'is not reserved (any more): readers may have passed it';
BEGIN
    IF id IS NULL THEN
        RETURN;
    END IF;
    IF NOT stream_holds_back(number, me, writer) THEN
        problem := format('is of writer %s, and this session is called %s', writer, me);
        bound := NULL;
    ELSIF split_part(current_setting(setting, true), ':', 1) = xid THEN
        -- Ids that come in falling order must not take a lock each: take the bound that covers more of them.
        bound := stream_certified(number, id - 1, writer);
    END IF;
    IF bound IS NOT NULL THEN
        PERFORM stream_prove_or_refuse(s) FROM stream s WHERE s.number = stream_adopt.number;
        PERFORM pg_advisory_xact_lock_shared(stream_lock_key(number, bound));
        covered := stream_certified(number, id - 1, writer);
        IF covered IS NOT NULL THEN
            -- What lies between our bound and theirs may be published already: the other session has moved on.
            PERFORM set_config(setting, xid || ':' || greatest(bound, covered), true);
            RETURN;
        END IF;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'RS003',
        MESSAGE = format('id %s of stream %s %s', id,
            (SELECT s.name FROM stream s WHERE s.number = stream_adopt.number), problem),
        HINT = 'take the id from stream_next() in the transaction that inserts it, or insert it as its writer, before that '
            'completes it';
END
$$;

-- stream_positions(stream): how far each known writer of a reserved stream has finished, now and without a daemon: the last
-- value first, the bounds that are held afterwards. A session that is not named after a known writer holds back all
-- writers. The row without a name is for all writers together. A crash of Postgres may take back ids that were not flushed
-- to disk; ids that a daemon has published are flushed. Raises RS001, RS002.
CREATE OR REPLACE FUNCTION stream_positions(stream text) RETURNS TABLE (writer text, "position" bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s stream := stream_find_reserved(stream);
    last bigint := stream_last_value(s.sequence);
BEGIN
    RETURN QUERY
    WITH held AS MATERIALIZED (
        SELECT x.session AS holder, x.bound FROM stream_held(s.number) x
    ), known AS (
        SELECT w.name FROM stream_writer w WHERE w.stream = s.number
    )
    SELECT k.name, least(last, (SELECT min(h.bound) FROM held h
        WHERE h.holder IS NULL OR stream_holds_back(s.number, h.holder, k.name)))
    FROM known k
    UNION ALL
    SELECT NULL, least(last, (SELECT min(h.bound) FROM held h));
END
$$;
COMMENT ON FUNCTION stream_positions(text) IS 'How far each writer of a reserved stream has finished, now';

-- stream_complete(number, held, next): ends the oldest ids of this session, whether rows came of them or not. It takes the
-- next bound, that of the oldest ids still in flight (NULL: there are none), and then releases the bound `held`. Returns
-- false where the session did not hold that bound (any more): then the ids were not protected.
CREATE OR REPLACE FUNCTION stream_complete(number integer, held bigint, next bigint = NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF next IS NOT NULL THEN
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, next));
        PERFORM pg_advisory_lock_shared(stream_lock_key(number, next, true));
    END IF;
    -- The certificate goes first: it must never outlive the lock that it speaks of.
    PERFORM pg_advisory_unlock_shared(stream_lock_key(number, held, true));
    IF NOT pg_advisory_unlock_shared(stream_lock_key(number, held)) THEN
        RETURN false;
    END IF;
    IF next IS NULL THEN
        PERFORM stream_unprove(number);
    END IF;
    RETURN true;
END
$$;
COMMENT ON FUNCTION stream_complete(integer, bigint, bigint) IS 'Ends the oldest reservation of this session';
