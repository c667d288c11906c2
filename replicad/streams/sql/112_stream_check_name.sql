-- stream_check_name(name): refuses what is no name for a stream, and one that is taken.
CREATE OR REPLACE FUNCTION stream_check_name(name text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    -- by code point, since what [:space:] and [:cntrl:] mean beyond ASCII depends on the database's locale
    unprintable text := E'[[:space:][:cntrl:]\\u0080-\\u00a0\\u2000-\\u200f\\u2028-\\u202f\\u205f\\u3000\\ufeff]';
BEGIN
    IF coalesce(name, '') = '' OR length(name) > 200 OR name ~ unprintable OR name LIKE 'tube:%' THEN
        PERFORM stream_refuse_argument(format('%L is no name for a stream', left(name, 240)),
            '1 to 200 characters, none of them white space or unprintable, and not beginning with tube:');
    END IF;
    IF EXISTS (SELECT FROM stream s WHERE s.name = stream_check_name.name) THEN
        PERFORM stream_refuse(format('there is a stream %s already', name),
            format('take another name, or run: SELECT %I.stream_remove(%L)', current_schema(), name));
    END IF;
END
$$;
