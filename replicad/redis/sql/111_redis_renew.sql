-- redis_renew(server, term, tokens): a sign of life of the publisher, with what it has published since. False if the term is
-- no longer the present one: it may publish nothing more. Writes redis_publisher.
CREATE OR REPLACE FUNCTION redis_renew(server text, term bigint, tokens jsonb) RETURNS boolean
LANGUAGE sql AS $$
    WITH renewed AS (
        UPDATE redis_publisher p
        SET beat = nextval('redis_beat_seq'), tokens = redis_renew.tokens, renewed_at = clock_timestamp()
        WHERE p.server = redis_renew.server AND p.term = redis_renew.term AND p.holder IS NOT NULL
        RETURNING 1
    )
    SELECT EXISTS (SELECT FROM renewed)
$$;
