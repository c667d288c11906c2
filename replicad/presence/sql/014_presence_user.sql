-- presence_user: the users that are online. Its rows are also the locks under which a user's state is decided: whoever
-- changes presence_seen holds the row of that user. Written by presence_apply, presence_settle and presence_retell.
CREATE TABLE IF NOT EXISTS presence_user (
    user_id text COLLATE "C" PRIMARY KEY,
    told bigint,                              -- the row of presence_stream that said so; NULL: not said yet
    last_sync bigint NOT NULL                 -- the latest that workers spoke of, ms since 1970
);
CREATE INDEX IF NOT EXISTS presence_user_told ON presence_user (told);
COMMENT ON TABLE presence_user IS 'replicad: the users that are online';
