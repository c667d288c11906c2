-- Wait in the server until one of the sequences may have moved, so that neither a writer nor the daemon pays for it. A hint:
-- what it says is not used for positions.
-- $1 oid[]: sequences. $2 bigint[]: their last values as they were polled (NULL: unused). $3 integer: how often to look.
-- $4 float8: seconds between two looks. One row when a value differs; none when it was looked for so often in vain.
-- A new row writes WAL, so a look compares the end of the WAL only, as long as nobody writes any. `start` is read before
-- the first comparison of the values: what is taken later also writes later.
-- Short, because its snapshot holds back VACUUM, and its locks on the sequences hold up ALTER SEQUENCE.
WITH start AS MATERIALIZED (SELECT pg_current_wal_insert_lsn() AS lsn)
SELECT TRUE AS moved
FROM start, generate_series(0, $3::integer) AS look
WHERE CASE
    WHEN look > 0 AND pg_sleep($4::float8) IS NOT NULL AND pg_current_wal_insert_lsn() = start.lsn THEN FALSE
    ELSE EXISTS (
        SELECT FROM unnest($1::oid[], $2::bigint[]) AS known (sequence, last_value)
        WHERE look >= 0 AND pg_sequence_last_value(known.sequence) IS DISTINCT FROM known.last_value
    )
END
LIMIT 1
