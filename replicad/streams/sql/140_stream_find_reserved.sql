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
