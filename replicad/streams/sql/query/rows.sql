-- How the rows of a stream are read: one by one, by COPY and in blocks.

-- name: rows_few
-- A few rows of a stream as finished lines in one value; within is rows_copy. `more`: they are too many bytes for that (the
-- caller then copies them). Without ORDER BY, window and aggregate take the lines in the order of the query within.
SELECT
    string_agg(convert_to(counted.line, 'UTF8') || '\x0a'::bytea, ''::bytea) FILTER (WHERE counted.total <= {most}) AS data,
    coalesce(max(counted.total) > {most}, FALSE) AS more
FROM (
    SELECT lines.line, sum(octet_length(lines.line)) OVER (ROWS UNBOUNDED PRECEDING) AS total
    FROM ({lines}) AS lines (line)
) AS counted

-- name: rows_copy
-- A range of a stream as finished lines, by id. Filled in by rows.py. The last conditions are evaluated once, in the
-- snapshot that reads the rows: RS004 where the range was trimmed, RS005 where the name leads to another table.
-- A line beyond the bound is cut off here (varchar() looks at nothing but the length of the others), so that no line
-- takes much more memory than the bound on its way; its reader sees that it is too long.
SELECT pg_catalog."varchar"({head} || {token} || ' ' || {row}, {cut}, true)
FROM {table} AS t
WHERE t.{id} > {after} AND t.{id} <= {upto} AND {writers}{skip} AND (SELECT {retained}) AND {same}
ORDER BY t.{id}{limit}

-- name: rows_blocks
-- A range of a stream without batches, {step} ids at a time: the number of rows, and after an end of line their lines, each of
-- them with U+0001 behind it. Ends of lines within rows stay: to replace them here takes a third of the time. The conditions
-- are those of rows_copy. Both orders are asked for, and cost no sort: a series counts its own rows, and the index gives those
-- of the table. A line of more than {cut} characters is cut off, so that no block takes much memory.
SELECT block.lines
FROM pg_catalog.generate_series({after}::bigint, {upto}::bigint - 1, {step}::bigint) WITH ORDINALITY AS part (low, number)
CROSS JOIN LATERAL (
    SELECT pg_catalog.count(*) || E'\n' || pg_catalog.string_agg(
        pg_catalog."varchar"({head} || {token} || ' ' || {row}, {cut}, true), E'\x01' ORDER BY t.{id}) || E'\x01' AS lines
    FROM {table} AS t
    WHERE t.{id} > part.low AND t.{id} <= part.low + LEAST({step}, {upto}::bigint - part.low) AND {writers}{skip}
        AND (SELECT {retained}) AND {same}
) AS block
WHERE block.lines IS NOT NULL
ORDER BY part.number

-- name: rows_count
-- How many rows a range has, counted no further than the limit. RS005 where the name leads to another table.
SELECT count(*)
FROM (SELECT FROM {table} AS t WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint AND {same} LIMIT $3) counted

-- name: rows_ends
-- The first and the last id of a range; NULL where it is empty. RS005 where the name leads to another table.
SELECT min(t.{id})::bigint AS first, max(t.{id})::bigint AS last
FROM {table} AS t
WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint AND {same}

-- name: rows_earliest
-- The oldest token that nothing is missing after: what trim left, else just below the first id that there can be.
-- RS005 where the name leads to another table.
SELECT coalesce(s.trimmed_upto, least(
    (SELECT min(t.{id}) FROM {table} AS t WHERE {same}) - 1,
    (SELECT q.seqstart - 1 FROM pg_sequence q WHERE q.seqrelid = s.sequence)))::bigint
FROM {schema}.stream s WHERE s.number = $1

-- name: rows_last_token
-- The last id in a range of a stream that has one writer; answered by the index alone. RS005 where the name leads to
-- another table.
SELECT max(t.{id})::bigint FROM {table} AS t WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint AND {same}

-- name: rows_last_tokens
-- The last id of each writer in a range. RS005 where the name leads to another table.
SELECT {instance} AS writer, max(t.{id})::bigint AS token
FROM {table} AS t
WHERE t.{id} > $1::bigint AND t.{id} <= $2::bigint{skip} AND {same}
GROUP BY 1
