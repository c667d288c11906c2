-- Errors, names of objects, and how a tube is found by its name.

-- tube_refuse(code, message, hint): raises that SQLSTATE. Writes nothing.
CREATE OR REPLACE FUNCTION tube_refuse(code text, message text, hint text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint;
END
$$;

-- tube_object_name(base, suffix): base || suffix as a name of at most 63 bytes. Postgres would truncate a longer name,
-- and two names could become equal. Here the base is shortened and a hash is added. Raises
-- name_too_long for a suffix that leaves no room. Writes nothing.
CREATE OR REPLACE FUNCTION tube_object_name(base text, suffix text) RETURNS name
LANGUAGE plpgsql IMMUTABLE SET search_path FROM CURRENT AS $$
DECLARE
    hash text := '_' || left(md5(base || suffix), 8);
    kept text := left(base, 63);
BEGIN
    IF octet_length(base || suffix) <= 63 THEN
        RETURN base || suffix;
    END IF;
    IF octet_length(hash || suffix) > 63 THEN
        RAISE name_too_long USING MESSAGE = format('no name of 63 bytes can end with %L', left(suffix, 80));
    END IF;
    WHILE octet_length(kept || hash || suffix) > 63 LOOP
        kept := left(kept, -1);
    END LOOP;
    RETURN kept || hash || suffix;
END
$$;

-- tube_qualified(tbl): the table's name with its schema, quoted; valid under any search_path. Writes nothing.
CREATE OR REPLACE FUNCTION tube_qualified(tbl regclass) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT format('%I.%I', n.nspname, c.relname)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl
$$;

-- tube_relation(tube): the table with the tube's pods, quoted, with its schema. Writes nothing.
CREATE OR REPLACE FUNCTION tube_relation(tube text) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT format('%I.%I', current_schema(), tube)
$$;

-- tube_members(tbl): the table with all its partitions and heirs, itself first. Writes nothing.
CREATE OR REPLACE FUNCTION tube_members(tbl regclass) RETURNS SETOF regclass
LANGUAGE sql STABLE ROWS 2 SET search_path FROM CURRENT AS $$
    WITH RECURSIVE tree(member, depth) AS (
        SELECT tbl::oid, 0
        UNION
        SELECT i.inhrelid, tree.depth + 1 FROM tree JOIN pg_inherits i ON i.inhparent = tree.member
    )
    SELECT member::regclass FROM tree GROUP BY member ORDER BY min(depth), member
$$;

-- tube_find(tube): its row in tube_registry. Raises RT001. Writes nothing. It is volatile, so that its snapshot is taken
-- after its lock: where it waits for the restore of a dump, it sees the rows of the restored tube_registry.
CREATE OR REPLACE FUNCTION tube_find(tube text) RETURNS tube_registry
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
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

-- tube_check_name(tube): raises RT008 if no tube can have this name, RT005 if it is taken. Writes nothing.
-- The name is a word in commands, so it has no blanks. 50 bytes leave room for the suffixes of its indexes.
CREATE OR REPLACE FUNCTION tube_check_name(tube text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    taken name;
BEGIN
    IF tube IS NULL OR tube = '' OR octet_length(tube) > 50 OR tube ~ '[[:space:][:cntrl:]]' THEN
        PERFORM tube_refuse('RT008',
            format('a tube cannot be called %s: a name has 1 to 50 bytes, no white space and no control characters',
                coalesce(quote_literal(left(tube, 100)), 'NULL')),
            'choose another name; letters, digits, _ and - read best');
    END IF;
    IF EXISTS (SELECT FROM tube_registry r WHERE r.tube = tube_check_name.tube) THEN
        RETURN;
    END IF;
    SELECT found.name INTO taken FROM (
        SELECT c.relname FROM pg_class c WHERE c.relnamespace = quote_ident(current_schema())::regnamespace
        UNION ALL
        SELECT p.proname FROM pg_proc p WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
    ) AS found (name)
        WHERE found.name IN (tube, tube_object_name(tube, '_touch'), tube_object_name(tube, '_trigger'));
    IF FOUND THEN
        PERFORM tube_refuse('RT005',
            format('tube %L needs the name %I.%I, which is taken', tube, current_schema(), taken),
            'choose another name for the tube, or rename what has it');
    END IF;
END
$$;
