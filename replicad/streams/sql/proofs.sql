-- Reservations as advisory locks of sessions, and the proof that a session may hold them (docs/positions.md).

-- stream_lock_key(number, bound, certified): the key of the shared advisory lock of a reservation. While it is held, an
-- id above the bound may still appear. Bits 48 and up: 0x5200 + the stream's number; below: the bound.
-- The certificate (0x3200 + number) lies beside a session's lock and means nothing to readers; see stream_reserve.
CREATE OR REPLACE FUNCTION stream_lock_key(number integer, bound bigint, certified boolean = false) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT ((CASE WHEN certified THEN 12800 ELSE 20992 END + number)::bigint << 48) | bound
$$;

-- A lock of a reservation counts only beside a *proof*, a second advisory lock of the same session or transaction. Any role
-- may take any advisory lock, and every role can read in pg_locks which ones others hold. So the key of the proof is made of
-- a secret, the stream and the holder: nobody can guess it, and a copy in another session proves nothing there.

-- stream_proof_key(number, holder): the key of a proof. Bits 48 and up: 0x1200 + the stream's number; below: the start of a
-- SHA-256. holder is `x` and the transaction's id, or `s`, the session's pid, a blank, and the oid of the role that it
-- logged in as; both can be seen of every session. The query horizon_holders computes the same. NULL if there is no secret.
CREATE OR REPLACE FUNCTION stream_proof_key(number integer, holder text) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$  -- and not sql: that would be planned anew for every transaction of a writer
DECLARE
    secret bytea;
BEGIN
    SELECT k.key INTO secret FROM stream_reservation_key k;
    RETURN ((4608 + number)::bigint << 48) | ('x' || encode(
        substr(sha256(secret || convert_to(number || ' ' || holder, 'UTF8')), 1, 6), 'hex'))::bit(48)::bigint;
END
$$;

-- stream_prove(number, lasting): takes the proof for this transaction, or (lasting) for this session. It is taken before
-- the lock of the bound, so that every session that sees that lock sees the proof too. False, with nothing taken, if
-- nothing shows that this session may write the stream. What shows it: its role may write the table or take ids, or the
-- session has already taken an id, as it can within a function of another owner; Postgres remembers that. It is decided
-- once: a right that is revoked later does not make a lock void under which rows were written. Runs with its owner's
-- rights; its owner needs SELECT on the sequence.
CREATE OR REPLACE FUNCTION stream_prove(number integer, lasting boolean = false) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER AS $$
DECLARE
    me name := current_setting('role');
    relation regclass;
    sequence regclass;
    secret bytea;
    holder text;
    place bigint;
BEGIN
    IF me = 'none' THEN
        me := session_user;
    END IF;
    SELECT s.relation, s.sequence, k.key INTO relation, sequence, secret
        FROM stream s LEFT JOIN stream_reservation_key k ON true WHERE s.number = stream_prove.number;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF secret IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'table stream_reservation_key is empty, so no id can be reserved',
            HINT = 'restore its row from a backup, or, when no writer is at work: INSERT INTO stream_reservation_key '
                'DEFAULT VALUES';
    END IF;
    IF has_sequence_privilege(me, sequence, 'USAGE, UPDATE') IS NOT TRUE
            AND has_any_column_privilege(me, relation, 'INSERT, UPDATE') IS NOT TRUE THEN
        BEGIN
            PERFORM currval(sequence);
        EXCEPTION WHEN object_not_in_prerequisite_state OR insufficient_privilege THEN
            RETURN false;
        END;
    END IF;
    IF lasting THEN
        holder := (SELECT 's' || a.pid::text || ' ' || a.usesysid::text FROM pg_stat_get_activity(pg_backend_pid()) a);
    ELSE
        holder := 'x' || pg_current_xact_id()::xid::text;
    END IF;
    place := ((4608 + number)::bigint << 48) | ('x' || encode(
        substr(sha256(secret || convert_to(number::text || ' ' || holder, 'UTF8')), 1, 6), 'hex'))::bit(48)::bigint;
    IF lasting THEN
        PERFORM pg_advisory_lock_shared(place);
    ELSE
        PERFORM pg_advisory_xact_lock_shared(place);
    END IF;
    RETURN true;
END
$$;

