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
