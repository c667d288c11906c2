-- stream_instance(instance): a writer's name as it stands on the wire, in tokens and in stream_writer.
-- NULL and '' become master; white space and control characters, which would break the line, become _; 200 characters.
CREATE OR REPLACE FUNCTION stream_instance(instance text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT coalesce(nullif(left(translate(instance,
        E'\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10'
        '\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f\x20\x7f',
        '_________________________________'), 200), ''), 'master')
$$;
