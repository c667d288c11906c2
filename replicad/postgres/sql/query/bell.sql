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
