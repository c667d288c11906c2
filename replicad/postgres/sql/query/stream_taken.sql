-- Up to where ids of the sequence ($1, an oid) have been given out by now: whatever is committed already is not above it.
SELECT coalesce(pg_sequence_last_value(s.seqrelid), s.seqstart - 1) FROM pg_sequence AS s WHERE s.seqrelid = $1
