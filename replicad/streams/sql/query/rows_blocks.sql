-- A range of a stream without batches, {step} ids at a time: the number of rows, and on the lines after it their lines. The
-- conditions are those of rows_copy. Both orders are asked for, and cost no sort: a series counts its own rows, and the index
-- gives those of the table. A line of more than {cut} characters is cut off, so that no block takes much memory.
SELECT block.lines
FROM pg_catalog.generate_series({after}::bigint, {upto}::bigint - 1, {step}::bigint) WITH ORDINALITY AS part (low, number)
CROSS JOIN LATERAL (
    SELECT pg_catalog.count(*) || E'\n' || pg_catalog.string_agg(
        pg_catalog."varchar"({head} || {token} || ' ' || {row}, {cut}, true), E'\n' ORDER BY t.{id}) || E'\n' AS lines
    FROM {table} AS t
    WHERE t.{id} > part.low AND t.{id} <= part.low + LEAST({step}, {upto}::bigint - part.low) AND {writers}{skip}
        AND (SELECT {retained}) AND {same}
) AS block
WHERE block.lines IS NOT NULL
ORDER BY part.number
