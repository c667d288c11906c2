-- The table of a stream with all its partitions and children, and its sequence (without a name), each with the number of its
-- file: a command that rewrites a table gives it another file. $1 bigint, $2 bigint: the oids of table and sequence. $3 text, $4 text:
-- the schema and the name of the table that is meant (or NULL): where they lead to another relation with rows, it takes the place
-- of the table. The table comes first. A temporary child is left out: only its own session sees its rows. Reads catalogs only.
WITH RECURSIVE tree (member, depth) AS (
    SELECT coalesce((
        SELECT c.oid FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE n.nspname = $3::text AND c.relname = $4::text AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
    ), $1::bigint::oid), 0
    UNION
    SELECT i.inhrelid, tree.depth + 1 FROM tree JOIN pg_inherits AS i ON i.inhparent = tree.member
)
SELECT found.oid, found.name, found.file
FROM (
    SELECT c.oid::bigint AS oid, format('%I.%I', n.nspname, c.relname) AS name, pg_relation_filenode(c.oid)::bigint AS file,
        min(tree.depth) AS depth
    FROM tree JOIN pg_class AS c ON c.oid = tree.member JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relpersistence <> 't'
    GROUP BY c.oid, n.nspname, c.relname
    UNION ALL
    SELECT $2::bigint, NULL, pg_relation_filenode($2::bigint::oid)::bigint, NULL
) AS found
ORDER BY found.depth
