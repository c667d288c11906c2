-- Up to where ids of the sequence ($1, an oid) have been given out by now: whatever is committed already is not above it.
-- NULL where we may not look, which must not pass for "none yet".
-- `file` is the sequence's file, read after that.
SELECT
    coalesce(
        pg_sequence_last_value(s.seqrelid),
        CASE WHEN has_sequence_privilege(s.seqrelid, 'USAGE, SELECT') THEN s.seqstart - 1 END
    ) AS upto,
    pg_relation_filenode(s.seqrelid)::bigint AS file
FROM pg_sequence AS s
WHERE s.seqrelid = $1
