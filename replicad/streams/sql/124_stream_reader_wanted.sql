-- stream_reader_wanted(relation): what the asking role lacks to read a table or sequence as its owner, and the remedy; NULL
-- where it lacks nothing. Who may make the reader (stream_reader_ensure): a superuser; the owner of this schema, if it is a
-- member of the table's owner. He may call it; another role needs the right to.
CREATE OR REPLACE FUNCTION stream_reader_wanted(relation regclass) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    owner oid := stream_runs_as(relation);
    keeper name;
    present name;
BEGIN
    IF owner IS NULL OR stream_reader(owner) NOT LIKE '%.stream_reader_missing' THEN
        RETURN NULL;
    END IF;
    SELECT pg_get_userbyid(n.nspowner), p.proname INTO keeper, present
        FROM pg_namespace n
        LEFT JOIN pg_proc p ON p.pronamespace = n.oid AND p.proowner = owner AND p.proname ~ '^reader_1_[0-9a-f]{32}$'
        WHERE n.nspname = current_schema();
    IF present IS NOT NULL AND keeper <> current_user THEN
        RETURN format('%s belongs to role %I and is read with the rights of that role; run: GRANT EXECUTE ON FUNCTION'
            ' %I.%I(oid, text, text, bigint) TO %I', stream_qualified(relation), pg_get_userbyid(owner), current_schema(),
            present, current_user);
    END IF;
    RETURN format('%s belongs to role %I and is read with the rights of that role; run: GRANT %2$I TO %I',
            stream_qualified(relation), pg_get_userbyid(owner), keeper)
        || CASE WHEN keeper = current_user THEN ''
            ELSE format(', then as %I or as a superuser: SELECT %I.stream_reader_ensure(%L)', keeper, current_schema(),
                stream_qualified(relation)) END;
END
$$;
