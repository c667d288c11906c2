-- stream_remove(name): the table is a stream no more; it and its rows stay. Raises RS001.
-- Writes stream and what hangs on it, and drops the guard's triggers.
CREATE OR REPLACE FUNCTION stream_remove(name text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
    guard record;
BEGIN
    FOR guard IN SELECT t.tgrelid::regclass AS member, t.tgname FROM pg_trigger t
        WHERE t.tgrelid IN (SELECT stream_tables(s.relation)) AND t.tgparentid = 0
            AND t.tgname LIKE format('replicad\_guard\_%s\_%%', s.number)
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', guard.tgname, guard.member);
    END LOOP;
    DELETE FROM stream x WHERE x.number = s.number;
END
$$;
COMMENT ON FUNCTION stream_remove(text) IS 'Unregisters a stream; the table stays as it is';
