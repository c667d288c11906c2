-- stream_feed_fault(s): another sequence feeds the id column now than the one that the stream was added with, so that its
-- positions say nothing of new rows; NULLs where that is not so. A stream whose sequence never fed the column (named on
-- purpose when it was added) is left alone, and so is a column that no sequence feeds any more: then the writers name
-- the sequence themselves. The same for a partition or an heir whose rows get ids of another sequence where they are
-- inserted into it directly.
CREATE OR REPLACE FUNCTION stream_feed_fault(s stream, OUT problem text, OUT remedy text)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    feeding regclass := CASE WHEN s.fed THEN stream_sequence(s.relation, s.id_column) END;
    part regclass;
    identity boolean;
BEGIN
    IF feeding <> s.sequence THEN
        problem := format('column %I of %s takes its ids from sequence %s now, and the stream follows %s', s.id_column,
            s.relation, feeding, s.sequence);
        remedy := format('run: replicad streams alter %s --table %s (with --same-rows if the new sequence goes on above all '
            'rows that were sent); or give the column its sequence back', stream_shell(s.name),
            stream_shell(s.relation::text));
        RETURN;
    END IF;
    IF NOT s.fed OR NOT (SELECT c.relhassubclass FROM pg_class c WHERE c.oid = s.relation) THEN
        RETURN;
    END IF;
    SELECT t, q.oid::regclass, a.attidentity <> '' INTO part, feeding, identity
    FROM stream_tables(s.relation) t
    JOIN pg_attribute a ON a.attrelid = t AND a.attname = s.id_column
    LEFT JOIN pg_attrdef f ON f.adrelid = t AND f.adnum = a.attnum
    JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid AND d.refclassid = 'pg_class'::regclass
        OR d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.deptype = 'i'
            AND d.refobjid = t AND d.refobjsubid = a.attnum AND a.attidentity <> ''
    JOIN pg_class q ON q.relkind = 'S' AND q.oid = CASE WHEN d.classid = 'pg_attrdef'::regclass THEN d.refobjid ELSE d.objid END
    WHERE t <> s.relation AND q.oid <> s.sequence
    LIMIT 1;
    IF FOUND THEN
        problem := format('column %I of %s, a part of %s, takes its ids from sequence %s, and the stream follows %s: rows that are '
            'inserted into %s directly would be passed over', s.id_column, part, s.relation, feeding, s.sequence, part);
        remedy := CASE WHEN identity THEN format('run: ALTER TABLE %s ALTER COLUMN %I DROP IDENTITY; ', part, s.id_column) ELSE 'run: ' END
            || format('ALTER TABLE %s ALTER COLUMN %I SET DEFAULT nextval(%L)', part, s.id_column, stream_qualified(s.sequence));
    END IF;
END
$$;
