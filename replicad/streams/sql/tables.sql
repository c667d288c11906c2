-- The tables of all streams, and of the daemons that serve them.

-- stream: the registry, one row per stream. Written by stream_add, stream_remove, stream_max_row and stream_trim.
CREATE TABLE IF NOT EXISTS stream (
    number smallint PRIMARY KEY CHECK (number BETWEEN 1 AND 8191),  -- stands in the keys of advisory locks
    name text NOT NULL UNIQUE,
    relation regclass NOT NULL,
    id_column name NOT NULL,
    instance_column name,                     -- NULL: one writer, called master
    row_sql text,                             -- NULL: the whole row as a JSON object
    row_type text NOT NULL,                   -- json, jsonb or text: what row_sql yields
    method text NOT NULL CHECK (method IN ('lock_watch', 'reservation', 'positions_table')),
    sequence regclass NOT NULL,
    positions regclass,                       -- where the writers publish, for positions_table
    setting text NOT NULL,                    -- transaction-local memory of a reservation, of a name nobody else uses
    trimmed_upto bigint,                      -- ids up to here are gone on purpose; a token below has missed rows
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- bytes of the longest line that the stream may send; 64 MiB is what clients take at most
    max_row integer NOT NULL DEFAULT 67108864 CHECK (max_row BETWEEN 1024 AND 67108864),
    fed boolean NOT NULL DEFAULT false,       -- when it was added, the sequence was the one that feeds the column
    -- the schema and the name that the table, the sequence and the table of positions had when the stream was added: what the
    -- user meant. Where they lead to another relation now, the stream stops (stream_name_fault). NULL: not compared
    relation_named text[],
    sequence_named text[],
    positions_named text[],
    also_feeds regclass[] NOT NULL DEFAULT '{}',  -- the other tables that the sequence fed then
    keep_for interval CHECK (keep_for > '0'),  -- stream_keep_rules: older rows go, where keep_rows lets them; NULL: no rule
    keep_rows bigint CHECK (keep_rows > 0),   -- so many of the newest rows stay; NULL: no rule
    parted oid[] NOT NULL DEFAULT '{}'  -- tables that were partitions or heirs, and draw from the sequence still
);
COMMENT ON TABLE stream IS 'replicad: the registered streams; use stream_add() and stream_remove()';

-- stream_writer: the small persistent number of each writer of a stream, which vector tokens are made of.
CREATE TABLE IF NOT EXISTS stream_writer (
    stream smallint NOT NULL REFERENCES stream ON DELETE CASCADE,
    number integer NOT NULL CHECK (number BETWEEN 1 AND 999999999),
    name text NOT NULL,                       -- as stream_instance() writes it
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (stream, number),
    UNIQUE (stream, name),
    retired_at timestamptz                    -- an operator has said that it writes no more; its number stays taken
);
COMMENT ON TABLE stream_writer IS 'replicad: numbers of writers, stable for the life of the stream';

-- stream_position: how far each stream was published last. Written about once a second by every daemon that serves it, read
-- by a daemon that starts: a published position is taken back only by a new generation, which begins here.
CREATE TABLE IF NOT EXISTS stream_position (
    stream smallint NOT NULL REFERENCES stream ON DELETE CASCADE,
    writer integer NOT NULL,                  -- a number of stream_writer; 0: all writers together (linear)
    position bigint NOT NULL,
    published_at timestamptz NOT NULL,
    PRIMARY KEY (stream, writer)
);
ALTER TABLE stream_position SET (fillfactor = 50);  -- updated in place, again and again
COMMENT ON TABLE stream_position IS 'replicad: last published position per stream and writer (0: linear)';

-- stream_mark: the position of a stream at a time, at most once a minute for a day and once an hour before that. Turns an
-- age into an id for tables that have no column of time. Written by stream_note, cut by stream_trim.
CREATE TABLE IF NOT EXISTS stream_mark (
    stream smallint NOT NULL REFERENCES stream ON DELETE CASCADE,
    at timestamptz NOT NULL,
    position bigint NOT NULL,
    hourly boolean NOT NULL,                  -- the first of its hour: kept when the others go
    PRIMARY KEY (stream, at)
);
COMMENT ON TABLE stream_mark IS 'replicad: positions of the past, to trim by age';

-- stream_ack: up to which token each sender has acknowledged a stream by FEDERATION_ACK. Written by stream_ack_note.
CREATE TABLE IF NOT EXISTS stream_ack (
    stream smallint NOT NULL REFERENCES stream ON DELETE CASCADE,
    instance text COLLATE "C" NOT NULL,
    token bigint NOT NULL,
    generation text NOT NULL,                 -- in which the token holds
    acked_at timestamptz NOT NULL,
    PRIMARY KEY (stream, instance)
);
ALTER TABLE stream_ack SET (fillfactor = 50);  -- updated in place, again and again
COMMENT ON TABLE stream_ack IS 'replicad: what senders have acknowledged';

