-- stream_remove(name): the table is a stream no more; it and its rows stay. Raises RS001.
-- Writes stream and what hangs on it; drops the guard.
CREATE OR REPLACE FUNCTION stream_remove(name text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    s stream := stream_find(name);
BEGIN
    PERFORM stream_guard_detach(s.number);
    EXECUTE format('DROP FUNCTION IF EXISTS stream_guard_%s()', s.number);
    DELETE FROM stream x WHERE x.number = s.number;
END
$$;
COMMENT ON FUNCTION stream_remove(text) IS 'Unregisters a stream; the table stays as it is';
