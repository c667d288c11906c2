-- Second statement of a poll, sent when the first has been answered: who may still write to the watched tables.
-- $1 oid[]: watched tables. $2 oid[]: watched sequences. $3 oid[]: those of the tables from which the sessions of this
-- process that $4 (pids) and $5 (their starts) name only delete: there these do not count. Every other session counts,
-- whatever it calls itself; so does any of these on any other table (a trigger on DELETE may insert there).
-- $6 boolean: whether reservations count only with a proof (a second advisory lock, streams/sql/109_stream_prove.sql); its
-- secret is {key}. A secret that is NULL (missing, or it may not be read) makes every reservation count.
-- $7 oid[]: sequences that give ids to one of the tables only; $8 oid[]: that table. Who has taken an id of such a sequence
-- holds it: nextval() locks the sequence until the transaction ends, also where the id was taken before the INSERT, within
-- a savepoint that was rolled back, or for a table that becomes a partition in the same transaction.
-- {moved}: relations whose name leads to another one, and sequences that feed other columns than before ($9 to $13 are
-- the arguments of streams/sql/118_stream_moved.sql). Why it is enough to look here, with a snapshot that is later than the
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
