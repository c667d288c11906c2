-- writer_slot_of(key, slots): the slot of a key: the first four bytes of the SHA-256 of its UTF-8, as a number, modulo
-- the slots. Nothing of Postgres' own hashing, which may change with a version. Writes nothing.
CREATE OR REPLACE FUNCTION writer_slot_of(key text, slots integer) RETURNS integer
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT (('x' || encode(substr(sha256(convert_to(key, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint % slots)::integer
$$;
