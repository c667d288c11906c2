-- federation_source_key(source, sender): the second half of the advisory lock that a running sender of the source holds,
-- for its session. The first half is 1380992595. In the form of two integers it never meets the locks of streams.
CREATE OR REPLACE FUNCTION federation_source_key(source text, sender text) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT hashtext('federation_sender'::regclass::oid::text || ' '
        || source || ', ' || sender)  -- no name has a comma in it
$$;
-- federation_source_running(source): the senders of a source that are running, and how they share the destinations.
CREATE OR REPLACE FUNCTION federation_source_running(source text) RETURNS TABLE (name text, senders text[])
LANGUAGE sql STABLE AS $$
    SELECT DISTINCT s.name, s.senders
    FROM federation_sender s
    JOIN pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.classid = 1380992595
        AND l.objid::bigint = (federation_source_key(s.source, s.name)::bigint & 4294967295)
    WHERE s.source = federation_source_running.source
$$;
