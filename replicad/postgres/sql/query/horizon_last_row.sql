-- The highest id of a watched table that is there and not above the sequence's last value: it was given out, and the WAL
-- has that. Where there is no such row, the value below all ids of the sequence.
-- {table}, {id}: quoted names. $1: the last value. $2: the sequence's oid. `found`: the table that the name leads to now.
SELECT
    coalesce(
        (SELECT max(t.{id})::bigint FROM {table} AS t WHERE t.{id} <= $1::bigint),
        (SELECT greatest(s.seqmin, -9223372036854775807) - 1 FROM pg_sequence AS s WHERE s.seqrelid = $2::oid)
    ) AS last_row,
    to_regclass({name})::oid::bigint AS found
