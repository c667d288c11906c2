-- stream_trim_note(number, upto, finished): notes up to where a stream is trimmed, for those who may delete from its table,
-- who need no right on ours. Raises insufficient_privilege, and RS002 above what was published: readers would be told that
-- rows are gone which they have yet to get. Writes stream, and stream_mark when it is finished.
CREATE OR REPLACE FUNCTION stream_trim_note(stream_number integer, upto bigint, finished boolean) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF NOT (SELECT has_table_privilege(session_user, s.relation, 'DELETE') FROM stream s WHERE s.number = stream_number) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('role %I may not delete from the table of the stream', session_user);
    END IF;
    IF (upto <= (SELECT p.position FROM stream_position p WHERE p.stream = stream_number AND p.writer = 0)) IS NOT TRUE THEN
        PERFORM stream_refuse(format('rows up to %s were not published yet', upto), 'use stream_trim');
    END IF;
    UPDATE stream x SET trimmed_upto = greatest(x.trimmed_upto, upto) WHERE x.number = stream_number;
    IF finished THEN
        DELETE FROM stream_mark m WHERE m.stream = stream_number AND m.position < upto
            AND m.at < (SELECT max(x.at) FROM stream_mark x WHERE x.stream = stream_number AND x.position <= upto);
    END IF;
END
$$;
