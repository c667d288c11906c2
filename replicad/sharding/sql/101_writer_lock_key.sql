-- writer_lock_key(stream, slot): the second half of the advisory lock of a slot; the first half is 1380992591. In the
-- form of two integers it never meets the locks of streams.
CREATE OR REPLACE FUNCTION writer_lock_key(stream integer, slot integer) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT stream * 65536 + slot
$$;
