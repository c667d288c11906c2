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
            format('run `replicad writers enable %s`, or: SELECT %I.writer_enable(%L)', stream, current_schema(), stream));
    END IF;
    RETURN found_sharding;
END
$$;

-- writer_find_own(stream): as writer_find, for a caller who may be one of the stream's writers. Raises 42501 unless this
-- session's role may write the stream: INSERT, UPDATE or DELETE on its table (one column is enough), or USAGE or UPDATE on
-- its sequence. The sequence is for sessions that write through functions of another owner and may not write the table.
-- Writes nothing.
-- Who calls it runs with its owner's rights (SECURITY DEFINER), so `current_user` says nothing about the caller. What no
-- function can change is the session's user, and the role that the session chose by SET ROLE.
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

-- writer_lock(stream): the same, with the row locked: one change after the other, so that terms are committed in the
-- order of their numbers. Whoever needs locks of slots takes them before. Locks writer_sharding.
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

-- writer_changed(number): the next look shows a change; those who LISTEN to replicad_writers need not wait for it.
-- Writes writer_sharding, whose row the caller has locked.
CREATE OR REPLACE FUNCTION writer_changed(number smallint) RETURNS void
LANGUAGE sql AS $$
    UPDATE writer_sharding SET version = nextval('writer_term_seq') WHERE stream = number;
    SELECT pg_notify('replicad_writers', s.name) FROM stream s WHERE s.number = writer_changed.number
$$;
