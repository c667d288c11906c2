-- Code of a third role in tables that are read directly, because they belong to a superuser or to the asking role: types of
-- columns (whoever owns a type can define its cast to json), and functions in indexes, statistics and policies.
-- $1 bigint[]: tables of streams; those of tubes are found here. {schema}: that of the tubes.
WITH tables AS (
    SELECT c.oid, c.relowner, format('%I.%I', n.nspname, c.relname) AS name
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace JOIN pg_roles AS o ON o.oid = c.relowner
    WHERE (o.rolsuper OR o.rolname = current_user)
        AND (c.oid = ANY ($1::bigint[]::oid[]) OR c.oid IN (SELECT a.tbl FROM {schema}.tube_attachment AS a))
), parts AS (
    SELECT t.oid, 'pg_class'::regclass AS class, i.indexrelid AS part FROM tables AS t JOIN pg_index AS i ON i.indrelid = t.oid
    UNION ALL SELECT t.oid, 'pg_statistic_ext'::regclass, s.oid FROM tables AS t JOIN pg_statistic_ext AS s ON s.stxrelid = t.oid
    UNION ALL SELECT t.oid, 'pg_policy'::regclass, p.oid FROM tables AS t JOIN pg_policy AS p ON p.polrelid = t.oid
), used AS (
    SELECT t.oid, 'TYPE ' || format_type(coalesce(nullif(y.typelem, 0), y.oid), NULL) AS what, y.typowner AS owner
    FROM tables AS t
    JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
    JOIN pg_type AS y ON y.oid = a.atttypid
    UNION
    SELECT parts.oid, 'FUNCTION ' || p.oid::regprocedure, p.proowner
    FROM parts
    JOIN pg_depend AS d ON d.classid = parts.class AND d.objid = parts.part AND d.refclassid = 'pg_proc'::regclass
    JOIN pg_proc AS p ON p.oid = d.refobjid
)
SELECT t.name AS table, u.what, r.rolname::text AS owner, pg_get_userbyid(t.relowner)::text AS table_owner
FROM used AS u JOIN tables AS t ON t.oid = u.oid JOIN pg_roles AS r ON r.oid = u.owner
WHERE NOT r.rolsuper AND u.owner <> t.relowner AND r.rolname <> current_user
ORDER BY 1, 2
