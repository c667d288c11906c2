DECLARE
    safe name[] := '{}';
    folder name;
BEGIN
    FOREACH folder IN ARRAY coalesce(path, '{}') LOOP
        IF has_schema_privilege('public', folder, 'CREATE') THEN
            RAISE NOTICE 'expressions cannot see into schema %, where everybody may create objects: '
                'put the schema before the names that they need', folder;
        ELSIF folder !~ '^pg_' THEN
            safe := safe || folder;
        END IF;
    END LOOP;
    RETURN safe;
END
