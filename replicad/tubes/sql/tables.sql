-- The tables of all tubes. Each tube has a table of pods besides, which queue.sql makes.

-- tube_seq: numbers the pods of all tubes of this schema. Positions depend on CACHE 1; never change it.
-- tube_registry: one row per tube. Written by tube_ensure_exists, tube_ensure_absent, tube_pause and tube_resume. Functions that change leases,
-- attachments or the number of partitions of a tube lock its row first.
CREATE SEQUENCE IF NOT EXISTS tube_seq;
COMMENT ON SEQUENCE tube_seq IS 'replicad: seq of the pods of all tubes; must keep CACHE 1';

CREATE TABLE IF NOT EXISTS tube_registry (
    tube text PRIMARY KEY,                    -- also the name of the table that holds the pods
    partitions integer NOT NULL CHECK (partitions BETWEEN 1 AND 32768),
    predicate text,                           -- SQL on a row of any attached table; NULL: every row
    path name[] NOT NULL,                     -- schemas in which names of the predicate are looked up
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    on_fork text NOT NULL DEFAULT 'report' CHECK (on_fork IN ('report', 'backfill')),  -- see tube_on_fork
    keys text NOT NULL DEFAULT 'bigint' CHECK (keys IN ('bigint', 'text')),  -- the kind of keys: see keys.sql
    paused_at timestamptz,                    -- since when daemons give its pods to no reader; NULL: they do
    paused_why text                           -- the reason that was given with it
);
COMMENT ON TABLE tube_registry IS 'replicad: the tubes; use tube_ensure_exists() and tube_ensure_absent()';

-- tube_attachment: one row per tube and table with the tube's triggers. The root of a partition or heir is the table
-- that was attached by name. Written by tube_table_ensure_attached and tube_table_ensure_detached.
CREATE TABLE IF NOT EXISTS tube_attachment (
    tube text NOT NULL REFERENCES tube_registry ON DELETE CASCADE,
    tbl regclass NOT NULL,
    root regclass NOT NULL,
    shard integer NOT NULL CHECK (shard >= 0),
    predicate text,                           -- on top of the tube's own
    routing text,                             -- SQL on a row that yields its shard; NULL: shard for every row
    path name[] NOT NULL,                     -- schemas in which names of predicate and routing are looked up
    key name[] NOT NULL,                      -- the columns that name a row
    given name[] NOT NULL,                    -- the schema and the name of root when it was attached
    PRIMARY KEY (tube, tbl)
);
COMMENT ON TABLE tube_attachment IS 'replicad: which tables touch which tubes; use tube_table_ensure_attached()';

-- tube_own_shard: tables that have a shard of their own in a tube of many tables (tube_shard_ensure), so that a shard says of
-- which table its ids are. Rows stay when a table is detached or dropped: no other table may get the number, because pods and
-- rows downstream may still have it. Written by tube_shard_ensure and tube_table_ensure_attached.
CREATE TABLE IF NOT EXISTS tube_own_shard (
    tube text NOT NULL REFERENCES tube_registry ON DELETE CASCADE,
    shard integer NOT NULL,
    tbl oid NOT NULL,
    given name[] NOT NULL,                    -- the schema and the name of the table when it was attached last
    key name[] NOT NULL,                      -- the columns that name a row
    PRIMARY KEY (tube, shard),
    UNIQUE (tube, tbl)
);
COMMENT ON TABLE tube_own_shard IS 'replicad: of which table the ids of a shard are, in tubes of many tables';

