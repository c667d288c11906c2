-- The caches are a stream, in the schema of the streams.
DO $needs$
BEGIN
    IF to_regclass('stream_writer') IS NULL THEN
        RAISE EXCEPTION 'schema % has no streams, which the part cache stands on', current_schema()
            USING ERRCODE = '55000', HINT = 'install the part stream into the same schema first';
    END IF;
END
$needs$;
