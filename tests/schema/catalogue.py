"""All that Postgres knows of the objects in our schemas, as lines: the same lines are the same installation."""

from __future__ import annotations

from replicad.postgres.bridge import Database

_LINES = """
WITH here AS (SELECT oid, nspname FROM pg_namespace WHERE nspname = ANY ($1)),
class AS (SELECT c.*, here.nspname FROM pg_class c JOIN here ON here.oid = c.relnamespace)
SELECT format('schema %s rights %s', nspname, (SELECT n.nspacl FROM pg_namespace n WHERE n.oid = here.oid)) AS line
    FROM here
UNION ALL SELECT format('relation %s %s persistence %s options %s rights %s row security %s %s', oid::regclass, relkind,
        relpersistence, reloptions, relacl, relrowsecurity, relreplident) FROM class
UNION ALL SELECT format('column %s %s %s type %s storage %s not null %s default %s identity %s generated %s rights %s '
        'collation %s', class.oid::regclass, row_number() OVER (PARTITION BY class.oid ORDER BY a.attnum), a.attname,
        format_type(a.atttypid, a.atttypmod), a.attstorage, a.attnotnull, pg_get_expr(d.adbin, d.adrelid),
        a.attidentity, a.attgenerated, a.attacl, a.attcollation::regcollation)
    FROM class JOIN pg_attribute a ON a.attrelid = class.oid AND a.attnum > 0 AND NOT a.attisdropped
    LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
UNION ALL SELECT format('constraint %s %s %s', n.conrelid::regclass, n.conname, pg_get_constraintdef(n.oid))
    FROM pg_constraint n JOIN here ON here.oid = n.connamespace
UNION ALL SELECT format('index %s', pg_get_indexdef(class.oid)) FROM class WHERE relkind IN ('i', 'I')
UNION ALL SELECT format('view %s %s', oid::regclass, pg_get_viewdef(oid)) FROM class WHERE relkind = 'v'
UNION ALL SELECT format('sequence %s %s', class.oid::regclass,
        ARRAY[format_type(s.seqtypid, NULL), s.seqstart::text, s.seqincrement::text, s.seqmin::text, s.seqmax::text,
            s.seqcache::text, s.seqcycle::text])
    FROM class JOIN pg_sequence s ON s.seqrelid = class.oid
UNION ALL SELECT format('trigger %s', pg_get_triggerdef(t.oid))
    FROM class JOIN pg_trigger t ON t.tgrelid = class.oid AND NOT t.tgisinternal
UNION ALL SELECT format('function %s rights %s returns %s leakproof %s %s', p.oid::regprocedure, p.proacl,
        pg_get_function_result(p.oid), p.proleakproof, pg_get_functiondef(p.oid))
    FROM pg_proc p JOIN here ON here.oid = p.pronamespace
UNION ALL SELECT format('type %s %s %s', t.oid::regtype, t.typtype, t.typacl)
    FROM pg_type t JOIN here ON here.oid = t.typnamespace
UNION ALL SELECT format('comment %s: %s', pg_describe_object(d.classoid, d.objoid, d.objsubid), d.description)
    FROM pg_description d WHERE (d.classoid = 'pg_class'::regclass AND d.objoid IN (SELECT oid FROM class))
        OR (d.classoid = 'pg_proc'::regclass AND d.objoid IN (
            SELECT p.oid FROM pg_proc p JOIN here ON here.oid = p.pronamespace))
        OR (d.classoid = 'pg_namespace'::regclass AND d.objoid IN (SELECT oid FROM here))
ORDER BY 1
"""

_FUNCTIONS = """
SELECT format('%s.%s(%s)', n.nspname, p.proname, pg_get_function_identity_arguments(p.oid)) AS name,
    pg_get_function_result(p.oid) AS result, pg_get_function_arguments(p.oid) AS arguments
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = ANY ($1)
"""


async def lines(db: Database, schemas: tuple[str, ...] = ("replicad", "tube")) -> list[str]:
    """A line for each object and each of its parts, sorted. Columns are numbered as they follow each other."""
    return [row["line"] for row in await db.fetch(_LINES, list(schemas))]


async def functions(db: Database, schemas: tuple[str, ...] = ("replicad", "tube")) -> dict[str, tuple[str, str]]:
    """By name and types of the arguments: the result, and the arguments with names and defaults."""
    found = await db.fetch(_FUNCTIONS, list(schemas))
    return {row["name"]: (row["result"], row["arguments"]) for row in found}
