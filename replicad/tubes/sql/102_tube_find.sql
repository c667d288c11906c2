-- tube_find(tube): its row in tube_registry. Raises RT001. Writes nothing.
CREATE OR REPLACE FUNCTION tube_find(tube text) RETURNS tube_registry
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    found_tube tube_registry;
BEGIN
    SELECT * INTO found_tube FROM tube_registry r WHERE r.tube = tube_find.tube;
    IF NOT FOUND THEN
        PERFORM tube_refuse('RT001', format('there is no tube %L', tube),
            format('SELECT * FROM %I.tube_list() shows those there are', current_schema()));
    END IF;
    RETURN found_tube;
END
$$;

-- tube_keep(tube): the same; until the transaction ends the tube cannot be dropped. Functions that will wait for a lock
-- on an object of the tube call it first. Dropping a tube locks the same row first, so there is no deadlock. Raises
-- RT001. Locks the row in tube_registry.
CREATE OR REPLACE FUNCTION tube_keep(tube text) RETURNS tube_registry
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM FROM tube_registry r WHERE r.tube = tube_keep.tube FOR KEY SHARE;
    RETURN tube_find(tube);
END
$$;

-- tube_lock(tube): the same; until the transaction ends no other transaction changes the tube, its attachments or the
-- holders of its leases. Raises RT001. Locks the row in tube_registry.
CREATE OR REPLACE FUNCTION tube_lock(tube text) RETURNS tube_registry
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    locked_tube tube_registry;
BEGIN
    SELECT * INTO locked_tube FROM tube_registry r WHERE r.tube = tube_lock.tube FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN tube_find(tube);
    END IF;
    RETURN locked_tube;
END
$$;
