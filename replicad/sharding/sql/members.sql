-- Writers that share the keys of a stream: the tables, and how a writer joins, beats and leaves (docs/leases.md).

-- writer_sharding: the streams whose writers share the keys among themselves. Written by writer_enable and writer_disable;
-- `version` by every function that changes the members or the owner of a slot. writer_term_seq numbers terms, beats and
-- versions alike: no number is ever seen twice, so that a changed beat proves a living writer without any clock, and an old
-- term fits nothing.
CREATE SEQUENCE IF NOT EXISTS writer_term_seq;
COMMENT ON SEQUENCE writer_term_seq IS 'replicad: terms and beats of writers that share a stream';

CREATE TABLE IF NOT EXISTS writer_sharding (
    stream smallint PRIMARY KEY REFERENCES stream ON DELETE CASCADE,
    slots integer NOT NULL CHECK (slots BETWEEN 1 AND 4096),  -- a key's slot depends on it: chosen once
    version bigint NOT NULL DEFAULT nextval('writer_term_seq')
);
COMMENT ON TABLE writer_sharding IS 'replicad: streams whose writers share the keys; use writer_enable()';

-- writer_member: the writers that there are. Written by writer_join, _beat, _retire, _leave and _expel.
CREATE TABLE IF NOT EXISTS writer_member (
    stream smallint NOT NULL REFERENCES writer_sharding ON DELETE CASCADE,
    instance text COLLATE "C" NOT NULL,
    term bigint NOT NULL,                     -- of this membership; slots of an older one are nobody's
    beat bigint NOT NULL,                     -- changes with every sign of life
    ttl interval NOT NULL,                    -- unchanged for this long on the watcher's own clock: dead
    address text,                             -- where the application sends what belongs to this writer
    leaving boolean NOT NULL DEFAULT false,   -- gives back what it has and gets nothing more
    joined_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    beat_at timestamptz NOT NULL DEFAULT clock_timestamp(),  -- for people; nothing is decided by it
    PRIMARY KEY (stream, instance)
) WITH (fillfactor = 50);                     -- updated in place, again and again
COMMENT ON TABLE writer_member IS 'replicad: writers that share a stream, and their signs of life';

-- writer_slot: the owner of each slot. Written by writer_enable, writer_take and writer_give. A slot is free where its owner is not a
-- member, or became a member again after the slot's term. A session that writes keys of the slot holds its lock shared
-- (writer_lock_key) until its transaction ends; a session that changes the row holds that lock alone.
CREATE TABLE IF NOT EXISTS writer_slot (
    stream smallint NOT NULL REFERENCES writer_sharding ON DELETE CASCADE,
    slot integer NOT NULL CHECK (slot >= 0),
    owner text COLLATE "C",                   -- NULL: never owned
    term bigint NOT NULL,                     -- of this ownership
    moved_at timestamptz NOT NULL DEFAULT clock_timestamp(),  -- for people
    PRIMARY KEY (stream, slot)
) WITH (fillfactor = 50);
COMMENT ON TABLE writer_slot IS 'replicad: which writer owns which slot of a stream''s keys, fenced by the term';

