-- stream_reader_wanted(relation): what the asking role lacks to read a table or sequence as its owner, and the remedy; NULL
-- where it lacks nothing. Who may make the reader (stream_reader_ensure): a superuser; the owner of this schema, if it is a
-- member of the table's owner.
CREATE OR REPLACE FUNCTION stream_reader_wanted(relation regclass) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    owner oid := stream_runs_as(relation);
    keeper name;
BEGIN
    IF owner IS NULL OR stream_reader(owner) NOT LIKE '%.stream_reader_missing' THEN
        RETURN NULL;
    END IF;
    SELECT pg_get_userbyid(n.nspowner) INTO keeper FROM pg_namespace n WHERE n.nspname = current_schema();
    RETURN format('%s belongs to role %I and is read with the rights of that role; run: GRANT %2$I TO %I',
            stream_qualified(relation), pg_get_userbyid(owner), keeper)
        || CASE WHEN keeper = current_user THEN ''
            ELSE format(', then as %I or as a superuser: SELECT %I.stream_reader_ensure(%L)', keeper, current_schema(),
                stream_qualified(relation)) END;
END
$$;
COMMENT ON FUNCTION stream_reader_wanted(regclass) IS 'What a role lacks to read a table as its owner; NULL for nothing';
