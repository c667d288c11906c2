-- stream_denial(what, needed): the sentence that the asking role may not read something, with the GRANT.
CREATE OR REPLACE FUNCTION stream_denial(what text, needed text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('role %s may not read %s; run: GRANT %s TO %1$s', quote_ident(current_user), what, needed)
$$;
