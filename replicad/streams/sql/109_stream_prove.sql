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

-- stream_prove(number, lasting): takes the proof for this transaction, or (lasting) for this session. Before the lock of the
-- bound, so that whoever sees that one sees the proof too. False, with nothing taken, if nothing shows that this session may
-- write the stream. What shows it: its role may write the table or take ids, or the session has already taken an id, as it
-- can within a function of another owner; Postgres remembers that. It is decided once: what is revoked later does not make
-- a lock void under which rows were written. Runs with its owner's rights; its owner needs SELECT on the sequence.
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
