-- stream_generation: the generations of each stream. A generation is a stretch of history in which no position was taken
-- back. The one with the highest number is the present one. `incarnation`, `relation`, `sequence` and `file` are the
-- server, the table, the sequence and the sequence's file in which it is valid: where one of them is another, history may
-- have forked. `table_files` helps to tell the two changes of a sequence's file apart: TRUNCATE ... RESTART IDENTITY
-- replaces the files of the table too, ALTER SEQUENCE does not. Written by stream_add and stream_fork, read by every daemon once a second. docs/positions.md explains it.
CREATE TABLE IF NOT EXISTS stream_generation (
    stream smallint NOT NULL REFERENCES stream ON DELETE CASCADE,
    number integer NOT NULL,
    id text NOT NULL,                         -- hexadecimal digits; the epoch of tokens
    began_at bigint NOT NULL,                 -- history up to here is shared with the generation before
    writers integer[] NOT NULL,               -- numbers of the writers that are ahead of began_at
    positions bigint[] NOT NULL,              -- and up to where their history is shared
    reason text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    incarnation text NOT NULL,
    relation oid NOT NULL,
    sequence oid NOT NULL,
    file oid,
    table_files text,                         -- of the table's tree, while the sequence had that file: stream_note
    PRIMARY KEY (stream, number)
);
COMMENT ON TABLE stream_generation IS 'replicad: stretches of a stream''s history that did not fork';
