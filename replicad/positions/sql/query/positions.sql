-- The statements of the position readers (docs/positions.md), in the order of a poll, and the statement that waits
-- between two polls.

-- name: horizon_session
-- What the poller must know of a server once per connection.
SELECT
    pg_is_in_recovery() AS standby,
    current_setting('server_version_num')::integer AS version

-- name: horizon_inspect
-- What the watched tables and sequences are like: when a watch begins, after a reconnection, and every few seconds.
-- $1 oid[]: tables. $2 oid[]: sequences. One row for each that exists. `readable`: we may read the sequence, or some
-- column of the table; `owner`: its owner, if that is
-- no superuser; `feeds`: the sum of the oids of the column defaults that draw from the sequence; `reachable`: we may use its schema. Reads catalogs only, so that no lock on a watched table or
-- sequence makes it wait.
SELECT
    c.oid,
    format('%I.%I', n.nspname, c.relname) AS name,
    c.relpersistence::text AS persistence,
    s.seqincrement AS increment,
    s.seqcache AS cache,
    s.seqcycle AS cycle,
    CASE WHEN s.seqrelid IS NOT NULL THEN (
        SELECT coalesce(sum(d.objid::bigint), 0)::bigint FROM pg_depend AS d
        WHERE d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid AND d.classid = 'pg_attrdef'::regclass
    ) END AS feeds,
    CASE WHEN s.seqrelid IS NOT NULL THEN has_sequence_privilege(c.oid, 'SELECT')
        ELSE has_any_column_privilege(c.oid, 'SELECT') END AS readable,
    has_schema_privilege(n.oid, 'USAGE') AS reachable,
    quote_ident(n.nspname) AS schema,
    quote_ident(current_user) AS role,
    (SELECT quote_ident(r.rolname) FROM pg_roles AS r WHERE r.oid = c.relowner AND NOT r.rolsuper) AS owner
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
LEFT JOIN pg_sequence AS s ON s.seqrelid = c.oid
WHERE c.oid = ANY ($1::oid[] || $2::oid[])

-- name: horizon_moved
-- The sequences that have another value or another file than they had when they were read last. Those may have moved; the
-- poll then reads them by the query horizon_last_values.
-- $1 oid[]: sequences. $2 bigint[]: their last values (NULL: unused). $3 bigint[]: their files. A sequence that was dropped, or that we
-- may not read any more, has none.
-- Blocks while somebody alters a sequence: run it with a lock_timeout.
SELECT known.sequence
FROM unnest($1::oid[], $2::bigint[], $3::bigint[]) AS known (sequence, last_value, file)
WHERE pg_relation_filenode(known.sequence) IS DISTINCT FROM known.file::oid
    OR CASE WHEN has_sequence_privilege(known.sequence, 'SELECT') THEN pg_sequence_last_value(known.sequence) END
        IS DISTINCT FROM known.last_value

