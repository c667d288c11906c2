-- What `replicad plan` and `apply` read of caches.

-- name: cache_desired
-- For `replicad plan`: whether the stream of invalidations is there, its writers, and the roles with a right to invalidate
-- that is not the owner's; $1 stands for every role.
SELECT EXISTS (SELECT FROM {schema}.stream AS s WHERE s.relation = '{schema}.cache_invalidation'::regclass) AS enabled,
    ARRAY(
        SELECT w.name FROM {schema}.stream AS s JOIN {schema}.stream_writer AS w ON w.stream = s.number
        WHERE s.relation = '{schema}.cache_invalidation'::regclass AND w.name <> 'master') AS writers,
    ARRAY(
        SELECT coalesce(r.rolname::text, $1::text)
        FROM pg_proc AS p CROSS JOIN LATERAL aclexplode(p.proacl) AS a LEFT JOIN pg_roles AS r ON r.oid = a.grantee
        WHERE p.oid = '{schema}.cache_write(text, jsonb)'::regprocedure AND a.grantee <> p.proowner
            AND a.privilege_type = 'EXECUTE') AS roles
