-- The daemon that publishes to Redis: a lease for each server, with the tokens that are published (docs/transports.md).

-- redis_publisher: the daemon that publishes the streams of a server to Redis, and the tokens that it has published. One
-- row for each name of a server. A holder is replaced when its beat has not changed for its time to live, by the clock of
-- whoever looks. Beats and terms come from one sequence, so that no number is ever used twice. Written by redis_claim,
-- redis_renew and redis_release.
CREATE SEQUENCE IF NOT EXISTS redis_beat_seq;
COMMENT ON SEQUENCE redis_beat_seq IS 'replicad: the terms and beats of those who publish to Redis';

CREATE TABLE IF NOT EXISTS redis_publisher (
    server text PRIMARY KEY,                 -- the name in SERVER, which is the name of the channel too
    holder text,                             -- the daemon; NULL: none
    term bigint NOT NULL,
    beat bigint NOT NULL,
    tokens jsonb NOT NULL DEFAULT '{}',      -- the token of each stream: everything up to it has been published
    renewed_at timestamptz NOT NULL DEFAULT clock_timestamp()  -- for people: no decision depends on it
);
ALTER TABLE redis_publisher SET (fillfactor = 50);  -- updated in place, again and again
COMMENT ON TABLE redis_publisher IS 'replicad: which daemon publishes to Redis, and up to where';

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

-- redis_renew(server, term, tokens): a sign of life of the publisher, with the tokens that it has published since. Returns
-- false if the term is no longer the present term: then that daemon may publish nothing more. Writes redis_publisher.
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

-- redis_release(server, term, tokens): the publisher gives its role back, with the tokens that it has published. Changes
-- nothing under another term. Writes redis_publisher.
CREATE OR REPLACE FUNCTION redis_release(server text, term bigint, tokens jsonb) RETURNS void
LANGUAGE sql AS $$
    UPDATE redis_publisher p
    SET holder = NULL, beat = nextval('redis_beat_seq'), tokens = redis_release.tokens, renewed_at = clock_timestamp()
    WHERE p.server = redis_release.server AND p.term = redis_release.term
$$;

-- Every function looks its neighbours up in this schema alone, whatever the caller's search_path.
DO $settings$
DECLARE
    name regprocedure;
BEGIN
    FOR name IN SELECT p.oid FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = current_schema() AND p.proname ~ '^redis_'
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', name, current_schema());
    END LOOP;
END
$settings$;
