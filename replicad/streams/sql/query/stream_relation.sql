-- For `replicad plan`: the name of the relation $1 as SQL wants it, and of the sequence that feeds its column $2.
SELECT format('%I.%I', n.nspname, c.relname) AS name,
    (SELECT format('%I.%I', qn.nspname, q.relname) FROM pg_class AS q JOIN pg_namespace AS qn ON qn.oid = q.relnamespace
     WHERE q.oid = {schema}.stream_sequence(c.oid::regclass, $2::name)) AS feeding
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = $1::bigint::oid