-- name: horizon_last_values
-- First statement of a poll: how far each watched sequence has got, and how far the WAL.
-- $1 oid[]: sequences. One row for each that still exists; `readable` is whether we may read it.
-- last_value is NULL while no id was taken since the sequence was made, restarted or set with is_called = false. Never
-- `SELECT last_value FROM sequence`: that reads without the buffer's lock and can be up to 32 ahead (docs/positions.md).
-- inserted is evaluated after last_value (the select list is, from left to right): the WAL that makes last_value
-- durable ends at or before it. So is file: where it is still the one of before, the sequence was not restarted by
-- TRUNCATE or ALTER SEQUENCE when last_value was read (setval keeps the file). Blocks while somebody alters the sequence: run it with a lock_timeout.
SELECT
    s.seqrelid AS sequence,
    CASE WHEN has_sequence_privilege(s.seqrelid, 'SELECT') THEN pg_sequence_last_value(s.seqrelid) END AS last_value,
    (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint AS inserted,
    (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint AS flushed,
    has_sequence_privilege(s.seqrelid, 'SELECT') AS readable,
    pg_relation_filenode(s.seqrelid)::bigint AS file
FROM pg_sequence AS s
WHERE s.seqrelid = ANY ($1::oid[])

-- name: horizon_unused_sequence
-- Where a sequence will begin that has handed out nothing since it was made or restarted ({sequence}: quoted name).
-- To be trusted only where pg_sequence_last_value() was NULL before and is NULL after: no nextval() can have been at work.
SELECT last_value, is_called, tableoid::bigint AS found FROM {sequence}

-- name: horizon_last_row
-- The highest id of a watched table that is there and not above the sequence's last value: it was given out, and the WAL
-- has that. Where there is no such row, the value below all ids of the sequence.
-- {table}, {id}: quoted names. $1: the last value. $2: the sequence's oid. `found`: the table that the name leads to now.
SELECT
    coalesce(
        (SELECT max(t.{id})::bigint FROM {table} AS t WHERE t.{id} <= $1::bigint),
        (SELECT greatest(s.seqmin, -9223372036854775807) - 1 FROM pg_sequence AS s WHERE s.seqrelid = $2::oid)
    ) AS last_row,
    to_regclass({name})::oid::bigint AS found

-- name: horizon_holders
-- Second statement of a poll, sent when the first has been answered: who may still write to the watched tables.
-- $1 oid[]: watched tables. $2 oid[]: watched sequences. $3 oid[]: those of the tables from which the sessions of this
-- process that $4 (pids) and $5 (their starts) name only delete: there these do not count. Every other session counts,
-- whatever it calls itself; so does any of these on any other table (a trigger on DELETE may insert there).
-- $6 boolean: whether reservations count only with a proof (a second advisory lock, streams/sql/proofs.sql); its
-- secret is {key}. A secret that is NULL (missing, or it may not be read) makes every reservation count.
-- $7 oid[]: sequences that give ids to one of the tables only; $8 oid[]: that table. Who has taken an id of such a sequence
-- holds it: nextval() locks the sequence until the transaction ends, also where the id was taken before the INSERT, within
-- a savepoint that was rolled back, or for a table that becomes a partition in the same transaction.
-- {moved}: relations whose name leads to another one, and sequences that feed other columns than before ($9 to $13 are
-- the arguments of stream_moved in streams/sql/faults.sql). Why it is enough to look here, with a snapshot that is later than the
-- last values: docs/positions.md, "The name that was given".
-- At least one row; `holder` is NULL when nobody holds anything. A row per holder and watched table (`watched`) or
-- reservation (`number`, `bound`; the encoding is in horizon.py). `unfit`: sequences that no longer hand out ids one by
-- one and upwards, tables of which no column may be read, relations whose name leads to another one, and sequences that
-- feed other columns than before; looked at here, later than the last values, so that these
-- were still read from fit ones.
-- RowExclusiveLock is what every INSERT and COPY takes; the stronger ones stand for LOCK TABLE before nextval(). Locks on
-- partitions and children count for every ancestor.
-- A prepared transaction has no pid; its gid is found through the lock on its transaction id. Its virtual transaction
-- stays the one that it was prepared under, but is another (`-1/xid`) after a restart of the server.
-- PREPARE TRANSACTION hands its locks over one after the other, and we may look in between: some have the pid still, some
-- not any more. So the locks of a transaction are known by its virtual transaction, and by the pid only those of a session.
WITH RECURSIVE locked AS MATERIALIZED (
    SELECT
        l.locktype, l.relation, l.mode, l.virtualtransaction, l.pid, l.transactionid,
        l.classid::bigint AS high, l.objid::bigint AS low
    FROM pg_locks AS l
    WHERE l.granted
        AND (
            l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
            AND (
                (
                    l.locktype = 'relation'
                    AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
                )
                OR (
                    l.locktype = 'advisory' AND l.objsubid = 1 AND l.mode = 'ShareLock'
                    AND (
                        l.classid::bigint >> 16 BETWEEN 20993 AND 29183
                        OR $6 AND l.classid::bigint >> 16 BETWEEN 4609 AND 12799
                    )
                )
            )
            OR l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND (l.pid IS NULL OR $6)
        )
),
secret AS MATERIALIZED (
    SELECT {key} AS key
),
proofs AS MATERIALIZED (
    SELECT l.virtualtransaction, l.pid, (l.high >> 16)::integer - 4608 AS number, ((l.high & 65535) << 32) | l.low AS mark
    FROM locked AS l
    WHERE l.locktype = 'advisory' AND l.high >> 16 BETWEEN 4609 AND 12799
),
claimed AS (
    SELECT p.virtualtransaction, NULL::integer AS session, p.number, p.mark, 'x' || x.transactionid AS holder
    FROM proofs AS p
    JOIN locked AS x ON x.locktype = 'transactionid' AND x.virtualtransaction = p.virtualtransaction
    UNION ALL
    SELECT NULL, p.pid, p.number, p.mark, format('s%s %s', a.pid, a.usesysid)
    FROM proofs AS p JOIN pg_stat_get_activity(NULL) AS a ON a.pid = p.pid
),
proven AS MATERIALIZED (
    SELECT c.virtualtransaction, c.session, c.number
    FROM claimed AS c, secret AS k
    WHERE c.mark = (
        'x' || encode(substr(sha256(k.key || convert_to(c.number || ' ' || c.holder, 'UTF8')), 1, 6), 'hex')
    )::bit(48)::bigint
),
ancestry (relation, ancestor) AS (
    SELECT l.relation, l.relation FROM locked AS l WHERE l.locktype = 'relation'
    UNION
    SELECT a.relation, i.inhparent FROM ancestry AS a JOIN pg_inherits AS i ON i.inhrelid = a.ancestor
),
held AS (
    SELECT a.ancestor AS watched, NULL::integer AS number, NULL::bigint AS bound, l.virtualtransaction, l.pid
    FROM locked AS l JOIN ancestry AS a ON a.relation = l.relation
    WHERE l.locktype = 'relation' AND a.ancestor = ANY ($1::oid[])
    UNION
    SELECT taken.watched, NULL, NULL, l.virtualtransaction, l.pid
    FROM locked AS l JOIN unnest($7::oid[], $8::oid[]) AS taken (sequence, watched) ON taken.sequence = l.relation
    WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock'
    UNION ALL
    SELECT NULL, (l.high >> 16)::integer - 20992, ((l.high & 65535) << 32) | l.low, l.virtualtransaction, l.pid
    FROM locked AS l
    WHERE l.locktype = 'advisory' AND l.high >> 16 > 20992
        AND (
            (l.virtualtransaction, (l.high >> 16)::integer - 20992) IN (
                SELECT p.virtualtransaction, p.number FROM proven AS p WHERE p.session IS NULL
            )
            OR (l.pid, (l.high >> 16)::integer - 20992) IN (
                SELECT p.session, p.number FROM proven AS p WHERE p.session IS NOT NULL
            )
            OR NOT $6 OR (SELECT k.key IS NULL FROM secret AS k)
        )
)
SELECT
    one.flushed,
    one.unfit,
    h.*
FROM (
    SELECT
        (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint AS flushed,
        ARRAY(
            SELECT s.seqrelid FROM pg_sequence AS s
            WHERE s.seqrelid = ANY ($2::oid[]) AND (s.seqcache > 1 OR s.seqincrement < 1 OR s.seqcycle)
            UNION ALL
            SELECT t.oid FROM unnest($1::oid[]) AS t (oid) WHERE NOT has_any_column_privilege(t.oid, 'SELECT')
            UNION ALL
            SELECT unnest({moved})
        ) AS unfit
) AS one
LEFT JOIN (
    SELECT
        e.virtualtransaction AS holder,
        e.watched,
        e.number,
        e.bound,
        e.pid,
        a.application_name,
        CASE
            WHEN getdatabaseencoding() <> 'SQL_ASCII' THEN left(a.query, 200)
            ELSE regexp_replace(left(a.query, 200), '[^\x01-\x7f]', '?', 'g')  -- where every byte may stand in a text
        END AS query,
        CASE WHEN getdatabaseencoding() <> 'SQL_ASCII' THEN p.gid ELSE regexp_replace(p.gid, '[^\x01-\x7f]', '?', 'g') END AS gid,
        extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, a.state_change, p.prepared))::float8 AS age
    FROM held AS e
    LEFT JOIN pg_stat_get_activity(NULL) AS a ON a.pid = e.pid
    LEFT JOIN locked AS x
        ON e.pid IS NULL AND x.locktype = 'transactionid' AND x.virtualtransaction = e.virtualtransaction
    LEFT JOIN pg_prepared_xact() AS p ON p.transaction = x.transactionid
    WHERE e.number IS NOT NULL OR e.watched <> ALL ($3::oid[]) OR NOT EXISTS (
        SELECT FROM unnest($4::integer[], $5::timestamptz[]) AS own (pid, started)
        WHERE own.pid = e.pid AND own.started = a.backend_start
    )
) AS h ON TRUE

-- name: horizon_identity
-- Why the ids of streams may be rows of another table now, or NULL: what a function of ours in the schema {home} says of each.
-- $1 integer[]: numbers of streams.
SELECT w.number, {home}.stream_strayed(w.number) AS reason
FROM unnest($1::integer[]) AS w (number)

-- name: horizon_positions_table
-- The positions that the writers of one stream publish themselves ({table}: quoted name of the table).
-- $1 text: the stream's name in that table. inserted: the WAL that makes the rows durable ends at or before it.
SELECT
    p.instance_name::text AS writer,
    p.stream_id::bigint AS position,
    (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint AS inserted,
    (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint AS flushed
FROM {table} AS p
WHERE p.stream_name = $1::text

-- name: horizon_blockers
-- Who keeps us from reading sequences (ALTER SEQUENCE, TRUNCATE ... RESTART IDENTITY, DROP) or positions tables (LOCK,
-- ALTER TABLE, VACUUM FULL), in a transaction that is still open or that waits for others (we would wait behind it).
-- $1 oid[]: sequences. $2 oid[]: tables. One row per relation and culprit.
SELECT
    l.relation,
    l.virtualtransaction AS holder,
    l.pid,
    a.application_name,
    CASE
        WHEN getdatabaseencoding() <> 'SQL_ASCII' THEN left(a.query, 200)
        ELSE regexp_replace(left(a.query, 200), '[^\x01-\x7f]', '?', 'g')  -- where every byte may stand in a text
    END AS query,
    CASE WHEN getdatabaseencoding() <> 'SQL_ASCII' THEN p.gid ELSE regexp_replace(p.gid, '[^\x01-\x7f]', '?', 'g') END AS gid,
    extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared))::float8 AS age
FROM pg_locks AS l
LEFT JOIN pg_stat_get_activity(NULL) AS a ON a.pid = l.pid
LEFT JOIN pg_locks AS x
    ON l.pid IS NULL AND x.locktype = 'transactionid' AND x.virtualtransaction = l.virtualtransaction AND x.pid IS NULL
LEFT JOIN pg_prepared_xact() AS p ON p.transaction = x.transactionid
WHERE l.locktype = 'relation'
    AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
    AND (
        l.relation = ANY ($1::oid[])
        AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
        OR l.relation = ANY ($2::oid[]) AND l.mode = 'AccessExclusiveLock'
    )

-- name: bell
-- Wait in the server until one of the sequences may have moved, so that neither a writer nor the daemon pays for it. A hint:
-- what it says is not used for positions.
-- $1 oid[]: sequences. $2 bigint[]: their last values as they were polled (NULL: unused). $3 integer: how often to look.
-- $4 float8: seconds between two looks. $5 boolean: whether to end at the first look that finds only WAL of others.
-- One row with the first sequence whose value differs; with 0 where only others have written; none when nothing was found.
-- A new row writes WAL, so a look compares the end of the WAL only, as long as nobody writes any. `start` is read before
-- the first comparison of the values: what is taken later also writes later.
-- Short, because its snapshot holds back VACUUM, and its locks on the sequences hold up ALTER SEQUENCE.
WITH start AS MATERIALIZED (SELECT pg_current_wal_insert_lsn() AS lsn)
SELECT found.sequence
FROM start, generate_series(0, $3::integer) AS look
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN look > 0 AND pg_sleep($4::float8) IS NOT NULL AND pg_current_wal_insert_lsn() = start.lsn THEN NULL
        ELSE coalesce((
            SELECT known.sequence::bigint FROM unnest($1::oid[], $2::bigint[]) AS known (sequence, last_value)
            WHERE look >= 0 AND pg_sequence_last_value(known.sequence) IS DISTINCT FROM known.last_value
            LIMIT 1
        ), CASE WHEN look > 0 AND $5::boolean THEN 0 END)
    END AS sequence
    OFFSET 0  -- each look once
) AS found
WHERE found.sequence IS NOT NULL
LIMIT 1
