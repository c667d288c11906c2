-- stream_check_id(tbl, id_column): refuses a column that cannot be a stream's id, apart from what feeds it.
CREATE OR REPLACE FUNCTION stream_check_id(tbl regclass, id_column name) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    kind regtype := stream_column_type(tbl, id_column);
    bare regclass;
BEGIN
    IF kind NOT IN ('bigint'::regtype, 'integer'::regtype) THEN
        PERFORM stream_refuse(format('column %I of %s is of type %s', id_column, tbl, kind),
            'the id of a stream is a bigint (or an integer) that a sequence feeds');
    END IF;
    SELECT t INTO bare FROM stream_tables(tbl) t JOIN pg_class c ON c.oid = t
    WHERE c.relkind = 'r' AND NOT EXISTS (
        SELECT FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid JOIN pg_am m ON m.oid = x.relam
        JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
        WHERE i.indrelid = t AND i.indisvalid AND i.indpred IS NULL AND m.amname = 'btree' AND a.attname = id_column)
    LIMIT 1;
    IF FOUND THEN
        -- CONCURRENTLY does not exist for a partitioned table
        PERFORM stream_refuse(
            format('%s has no index on %I, so every look at the stream would read all of it', bare, id_column),
            format('run: CREATE INDEX %sON %s (%I)',
                CASE (SELECT c.relkind FROM pg_class c WHERE c.oid = tbl) WHEN 'p' THEN '' ELSE 'CONCURRENTLY ' END,
                CASE (SELECT c.relispartition FROM pg_class c WHERE c.oid = bare) WHEN true THEN tbl ELSE bare END,
                id_column));
    END IF;
END
$$;
