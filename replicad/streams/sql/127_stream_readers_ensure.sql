-- stream_readers_ensure(): makes the readers that streams lack (stream_reader_ensure), where the asking role may.
CREATE OR REPLACE FUNCTION stream_readers_ensure() RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    wanted regclass;
BEGIN
    FOR wanted IN SELECT r FROM stream s, unnest(ARRAY[s.relation, s.sequence, s.positions]) r
        WHERE stream_reader_wanted(r) IS NOT NULL
    LOOP
        BEGIN
            PERFORM stream_reader_ensure(wanted);
        EXCEPTION WHEN SQLSTATE 'RS002' OR undefined_object OR undefined_table THEN
            NULL;  -- stream_load shows what is missing
        END;
    END LOOP;
END
$$;
