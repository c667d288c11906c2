-- For `replicad plan`: the name of the relation $1 as SQL wants it, and its schema.
SELECT format('%I.%I', n.nspname, c.relname) AS name, n.nspname::text AS schema
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = $1::bigint::oid