-- writer_slot_of(key, slots): the slot of a key: the first four bytes of the SHA-256 of its UTF-8, as a number, modulo the
-- slots. It does not use the hash functions of Postgres, which may change with a version. Writes nothing.
CREATE OR REPLACE FUNCTION writer_slot_of(key text, slots integer) RETURNS integer
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT (('x' || encode(substr(sha256(convert_to(key, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint % slots)::integer
$$;

-- writer_lock_key(stream, slot): the second half of the advisory lock of a slot; the first half is 1380992591. In the
-- form of two integers it never meets the locks of streams.
CREATE OR REPLACE FUNCTION writer_lock_key(stream integer, slot integer) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT stream * 65536 + slot
$$;

-- writer_refuse(code, message, hint): raises that SQLSTATE. Writes nothing.
CREATE OR REPLACE FUNCTION writer_refuse(code text, message text, hint text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint;
END
$$;

-- writer_find(stream): how the keys of a stream are shared. Raises RS001, and RS002 where they are not. Writes nothing.
CREATE OR REPLACE FUNCTION writer_find(stream text) RETURNS writer_sharding
LANGUAGE plpgsql STABLE AS $$
DECLARE
    found_sharding writer_sharding;
BEGIN
    SELECT w.* INTO found_sharding FROM writer_sharding w JOIN stream s ON s.number = w.stream
        WHERE s.name = writer_find.stream;
    IF NOT FOUND THEN
        PERFORM stream_find(stream);
        PERFORM writer_refuse('RS002', format('the writers of stream %L do not share its keys', stream),
            format('run `replicad sharding enable %s`, or: SELECT %I.writer_enable(%L)', stream, current_schema(), stream));
    END IF;
    RETURN found_sharding;
END
$$;

-- writer_find_own(stream): as writer_find, for a caller that may be a writer of the stream. Raises 42501 unless this
-- session's role may write the stream: INSERT, UPDATE or DELETE on its table (one column is enough), or USAGE or UPDATE on
-- its sequence. The sequence is for sessions that write through functions of another owner and may not write the table.
-- Writes nothing. Its callers run with their owner's rights (SECURITY DEFINER), so `current_user` says nothing about the
-- session. No function can change the session's user, nor the role that the session chose by SET ROLE.
CREATE OR REPLACE FUNCTION writer_find_own(stream text) RETURNS writer_sharding
LANGUAGE plpgsql STABLE AS $$
DECLARE
    w writer_sharding := writer_find(stream);
    me name := CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role') END;
    s stream;
BEGIN
    SELECT * INTO s FROM stream x WHERE x.number = w.stream;
    IF (has_any_column_privilege(me, s.relation, 'INSERT, UPDATE') OR has_table_privilege(me, s.relation, 'DELETE')
            OR has_sequence_privilege(me, s.sequence, 'USAGE, UPDATE')) IS NOT TRUE THEN
        PERFORM writer_refuse('42501',
            format('role %I may not write stream %L, so it may not be one of its writers', me, s.name),
            format('run: GRANT INSERT ON %s TO %I; or, if functions of another owner write for it, '
                'GRANT USAGE ON SEQUENCE %s TO %2$I', s.relation, me, s.sequence));
    END IF;
    RETURN w;
END
$$;

-- writer_lock(stream): as writer_find, with the row locked: changes follow one after the other, so that terms are committed
-- in the order of their numbers. A caller that needs locks of slots takes them before. Locks writer_sharding.
CREATE OR REPLACE FUNCTION writer_lock(stream text) RETURNS writer_sharding
LANGUAGE plpgsql AS $$
DECLARE
    w writer_sharding := writer_find_own(stream);
BEGIN
    SELECT * INTO w FROM writer_sharding x WHERE x.stream = w.stream FOR UPDATE;
    IF NOT FOUND THEN
        RETURN writer_find(stream);  -- disabled while we waited: raises
    END IF;
    RETURN w;
END
$$;

-- writer_changed(number): makes the next writer_look show a change. Sessions that LISTEN to replicad_writers are notified
-- of it. Writes writer_sharding, whose row the caller has locked.
CREATE OR REPLACE FUNCTION writer_changed(number smallint) RETURNS void
LANGUAGE sql AS $$
    UPDATE writer_sharding SET version = nextval('writer_term_seq') WHERE stream = number;
    SELECT pg_notify('replicad_writers', s.name) FROM stream s WHERE s.number = writer_changed.number
$$;

-- writer_enable(stream, slots): the writers of the stream share its keys from now on; false where they do already, in
-- that number of slots. More slots share more evenly, 256 are enough for dozens of writers. Raises RS001, RS002.
-- Writes writer_sharding and writer_slot.
CREATE OR REPLACE FUNCTION writer_enable(stream text, slots integer = 256) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(stream);
    present integer;
BEGIN
    IF slots IS NULL OR slots NOT BETWEEN 1 AND 4096 THEN
        PERFORM writer_refuse('RS002', format('%s is no number of slots', slots), 'give one from 1 to 4096');
    END IF;
    INSERT INTO writer_sharding (stream, slots) VALUES (s.number, writer_enable.slots) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        SELECT w.slots INTO present FROM writer_sharding w WHERE w.stream = s.number;
        IF present <> slots THEN
            PERFORM writer_refuse('RS002', format('the writers of stream %L share %s slots already', stream, present),
                format('stop them and run `replicad sharding disable %s` first: a key''s slot depends on the number',
                    stream));
        END IF;
        RETURN false;
    END IF;
    INSERT INTO writer_slot (stream, slot, term)
        SELECT s.number, n, nextval('writer_term_seq') FROM generate_series(0, slots - 1) n;
    RETURN true;
END
$$;
COMMENT ON FUNCTION writer_enable(text, integer) IS 'Lets the writers of a stream share its keys';

-- writer_disable(stream): the keys have no owner any more; writers that still share them are refused from now on. Raises
-- RS001, RS002. Writes writer_sharding, and the rows that refer to it.
CREATE OR REPLACE FUNCTION writer_disable(stream text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    found_sharding writer_sharding := writer_find(stream);
BEGIN
    DELETE FROM writer_sharding w WHERE w.stream = found_sharding.stream;
END
$$;
COMMENT ON FUNCTION writer_disable(text) IS 'Ends the sharing of a stream''s keys';

-- writer_join(stream, instance, ttl, address, expired): makes the caller a writer of the stream. Returns the term and the
-- first beat of its membership.
--   ttl      so long without a beat, and the others take its slots over
--   address  where the application reaches this writer, told to the others; may be NULL
--   expired  beats that the caller has watched unchanged for longer than their ttl: a namesake with such a beat is
--            replaced. It may be alive: what it had is its successor's or others' only once its writes have ended.
-- Raises 42501, RS001, RS002, and RS012 where a writer of that name is alive. Writes writer_member.
CREATE OR REPLACE FUNCTION writer_join(
    stream text, instance text, ttl interval, address text = NULL, expired bigint[] = '{}',
    OUT term bigint, OUT beat bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    w writer_sharding := writer_lock(stream);
BEGIN
    IF instance IS DISTINCT FROM stream_instance(instance) THEN
        PERFORM writer_refuse('RS002', format('%L cannot be the name of a writer', left(instance, 200)),
            'give one without blanks, of 1 to 200 characters');
    ELSIF ttl IS NULL OR ttl NOT BETWEEN '0.2 s' AND '1 h' OR length(address) > 500 THEN
        PERFORM writer_refuse('RS002', format('writer %s has a time to live of %s, and an address of %s characters',
            instance, ttl, coalesce(length(address), 0)), 'give 0.2 seconds to an hour, and at most 500 characters');
    END IF;
    DELETE FROM writer_member m
        WHERE m.stream = w.stream AND m.instance = writer_join.instance AND m.beat = ANY (expired);
    IF EXISTS (SELECT FROM writer_member m WHERE m.stream = w.stream AND m.instance = writer_join.instance) THEN
        PERFORM writer_refuse('RS012', format('a writer named %s shares stream %L already', instance, stream),
            'give every process a name of its own, or wait until its time to live has passed without a sign of life');
    ELSIF (SELECT count(*) FROM writer_member m WHERE m.stream = w.stream) >= 1000 THEN
        PERFORM writer_refuse('RS002', format('1000 writers share stream %L already', stream), 'stop some of them');
    END IF;
    term := nextval('writer_term_seq');
    beat := nextval('writer_term_seq');
    INSERT INTO writer_member (stream, instance, term, beat, ttl, address)
        VALUES (w.stream, writer_join.instance, writer_join.term, writer_join.beat, writer_join.ttl, writer_join.address);
    PERFORM writer_changed(w.stream);
END
$$;
COMMENT ON FUNCTION writer_join(text, text, interval, text, bigint[]) IS 'Makes the caller a writer of a stream';

-- writer_expelled(stream, instance, term): raises RS011. Writes nothing.
CREATE OR REPLACE FUNCTION writer_expelled(stream text, instance text, term bigint) RETURNS void
LANGUAGE sql AS $$
    SELECT writer_refuse('RS011', format('writer %s does not share stream %L under term %s', instance, stream, term),
        'join anew; what it had may be others'' by now')
$$;

-- writer_beat(stream, instance, term): a sign of life: the new beat. Raises 42501, RS001, RS002, and RS011 where this membership
-- has ended. Writes writer_member.
CREATE OR REPLACE FUNCTION writer_beat(stream text, instance text, term bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    w writer_sharding := writer_find_own(stream);
    new_beat bigint;
BEGIN
    UPDATE writer_member m SET beat = nextval('writer_term_seq'), beat_at = clock_timestamp()
        WHERE m.stream = w.stream AND m.instance = writer_beat.instance AND m.term = writer_beat.term
        RETURNING m.beat INTO new_beat;
    IF NOT FOUND THEN
        PERFORM writer_expelled(stream, instance, term);
    END IF;
    RETURN new_beat;
END
$$;
COMMENT ON FUNCTION writer_beat(text, text, bigint) IS 'A writer''s sign of life';

-- writer_expel(stream, expired): ends the memberships with these beats, which the caller has watched unchanged for longer
-- than their ttl; returns their names. Their slots are free then, until others take them. Raises 42501, RS001, RS002.
-- Writes writer_member.
CREATE OR REPLACE FUNCTION writer_expel(stream text, expired bigint[]) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    w writer_sharding := writer_lock(stream);
    names text[];
BEGIN
    WITH gone AS (
        DELETE FROM writer_member m WHERE m.stream = w.stream AND m.beat = ANY (expired) RETURNING m.instance
    )
    SELECT array_agg(g.instance ORDER BY g.instance) INTO names FROM gone g;
    IF names IS NOT NULL THEN
        PERFORM writer_changed(w.stream);
    END IF;
    RETURN coalesce(names, '{}');
END
$$;
COMMENT ON FUNCTION writer_expel(text, bigint[]) IS 'Ends the membership of writers that gave no sign of life';
