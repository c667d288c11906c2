-- redis_publisher: which daemon publishes the streams of a server to Redis, and what it has published. One row for each
-- name of a server. A holder is replaced when its beat has not changed for its time to live, by the clock of whoever looks.
-- Beats and terms come from one sequence, so that no number is ever used twice. Written by redis_claim, redis_renew and
-- redis_release.
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
