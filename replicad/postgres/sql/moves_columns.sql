    WITH RECURSIVE tree(member) AS (
        SELECT tbl::oid
        UNION
        SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.member
    )
    SELECT CASE WHEN NOT bool_or(n.number = 0) THEN array_agg(DISTINCT a.attname) END
    FROM tree JOIN pg_partitioned_table p ON p.partrelid = tree.member CROSS JOIN unnest(p.partattrs::smallint[]) AS n (number)
        LEFT JOIN pg_attribute a ON a.attrelid = tree.member AND a.attnum = n.number
