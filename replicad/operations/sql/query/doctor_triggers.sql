-- Attached tables whose trigger functions run with the rights of another role than the owner of the table, as after ALTER TABLE
-- ... OWNER TO. $1 text: the schema's name. A table of a superuser, or of the owner of the schema, is theirs in common.
SELECT DISTINCT a.tube, format('%I.%I', n.nspname, c.relname) AS root, a.shard, a.predicate, a.routing,
    pg_get_userbyid(c.relowner)::text AS owner, pg_get_userbyid(p.proowner)::text AS runs_as
FROM {schema}.tube_attachment AS a
JOIN pg_class AS c ON c.oid = a.tbl
JOIN pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_roles AS mine ON mine.oid = c.relowner
JOIN pg_namespace AS home ON home.nspname = $1::text
JOIN pg_trigger AS g ON g.tgrelid = a.tbl AND NOT g.tgisinternal
JOIN pg_proc AS p ON p.oid = g.tgfoid AND p.pronamespace = home.oid
JOIN pg_roles AS other ON other.oid = p.proowner
JOIN pg_description AS d ON d.objoid = p.oid AND d.classoid = 'pg_proc'::regclass
    AND d.description = 'replicad: touches tube ' || a.tube
WHERE a.tbl = a.root AND p.proowner <> c.relowner
    AND NOT ((mine.rolsuper OR mine.oid = home.nspowner) AND (other.rolsuper OR other.oid = home.nspowner))
ORDER BY 1, 2
