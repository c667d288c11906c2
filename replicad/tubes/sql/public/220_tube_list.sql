-- tube_list(tbl): the tubes and the tables attached to them, or the tubes of one table. A tube without tables has
-- NULLs. table_predicate and routing are the expressions of the attachment. unattached are partitions of the table that
-- were created after the attachment and have no triggers; attach the table again to add them. Writes nothing.
CREATE OR REPLACE FUNCTION tube_list(tbl regclass = NULL) RETURNS TABLE (
    tube text, predicate text, partitions integer, tbl regclass, shard integer,
    table_predicate text, routing text, unattached regclass[]
)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT r.tube, r.predicate, r.partitions, a.tbl, a.shard, a.predicate, a.routing,
        CASE WHEN a.tbl IS NOT NULL THEN ARRAY(
            SELECT m FROM tube_members(a.tbl) m WHERE NOT EXISTS (
                SELECT FROM tube_attachment x WHERE x.tube = a.tube AND x.tbl = m)) END
    FROM tube_registry r LEFT JOIN (
        SELECT x.* FROM tube_attachment x JOIN pg_class c ON c.oid = x.tbl WHERE x.tbl = x.root
    ) AS a ON a.tube = r.tube
    WHERE $1 IS NULL OR a.tbl = $1
    ORDER BY r.tube, a.shard, a.tbl
$$;
COMMENT ON FUNCTION tube_list(regclass) IS 'Tubes and the tables attached to them';
