-- stream_generation_now(s): the present generation of a stream; NULL while a dump is being restored that has not come
-- to the generations.
CREATE OR REPLACE FUNCTION stream_generation_now(s stream) RETURNS stream_generation
LANGUAGE sql STABLE AS $$
    SELECT g FROM stream_generation g WHERE g.stream = s.number ORDER BY g.number DESC LIMIT 1
$$;
-- stream_epoch(s): the id of the present generation, which is the epoch of tokens.
CREATE OR REPLACE FUNCTION stream_epoch(s stream) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT (stream_generation_now(s)).id
$$;
-- stream_continues(s, g): whether generation `g` is valid still: the server, the table, the sequence and the sequence's
-- file are those in which it began. A sequence that is gone is a fault of its own (stream_fault), no fork.
CREATE OR REPLACE FUNCTION stream_continues(s stream, g stream_generation) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT g.incarnation = stream_incarnation() AND g.relation = s.relation::oid AND g.sequence = s.sequence::oid
        AND g.file IS NOT DISTINCT FROM coalesce(pg_relation_filenode(s.sequence), g.file)
$$;
