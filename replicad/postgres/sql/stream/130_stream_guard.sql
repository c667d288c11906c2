-- stream_guard(): trigger of a reserved stream, fired for an id that its transaction has not reserved itself. Arguments:
-- the stream's number, its id column, the setting that remembers the reservation. Raises RS003 through stream_adopt.
CREATE OR REPLACE FUNCTION stream_guard() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    id bigint := to_jsonb(NEW) ->> TG_ARGV[1];
BEGIN
    IF id IS NOT NULL THEN  -- a row without an id is never sent
        PERFORM stream_adopt(TG_ARGV[0]::integer, TG_ARGV[2], id);
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION stream_guard() IS 'Refuses ids that outlived their reservation';
