-- A range of a stream as finished lines, by id. Filled in by rows.py. The last conditions are evaluated once, in the
-- snapshot that reads the rows: RS004 where the range was trimmed, RS005 where the name leads to another table.
-- A line beyond the bound is cut off here (varchar() looks at nothing but the length of the others), so that no line
-- takes much more memory than the bound on its way; its reader sees that it is too long.
SELECT pg_catalog."varchar"({head} || {token} || ' ' || {row}, {cut}, true)
FROM {table} AS t
WHERE t.{id} > {after} AND t.{id} <= {upto} AND {writers}{skip} AND (SELECT {retained}) AND {same}
ORDER BY t.{id}{limit}
