DECLARE
    types text[];
    one name;
    type oid;
    base oid;
BEGIN
    FOREACH one IN ARRAY coalesce(key, '{}') LOOP
        SELECT a.atttypid INTO type FROM pg_attribute a
            WHERE a.attrelid = tbl AND a.attname = one AND a.attnum > 0 AND NOT a.attisdropped;
        LOOP
            SELECT d.typbasetype INTO base FROM pg_type d WHERE d.oid = type AND d.typtype = 'd';
            EXIT WHEN NOT FOUND;
            type := base;
        END LOOP;
        types := types || format_type(type, -1);
    END LOOP;
    RETURN types;
END