-- tube_generation: the generations of the history of all tubes of this schema (generations.sql), with the server and the
-- sequence with which each began; `shared`: the seq up to which the pods of each tube are those of the generation before.
-- Written by tube_fork, which keeps the last 1,000.
CREATE TABLE IF NOT EXISTS tube_generation (
    number integer PRIMARY KEY,
    id text NOT NULL UNIQUE,                  -- random
    reason text NOT NULL,                     -- first, other_server, promoted, restored, restarted, ids_went_back, ...
    shared jsonb NOT NULL,                    -- {tube: seq}; a tube that is missing shares nothing
    shared_at timestamptz,                    -- when these were noted
    after_term bigint NOT NULL,               -- its leases have higher terms, all leases of before have lower ones
    incarnation text NOT NULL,                -- of tube_incarnation
    run text NOT NULL,                        -- of the server, as tube_generation_valid compares it
    sequence oid NOT NULL,
    file text NOT NULL,                       -- of the sequence, as of pg_relation_filepath: it names the database too
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE tube_generation IS 'replicad: the generations of the history of tubes';

-- tube_noted: one row, the positions of all tubes that daemons have noted, {tube: seq}. Written by tube_note about once a
-- second, while pods come.
CREATE TABLE IF NOT EXISTS tube_noted (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    number bigint NOT NULL DEFAULT 1,         -- grows with each note
    positions jsonb NOT NULL,
    noted_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE tube_noted IS 'replicad: the positions of tubes up to which no pod is lost by a restore of this database';

-- tube_lease: the holder of each partition, which may read and ack it. Written by tube_lease_claim, _renew and _release.
-- tube_term_seq numbers terms and beats. No number is used twice: a changed beat shows without any clock that the holder is
-- alive, and no new lease has an old term (tube_term_next).
CREATE SEQUENCE IF NOT EXISTS tube_term_seq;
COMMENT ON SEQUENCE tube_term_seq IS 'replicad: terms and beats of all leases';

CREATE TABLE IF NOT EXISTS tube_lease (
    tube text NOT NULL REFERENCES tube_registry ON DELETE CASCADE,
    partitions integer NOT NULL,
    partition integer NOT NULL CHECK (partition BETWEEN 0 AND partitions - 1),
    holder text NOT NULL,
    term bigint NOT NULL,
    beat bigint NOT NULL,                     -- changes with every renewal
    ttl interval NOT NULL,                    -- unchanged for this long on the watcher's own clock: expired
    generation text NOT NULL,                 -- in which it was given; it is void in any other
    PRIMARY KEY (tube, partitions, partition)
);
COMMENT ON TABLE tube_lease IS 'replicad: leases of partitions, fenced by their term';

-- tube_parked: pods, or ids of pods, that failed too often. Written by tube_park, tube_parked_replay and _drop.
CREATE TABLE IF NOT EXISTS tube_parked (
    parked bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    tube text NOT NULL REFERENCES tube_registry ON DELETE CASCADE,
    seq bigint NOT NULL,                      -- the pod's when it was parked
    op character(1) NOT NULL,
    shard integer NOT NULL,
    ids bigint[] NOT NULL,                    -- empty if the tube has keys of kind text
    payload jsonb,
    ts timestamptz NOT NULL,                  -- the pod's
    tries integer NOT NULL,
    error text NOT NULL,
    parked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    keys text[]                               -- the ids, if the tube has keys of kind text
);
CREATE INDEX IF NOT EXISTS tube_parked_tube ON tube_parked (tube, parked);
COMMENT ON TABLE tube_parked IS 'replicad: what failed too often; use tube_parked_list(), _replay() and _drop()';

-- tube_backfill: the latest backfill of each attached table. Written by tube_backfill_step3 and tube_backfill_chunk.
-- The row of a finished backfill stays until its control pods have left the tube; it shows to which table they belong.
CREATE TABLE IF NOT EXISTS tube_backfill (
    tube text NOT NULL REFERENCES tube_registry ON DELETE CASCADE,
    tbl regclass NOT NULL,
    shard integer NOT NULL,
    start_seq text NOT NULL,                  -- of tube_backfill_step1, as in the control pods
    order_col name NOT NULL,
    after_value text,                         -- order_col of the last id that is in the tube; NULL: none, or it is NULL
    after_key text[],                         -- the columns of its key; NULL: none yet
    shards integer[] NOT NULL,                -- those with a backfill_start pod
    ids bigint NOT NULL DEFAULT 0,            -- how many are in the tube
    approx_ids bigint,                        -- how many there are, by the planner's statistics
    finished boolean NOT NULL DEFAULT false,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tube, tbl)
);
COMMENT ON TABLE tube_backfill IS 'replicad: progress of backfills';

-- tube_missed: changes of attached tables that may be missing from the tube, each an event that lasts until the table has been
-- backfilled (missed.sql). Rows stay for 30 days after that: who comes late is not told of it again.
CREATE TABLE IF NOT EXISTS tube_missed (
    tube text NOT NULL REFERENCES tube_registry ON DELETE CASCADE,
    cause text NOT NULL,                      -- `fork ID` of the generation that began, `triggers`: they were off, or `partitions`
    tbl oid NOT NULL,                         -- the attached table, not a partition of it
    after bigint,                             -- of a fork: the touches with a seq in (after, upto] are unknown
    upto bigint,
    lasts boolean NOT NULL DEFAULT false,     -- the cause is there still, so a backfill cannot end the event yet
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),  -- only a backfill that began later counts
    healed_at timestamptz,
    PRIMARY KEY (tube, cause, tbl)
);
COMMENT ON TABLE tube_missed IS 'replicad: changes that a tube may have missed; a backfill ends them';

