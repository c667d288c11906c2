-- stream_sequence(tbl, column): the sequence that feeds a column: named by its default, or owned (serial, identity).
-- NULL where there is none.
CREATE OR REPLACE FUNCTION stream_sequence(tbl regclass, column_name name) RETURNS regclass
LANGUAGE sql STABLE AS $$
    SELECT c.oid::regclass
    FROM pg_attribute a
    CROSS JOIN LATERAL (
        SELECT d.refobjid AS sequence, 1 AS preference  -- what the default draws from counts, where the two differ
        FROM pg_attrdef f JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid
        WHERE f.adrelid = a.attrelid AND f.adnum = a.attnum AND d.refclassid = 'pg_class'::regclass
        UNION ALL
        SELECT d.objid, CASE d.deptype WHEN 'i' THEN 2 ELSE 3 END  -- a serial column made an identity has both
        FROM pg_depend d
        WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
            AND d.refobjid = a.attrelid AND d.refobjsubid = a.attnum
    ) found
    JOIN pg_class c ON c.oid = found.sequence AND c.relkind = 'S'
    WHERE a.attrelid = tbl AND a.attname = column_name AND NOT a.attisdropped
    ORDER BY found.preference LIMIT 1
$$;