-- stream_skip: ids that an operator has taken out of a stream, because their rows cannot be read or are too long. Readers
-- are never sent them. Written by stream_skip_id, read with the registry.
CREATE TABLE IF NOT EXISTS stream_skip (
    stream smallint NOT NULL REFERENCES stream ON DELETE CASCADE,
    id bigint NOT NULL,
    reason text NOT NULL,                     -- what was wrong with the row, as far as it was known
    skipped_by text NOT NULL DEFAULT session_user,
    skipped_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (stream, id)
);
COMMENT ON TABLE stream_skip IS 'replicad: rows that an operator has taken out of a stream';

-- stream_trouble: the troubles that daemons report at this moment, of streams, tubes and themselves. Each daemon replaces
-- its rows every few seconds; rows that were not refreshed for 15 s belong to a daemon that is no longer running. Written
-- by stream_trouble_write, read by stream_troubles. UNLOGGED: after a crash the daemons write it anew.
CREATE UNLOGGED TABLE IF NOT EXISTS stream_trouble (
    daemon text NOT NULL,
    kind text NOT NULL,                       -- stream, tube, service, ...
    name text NOT NULL,                       -- of the stream, the tube, the service
    cause text NOT NULL,                      -- the work that fails: registry, copy, ...
    code text NOT NULL,
    reason text NOT NULL,
    since timestamptz NOT NULL,
    seen_at timestamptz NOT NULL,
    PRIMARY KEY (daemon, kind, name, cause)
);
COMMENT ON TABLE stream_trouble IS 'replicad: what running daemons report to be wrong';

-- stream_generation: the generations of each stream. A generation is a stretch of history in which no position was taken
-- back. The generation with the highest number is the present one. `incarnation`, `relation`, `sequence` and `file` are the
-- server, the table, the sequence and the sequence's file in which it is valid: where one of them differs, history may have
-- forked. `table_files` helps to tell the two changes of a sequence's file apart: TRUNCATE ... RESTART IDENTITY replaces
-- the files of the table too, ALTER SEQUENCE does not. Written by stream_add and stream_fork, read by every daemon once a
-- second. docs/positions.md explains it.
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

-- stream_relay_key: one secret, from which two things are made: the name of the channel on which daemons reach each other
-- by NOTIFY, and the key with which they sign what they send there. Any role may send on any channel, and the name of a
-- channel is shown to roles with pg_read_all_stats; the key is not. To change both: DELETE the row and INSERT a new one;
-- the daemons take it over within 10 s. Nothing else writes it. Read by stream_relay_channel and stream_relay_secret.
CREATE TABLE IF NOT EXISTS stream_relay_key (
    single boolean PRIMARY KEY DEFAULT true CHECK (single),
    key text NOT NULL DEFAULT replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', '') CHECK (length(key) >= 32)
);
COMMENT ON TABLE stream_relay_key IS 'A secret of the daemons: nobody else may read it';
REVOKE ALL ON stream_relay_key FROM PUBLIC;
INSERT INTO stream_relay_key DEFAULT VALUES ON CONFLICT DO NOTHING;

-- stream_reservation_key: one secret, from which the proofs of reservations are made (stream_prove). Read by that function,
-- which runs with its owner's rights, and by daemons. It must stay the same while ids are reserved: with another secret the
-- daemons would not know the locks that are held. Written by the installation.
CREATE TABLE IF NOT EXISTS stream_reservation_key (
    single boolean PRIMARY KEY DEFAULT true CHECK (single),
    key bytea NOT NULL DEFAULT sha256(convert_to(gen_random_uuid()::text || gen_random_uuid()::text, 'UTF8'))
        CHECK (length(key) = 32)
);
COMMENT ON TABLE stream_reservation_key IS 'A secret of replicad: no role of a user may read it. Never change it';
REVOKE ALL ON stream_reservation_key FROM PUBLIC;
INSERT INTO stream_reservation_key DEFAULT VALUES ON CONFLICT DO NOTHING;

-- stream_daemon: one row for each daemon of this database. It sends a beat every few seconds and removes its row when it
-- stops; a row without a beat belongs to a daemon that was killed, or that cannot reach Postgres. Only the clock of
-- Postgres takes part, and nothing depends on it but lists for operators. `host` is the address of the daemon as Postgres
-- sees it; NULL: a Unix socket. Written by stream_daemon_beat and stream_daemon_leave, read by stream_daemons. UNLOGGED:
-- after a crash of Postgres the daemons write it anew.
CREATE UNLOGGED TABLE IF NOT EXISTS stream_daemon (
    id uuid PRIMARY KEY,
    name text NOT NULL,                       -- --server-name
    pid integer NOT NULL,
    host inet,
    addresses text[] NOT NULL,                -- where clients connect
    version text NOT NULL,
    started_at timestamptz NOT NULL,
    seen_at timestamptz NOT NULL
) WITH (fillfactor = 50);
COMMENT ON TABLE stream_daemon IS 'replicad: the daemons of this database, each with its last beat';