-- stream_prove_or_refuse(s, lasting): the same. If nothing shows the right yet, takes an id, which is not used. Raises 42501.
CREATE OR REPLACE FUNCTION stream_prove_or_refuse(s stream, lasting boolean = false) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF stream_prove(s.number, lasting) THEN
        RETURN;
    ELSIF has_sequence_privilege(s.sequence, 'USAGE, UPDATE') THEN
        PERFORM nextval(s.sequence);
        IF stream_prove(s.number, lasting) THEN
            RETURN;
        END IF;
    END IF;
    RAISE EXCEPTION USING ERRCODE = '42501',
        MESSAGE = format('role %I may not take ids of stream %s', current_user, s.name),
        HINT = format('run: GRANT USAGE ON SEQUENCE %s TO %I. The owner of replicad''s functions needs SELECT on it',
            s.sequence, current_user);
END
$$;

-- stream_unprove(number): lets go of a proof of this session (stream_complete).
CREATE OR REPLACE FUNCTION stream_unprove(number integer) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER AS $$
    SELECT pg_advisory_unlock_shared(stream_proof_key(number, (
        SELECT format('s%s %s', a.pid, a.usesysid) FROM pg_stat_get_activity(pg_backend_pid()) a)))
$$;

-- stream_held(number): the bounds that are held with a proof, and whether they have a certificate (stream_reserve): a session
-- that ends lets go of its locks one by one, so both must be the same session's. `session` is its application_name; NULL
-- for a prepared transaction, as pid is. While it is being prepared, some of its locks have a pid still: so these are known
-- by the virtual transaction. Runs with its owner's rights, since only these may know which proofs are genuine.
CREATE OR REPLACE FUNCTION stream_held(number integer)
RETURNS TABLE (pid integer, session text, bound bigint, certified boolean)
LANGUAGE sql VOLATILE SECURITY DEFINER AS $$
    WITH held AS MATERIALIZED (  -- one look at the lock table, which is a consistent one
        SELECT l.pid, l.virtualtransaction AS within, l.transactionid,
            (l.classid::bigint << 32) | l.objid::bigint AS key
        FROM pg_locks l
        WHERE l.granted AND (
            l.locktype = 'advisory' AND l.objsubid = 1 AND l.mode = 'ShareLock'
                AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
            OR l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock')
    ), reserved AS MATERIALIZED (
        SELECT h.* FROM held h
        WHERE h.key BETWEEN stream_lock_key(number, 0) AND stream_lock_key(number, 281474976710655)
    ), proven AS MATERIALIZED (
        SELECT p.within, p.pid FROM (
            SELECT h.within, NULL::integer AS pid, stream_proof_key(number, 'x' || h.transactionid) AS key
            FROM held h WHERE h.transactionid IS NOT NULL AND h.within IN (SELECT r.within FROM reserved r)
            UNION ALL
            SELECT NULL, r.pid, stream_proof_key(number, format('s%s %s', a.pid, a.usesysid))
            FROM (SELECT DISTINCT x.pid FROM reserved x) r, pg_stat_get_activity(r.pid) a
            WHERE r.pid IS NOT NULL
        ) p
        WHERE EXISTS (SELECT FROM held h WHERE h.key = p.key AND (h.within = p.within OR h.pid = p.pid))
    )
    SELECT r.pid, (SELECT a.application_name FROM pg_stat_get_activity(r.pid) a WHERE r.pid IS NOT NULL),
        r.key & 281474976710655,
        r.pid IS NOT NULL AND EXISTS (SELECT FROM held c WHERE c.pid = r.pid
            AND c.key = stream_lock_key(number, r.key & 281474976710655, true))
    FROM reserved r
    WHERE r.within IN (SELECT p.within FROM proven p WHERE p.within IS NOT NULL)
        OR r.pid IN (SELECT p.pid FROM proven p WHERE p.pid IS NOT NULL)
$$;

-- stream_holds_back(number, session, writer): whether the ids that a session of that application_name holds keep this
-- writer's position back: a session that is called after a known writer holds back that writer alone, any other session
-- holds back all writers.
CREATE OR REPLACE FUNCTION stream_holds_back(number integer, session text, writer text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT session = writer OR NOT EXISTS (
        SELECT FROM stream_writer w WHERE w.stream = stream_holds_back.number AND w.name = session)
$$;

-- stream_certified(number, upto, writer): the highest bound up to `upto` that is held with a certificate (stream_reserve)
-- by a session that holds this writer back: a session that is called after it, or after no known writer. NULL where there
-- is no such bound.
CREATE OR REPLACE FUNCTION stream_certified(number integer, upto bigint, writer text) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT max(h.bound) FROM stream_held(number) h
    WHERE h.certified AND h.bound <= upto AND stream_holds_back(number, h.session, writer)
$$;
