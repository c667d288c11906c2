-- presence_enlist(name): a new id for a daemon that begins, or begins anew; its first beat is 1. Writes presence_daemon.
CREATE OR REPLACE FUNCTION presence_enlist(name text) RETURNS uuid
LANGUAGE sql AS $$
    INSERT INTO presence_daemon (name) VALUES (presence_enlist.name) RETURNING id
$$;
