-- stream_writers_discover(s): gives numbers to the writers of the newest 100,000 rows: enough for those that are alive,
-- and bounded. Others get theirs when they write again; so do those beyond the number that a daemon lists. Where there
-- are no rows, and without an instance column, there is one: master.
CREATE OR REPLACE FUNCTION stream_writers_discover(s stream) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    names text[] := ARRAY['master'];
BEGIN
    IF s.instance_column IS NOT NULL THEN
        names := ARRAY(SELECT stream_as_owner(s.relation, format('SELECT DISTINCT instance FROM ('
            'SELECT coalesce(t.%I::text, '''') COLLATE "C" FROM %s AS t ORDER BY t.%I DESC LIMIT 100000) newest(instance)'
            ' LIMIT 10001', s.instance_column, stream_qualified(s.relation), s.id_column)));
    END IF;
    PERFORM stream_writers_ensure(s.number, coalesce(nullif(names, '{}'), ARRAY['master']));
END
$$;
