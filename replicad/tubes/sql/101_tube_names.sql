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
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    WITH RECURSIVE tree(member, depth) AS (
        SELECT tbl::oid, 0
        UNION
        SELECT i.inhrelid, tree.depth + 1 FROM tree JOIN pg_inherits i ON i.inhparent = tree.member
    )
    SELECT member::regclass FROM tree GROUP BY member ORDER BY min(depth), member
$$;
