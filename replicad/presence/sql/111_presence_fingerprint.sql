-- presence_fingerprint(): changes whenever rows that told of users who are online may be gone: by a trim, a restore, or
-- because somebody emptied the table. Cheap enough to be asked every second; what is missing, presence_retell finds.
CREATE OR REPLACE FUNCTION presence_fingerprint() RETURNS text
LANGUAGE sql VOLATILE AS $$
    SELECT concat_ws(' ', stream_epoch(s), coalesce(s.trimmed_upto, 0),
        (SELECT coalesce(max(u.told), 0) FROM presence_user u) > (SELECT coalesce(max(p.id), 0) FROM presence_stream p))
    FROM stream s WHERE s.name = 'presence'
$$;
