-- The table of a stream with all its partitions and children, and its sequence (without a name), each with the number of its
-- file: a command that rewrites a table gives it another file. $1 bigint, $2 bigint: the oids of table and sequence. Reads catalogs only.
WITH RECURSIVE tree (member) AS (
    SELECT $1::bigint::oid
    UNION
    SELECT i.inhrelid FROM tree JOIN pg_inherits AS i ON i.inhparent = tree.member
)
SELECT c.oid::bigint AS oid, format('%I.%I', n.nspname, c.relname) AS name, pg_relation_filenode(c.oid)::bigint AS file
FROM tree JOIN pg_class AS c ON c.oid = tree.member JOIN pg_namespace AS n ON n.oid = c.relnamespace
UNION ALL
SELECT $2::bigint, NULL, pg_relation_filenode($2::bigint::oid)::bigint
