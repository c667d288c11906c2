-- redis_claim(server, holder, seen): the role of the publisher for a daemon, if it is free, or if its beat is still `seen`
-- (NULL: only if it is free). Returns the new term and the tokens to go on from; no row if another has it. Writes
-- redis_publisher.
CREATE OR REPLACE FUNCTION redis_claim(server text, holder text, seen bigint) RETURNS TABLE (term bigint, tokens jsonb)
LANGUAGE sql AS $$
    INSERT INTO redis_publisher AS p (server, holder, term, beat)
    VALUES (redis_claim.server, redis_claim.holder, nextval('redis_beat_seq'), nextval('redis_beat_seq'))
    ON CONFLICT ON CONSTRAINT redis_publisher_pkey DO UPDATE
    SET holder = excluded.holder, term = excluded.term, beat = excluded.beat, renewed_at = clock_timestamp()
    WHERE p.holder IS NULL OR p.beat = redis_claim.seen
    RETURNING p.term, p.tokens
$$;
