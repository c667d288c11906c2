-- The sequences that have another value or another file than they had when they were read last. Those may have moved; the
-- poll then reads them by horizon_last_values.sql.
-- $1 oid[]: sequences. $2 bigint[]: their last values (NULL: unused). $3 bigint[]: their files. A sequence that was dropped, or that we
-- may not read any more, has none.
-- Blocks while somebody alters a sequence: run it with a lock_timeout.
SELECT known.sequence
FROM unnest($1::oid[], $2::bigint[], $3::bigint[]) AS known (sequence, last_value, file)
WHERE pg_relation_filenode(known.sequence) IS DISTINCT FROM known.file::oid
    OR CASE WHEN has_sequence_privilege(known.sequence, 'SELECT') THEN pg_sequence_last_value(known.sequence) END
        IS DISTINCT FROM known.last_value
