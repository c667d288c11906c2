-- The table of a stream with all its partitions and children. $1 bigint: its oid. Reads catalogs only.
WITH RECURSIVE tree (member) AS (
    SELECT $1::bigint::oid
    UNION
    SELECT i.inhrelid FROM tree JOIN pg_inherits AS i ON i.inhparent = tree.member
)
SELECT c.oid::bigint AS oid, format('%I.%I', n.nspname, c.relname) AS name
FROM tree JOIN pg_class AS c ON c.oid = tree.member JOIN pg_namespace AS n ON n.oid = c.relnamespace