-- stream_changes: the streams that have the changes of a table (changes.sql). Written by stream_add_changes and
-- stream_changes_look. Columns are noted by their numbers, so that they can be renamed.
CREATE TABLE IF NOT EXISTS stream_changes (
    stream smallint PRIMARY KEY REFERENCES stream ON DELETE CASCADE,
    source regclass NOT NULL,                 -- the table whose changes are recorded; the stream's own table is change_N
    key smallint[] NOT NULL,                  -- the columns that name a row
    columns smallint[],                       -- of the rows that are sent; NULL: all, and those that are added later
    predicate text,                           -- SQL on a row (called t) for the rows that are in the stream; NULL: all
    path name[] NOT NULL,                     -- where names of the predicate are looked up
    old boolean NOT NULL,                     -- whether the row before a change is sent
    omit boolean NOT NULL,                    -- whether large columns are left out of an UPDATE that has not changed them
    filters smallint[] NOT NULL,              -- the columns whose values are in by_1, by_2 ... of the table of changes
    marks text,                               -- what the trigger function was made for: stream_changes_look
    extended xid8,                            -- statements of older transactions may not see the newest partition; NULL: not known yet
    missed text,                              -- why changes may not have been recorded, since the last snapshot from the beginning
    missed_at timestamptz
);
COMMENT ON TABLE stream_changes IS 'replicad: the streams of changes, and the tables whose changes they have';

-- stream_shape: the shapes that the source of a stream of changes has had since the stream was added. The same shape may be noted
-- more than once (stream_shape_ensure). Written by stream_shape_ensure.
CREATE TABLE IF NOT EXISTS stream_shape (
    stream smallint NOT NULL REFERENCES stream ON DELETE CASCADE,
    number integer NOT NULL,                  -- as changes have it
    shape bigint NOT NULL,                    -- stream_shape_seen
    since bigint NOT NULL,                    -- the id of the change (op s) that describes it
    line text NOT NULL                        -- that change, as readers get it; it stays when old changes are removed
);
CREATE INDEX IF NOT EXISTS stream_shape_number ON stream_shape (stream, number);
COMMENT ON TABLE stream_shape IS 'replicad: the shapes of tables whose changes are streams';

-- stream_change_member: the tables, partitions included, that have triggers of a stream of changes, and the rows of these triggers in
-- pg_trigger at the last look. Written by stream_changes_look and stream_changes_note.
CREATE TABLE IF NOT EXISTS stream_change_member (
    stream smallint NOT NULL REFERENCES stream_changes ON DELETE CASCADE,
    member oid NOT NULL,
    marks text NOT NULL,
    PRIMARY KEY (stream, member)
);
COMMENT ON TABLE stream_change_member IS 'replicad: the tables with triggers of a stream of changes';

-- stream_snapshot: the snapshots of streams of changes, and how far each has come. Written by stream_snapshot_request and
-- stream_snapshot_step.
CREATE TABLE IF NOT EXISTS stream_snapshot (
    stream smallint NOT NULL REFERENCES stream_changes ON DELETE CASCADE,
    number integer NOT NULL,
    condition text,                           -- SQL on a row (called t); NULL: all rows
    path name[] NOT NULL,                     -- where names of it are looked up
    member regclass,                          -- only this partition; NULL: the whole table
    after text[],                             -- the key of the last row that was sent; NULL: none yet
    rows bigint NOT NULL DEFAULT 0,           -- that were sent
    asked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz,
    PRIMARY KEY (stream, number)
);
COMMENT ON TABLE stream_snapshot IS 'replicad: snapshots of tables whose changes are streams';

-- stream_kept: the lowest id that each stream's table had when a daemon looked last, and the highest position that was
-- published by then. Written by stream_keep about once a minute: where the lowest id has grown, rows were removed.
CREATE TABLE IF NOT EXISTS stream_kept (
    stream smallint PRIMARY KEY REFERENCES stream ON DELETE CASCADE,
    generation integer NOT NULL,              -- the number of the one in which it was noted
    lowest bigint,                            -- NULL: the table was empty
    published bigint NOT NULL
);
COMMENT ON TABLE stream_kept IS 'replicad: the oldest row of each stream, to notice that rows were removed';
