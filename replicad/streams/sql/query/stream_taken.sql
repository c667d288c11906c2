-- The last value of the sequence ($1, an oid): whatever is committed already is not above it, but ids up to it may be given
-- out again, on this server or on another one.
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
