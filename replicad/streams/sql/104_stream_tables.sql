-- stream_tables(tbl): the table with all its partitions and heirs, itself first.
CREATE OR REPLACE FUNCTION stream_tables(tbl regclass) RETURNS SETOF regclass
LANGUAGE sql STABLE AS $$
    WITH RECURSIVE tree(member, depth) AS (
        SELECT tbl::oid, 0
        UNION
        SELECT i.inhrelid, tree.depth + 1 FROM tree JOIN pg_inherits i ON i.inhparent = tree.member
    )
    SELECT member::regclass FROM tree GROUP BY member ORDER BY min(depth), member
$$;