-- tube_attempt: what the reader of a partition was doing, for the reader after it. Its lease ends with the process, and the
-- row stays. Written by tube_attempt_put.
CREATE TABLE IF NOT EXISTS tube_attempt (
    tube text NOT NULL REFERENCES tube_registry ON DELETE CASCADE,
    partitions integer NOT NULL,
    partition integer NOT NULL,
    note jsonb NOT NULL,                      -- the text of the reader; the database does not read it
    PRIMARY KEY (tube, partitions, partition)
);
COMMENT ON TABLE tube_attempt IS 'replicad: what the readers of partitions were doing when they noted it';

-- tube_worker: the workers that divide the partitions of a tube among themselves, each while it is alive. The number of
-- partitions that each should hold follows from it; the leases say which it holds. Written by tube_worker_beat. There is no
-- foreign key: a worker must not wait for a session that alters the tube.
CREATE TABLE IF NOT EXISTS tube_worker (
    tube text NOT NULL,
    worker text NOT NULL,                     -- the holder of its leases, as in tube_lease
    seen_at timestamptz NOT NULL,
    ttl interval NOT NULL,
    PRIMARY KEY (tube, worker)
);
COMMENT ON TABLE tube_worker IS 'replicad: the living workers that divide the partitions of tubes';

-- tube_trigger_seen: the triggers of each attached table and partition as they were seen last, to notice that they were off or
-- replaced meanwhile. Written by tube_triggers_check and tube_triggers_note. There is no foreign key: a look must not wait for
-- a backfill that has locked the attachment.
CREATE TABLE IF NOT EXISTS tube_trigger_seen (
    tube text NOT NULL,
    tbl oid NOT NULL,
    marks text NOT NULL,                      -- of tube_trigger_marks
    PRIMARY KEY (tube, tbl)
);
COMMENT ON TABLE tube_trigger_seen IS 'replicad: the triggers of attached tables, to notice that they were off';

-- tube_report: the last report of each reader of a tube. Written by tube_report_put.
CREATE TABLE IF NOT EXISTS tube_report (
    tube text NOT NULL REFERENCES tube_registry ON DELETE CASCADE,
    reporter text NOT NULL,                   -- who counts: a pipeline, say
    counts jsonb NOT NULL,
    reported_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tube, reporter)
);
COMMENT ON TABLE tube_report IS 'replicad: what readers of tubes have counted';

-- tube_shard: the shards of which pods have left a tube, so the shards of which a downstream may hold rows. A backfill
-- of a table with routing asks for their garbage, also if the table has no more row in a shard. Written by tube_remove,
-- tube_remove_range and tube_park, and not by the triggers: it costs writers nothing. An ack must not wait here while it
-- holds pods or its lease, and others wait for them. So there is no foreign key and no unique key: transactions that note
-- a shard at the same time leave two rows.
CREATE TABLE IF NOT EXISTS tube_shard (
    tube text NOT NULL,
    shard integer NOT NULL
);
CREATE INDEX IF NOT EXISTS tube_shard_noted ON tube_shard (tube, shard);
COMMENT ON TABLE tube_shard IS 'replicad: the shards of which a downstream may hold rows';

-- tube_low: low-water marks. A partition has no pod of that kind at or below seq, and none can appear there, so every read
-- begins behind it. Otherwise a read from the start passes all index entries of pods that were acked and that VACUUM may
-- not remove yet, because some transaction holds an old snapshot. Written by tube_low_raise. It is changed once in
-- thousands of acks, since its own old rows stay as long as the old rows of the pods. There is no foreign key: an ack must
-- not wait for a session that alters the tube.
CREATE TABLE IF NOT EXISTS tube_low (
    tube text NOT NULL,
    partitions integer NOT NULL,
    partition integer NOT NULL,
    backfill boolean NOT NULL,                -- the mark of backfill pods, or of regular ones
    seq bigint NOT NULL,
    PRIMARY KEY (tube, partitions, partition, backfill)
);
COMMENT ON TABLE tube_low IS 'replicad: below which seq a partition has no pods any more';
