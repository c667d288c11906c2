-- redis_release(server, term, tokens): the publisher gives its role back, with what it has published. Changes nothing under
-- another term. Writes redis_publisher.
CREATE OR REPLACE FUNCTION redis_release(server text, term bigint, tokens jsonb) RETURNS void
LANGUAGE sql AS $$
    UPDATE redis_publisher p
    SET holder = NULL, beat = nextval('redis_beat_seq'), tokens = redis_release.tokens, renewed_at = clock_timestamp()
    WHERE p.server = redis_release.server AND p.term = redis_release.term
$$;
