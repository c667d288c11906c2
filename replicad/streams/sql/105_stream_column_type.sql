-- stream_column_type(tbl, column): the type of a column. Raises RS002 with the columns that there are.
CREATE OR REPLACE FUNCTION stream_column_type(tbl regclass, column_name name) RETURNS regtype
LANGUAGE plpgsql STABLE AS $$
DECLARE
    kind regtype;
BEGIN
    SELECT a.atttypid INTO kind FROM pg_attribute a
    WHERE a.attrelid = tbl AND a.attname = column_name AND a.attnum > 0 AND NOT a.attisdropped;
    IF NOT FOUND THEN
        PERFORM stream_refuse(format('table %s has no column %I', tbl, column_name), format('its columns: %s',
            (SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum)
             FROM pg_attribute a WHERE a.attrelid = tbl AND a.attnum > 0 AND NOT a.attisdropped)));
    END IF;
    RETURN kind;
END
$$;
