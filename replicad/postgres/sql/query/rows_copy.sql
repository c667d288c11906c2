-- A range of a stream as finished lines, by id. Filled in by rows.py. The last condition raises RS004 where the range
-- was trimmed, in the snapshot that reads the rows.
SELECT {head} || {token} || ' ' || {row}
FROM {table} AS t
WHERE t.{id} > {after} AND t.{id} <= {upto} AND {writers} AND (SELECT {retained})
ORDER BY t.{id}
