-- federation_key(sender): the second half of the advisory lock that a running sender holds, for its session. The first
-- half is 1380992595. In the form of two integers it never meets the locks of streams.
CREATE OR REPLACE FUNCTION federation_key(sender text) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT hashtext('federation_sender'::regclass::oid::text || ' ' || sender)
$$;
COMMENT ON FUNCTION federation_key(text) IS 'Advisory lock key of a running sender';
